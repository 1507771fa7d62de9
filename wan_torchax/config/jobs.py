"""Many prompts in one run: a list or a file becomes a list of jobs, each the overrides of one video. No JAX, no torch.

    python run.py prompts=prompts.txt                     # one prompt a line
    python run.py prompts=jobs.csv seeds=4                # columns: prompt, negative_prompt, seed, or any other key
    python run.py prompts=jobs.jsonl shard=3/12           # every twelfth job, from the third: one machine's of twelve
"""
import csv
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

from wan_torchax.config.commandline import rewrite
from wan_torchax.config.schema import ConfigError


@dataclass
class Job:
    """One video: where it was written in the list, its overrides, or why it cannot be made."""

    name: str  # its folder
    overrides: list[str]
    error: str | None = None


# What a host that has some shows under /dev.
CHIPS = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia[0-9]*",)}


def check_launcher(launcher, mesh) -> None:
    """Refuse a Hydra launcher that would put two jobs on the chips of one host, which take one process.

    Hydra's own launcher runs one job after the other; on CPUs jobs may share a machine.
    """
    name, platform = launcher._target_.rpartition(".")[2], mesh.platform or chips_here()
    if name == "BasicLauncher" or platform == "cpu":
        return
    if name == "SlurmLauncher":
        owned = launcher.tasks_per_node == 1 and "exclusive" in launcher.additional_parameters
        remedy = "use hydra/launcher=slurm, which asks for whole nodes"
    elif name == "RayLauncher":
        needed, remote = mesh.devices or 1, launcher.ray.remote
        taken = remote.get("num_gpus") if platform == "gpu" else remote.get("resources", {}).get("TPU")
        owned = (taken or 0) >= needed
        resource = f"num_gpus={needed}" if platform == "gpu" else f"resources={{TPU:{needed}}}"
        remedy = f"set hydra.launcher.ray.remote.{resource}"
    else:
        owned, share = False, "give each machine its share with shard=1/2 and so on"
        remedy = f"leave hydra/launcher out to run one after the other, or {share}"
    if not owned:
        raise ConfigError(
            f"hydra/launcher: {name} may start two jobs on one host, and its {platform} takes one process; {remedy}"
        )


def chips_here() -> str:
    """The platform JAX would choose, without starting it."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu"
    for kind, patterns in CHIPS.items():
        if any(any(Path("/dev").glob(pattern)) for pattern in patterns):
            return kind
    return "cpu"


def are_listed(config) -> bool:
    """Whether the config asks for a list of videos."""
    return config.prompts is not None or config.seeds is not None


def read(config) -> list[Job]:
    """Every job the config asks for: prompts × seeds, in order; those of this shard."""
    rows = read_prompts(config.prompts) if config.prompts is not None else [(1, {}, None)]
    seeds = read_seeds(config)
    jobs = []
    for number, row, error in rows:
        for seed in seeds:
            name = f"{number:04d}" + (f"-seed{seed}" if seed is not None else "")
            values = row | ({} if seed is None else {"seed": seed})
            jobs.append(Job(name, rewrite([f"{key}={text(value)}" for key, value in values.items()]), error))
    part, parts = read_shard(config.shard)
    return jobs[part - 1 :: parts]


def text(value) -> str:
    return json.dumps(value) if isinstance(value, (bool, list, dict)) or value is None else str(value)


def read_prompts(source: str):
    """(line number, {key: value}, error) of every prompt in a JSON list or a .txt, .csv or .jsonl file."""
    if source.lstrip().startswith("["):
        try:
            prompts = json.loads(source)
        except ValueError as error:
            remedy = """write prompts='["first", "second"]'"""
            raise ConfigError(f"prompts={source}: not a JSON list ({error}); {remedy}") from error
        entries = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
        rows = [(number, *checked(entry, number)) for number, entry in enumerate(entries, start=1)]
    else:
        rows = list(read_file(Path(source)))
    if not rows:
        raise ConfigError(f"prompts={source}: holds no prompt")
    return rows


def read_file(path: Path):
    if path.suffix not in READERS:
        raise ConfigError(f"prompts={path}: unknown kind of file; use .txt (a prompt a line), .csv or .jsonl")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={path}: cannot be read ({error})") from error
    for number, row, error in READERS[path.suffix](content):
        yield (number, *checked(row, number)) if error is None else (number, {}, error)


def read_lines(content):
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield number, {"prompt": line.strip()}, None


def read_csv(content):
    reader = csv.DictReader(io.StringIO(content), restkey="", restval=None)
    for row in reader:
        extra = row.pop("", None)
        error = f"line {reader.line_num}: more fields than the header has ({extra})" if extra else None
        yield reader.line_num, {key.strip(): value for key, value in row.items() if value not in (None, "")}, error


def read_jsonl(content):
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line), None
        except ValueError as error:
            yield number, {}, f"line {number}: not JSON ({error})"


READERS = {".txt": read_lines, ".csv": read_csv, ".jsonl": read_jsonl}


def checked(row, number):
    """The row, and what is wrong with it."""
    if not isinstance(row, dict):
        return {}, f"line {number}: not a mapping of keys to values"
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        return {}, f"line {number}: no prompt"
    return row, None


def read_seeds(config) -> list:
    """`seeds=8`: eight from `seed` on; `seeds=[3,5]`: those; unset: whatever each job says."""
    if config.seeds is None:
        return [None]
    if isinstance(config.seeds, int) and config.seeds > 0:
        return list(range(config.seed, config.seed + config.seeds))
    try:
        return list(dict.fromkeys(int(seed) for seed in config.seeds))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"seeds={config.seeds}: how many, or a list such as seeds=[1,2,3]") from error


def read_shard(shard: str | None) -> tuple[int, int]:
    """`3/12` -> (3, 12)."""
    try:
        part, parts = (1, 1) if shard is None else map(int, shard.split("/"))
    except ValueError as error:
        raise ConfigError(f"shard={shard}: write part/parts, e.g. shard=3/12") from error
    if not 1 <= part <= parts:
        raise ConfigError(f"shard={shard}: the part must be from 1 to {max(parts, 1)}")
    return part, parts
