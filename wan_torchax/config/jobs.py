"""Many prompts in one run: a list or file becomes a list of jobs, each with the overrides of a video. No JAX, no torch.

    python run.py prompts=prompts.txt                     # one prompt per line
    python run.py prompts=jobs.csv seeds=4                # columns: prompt, negative_prompt, seed, or another key
    python run.py prompts=jobs.jsonl shard=3/12           # every twelfth job from the third on, for one of 12 machines

A list is untrusted: a line may set what trust.py allows an artefact to set, and name files in the list's folder, in the
columns image, last_image, video, pose, face, background, mask, references and audio.
"""
import csv
import hashlib
import io
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from wan_torchax.config import inputs, trust
from wan_torchax.config.commandline import TEXT_KEYS, key_of
from wan_torchax.config.geometry import device_count
from wan_torchax.config.schema import ConfigError

log = logging.getLogger("wan")
MOST_JOBS = 100_000
MOST_TOGETHER = 64  # denoised as one batch
APART = ("prompt.text", "prompt.negative", "seed")  # may differ between videos of a batch
NAME_LETTERS = 40  # of the prompt in a folder's name


@dataclass
class Job:
    """One video: its overrides, or why it cannot be made."""

    name: str  # its folder, derived from the line's content: adding a line does not move the others
    overrides: list[str]
    error: str | None = None


# Device files of a host with such chips.
CHIPS = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia[0-9]*",)}


def check_launcher(launcher, mesh) -> None:
    """Reject a Hydra launcher that could start two jobs on the chips of one host: they allow only one process.

    Hydra's own launcher runs one job after the other; on CPUs, jobs may share a machine.
    """
    name, platform = launcher._target_.rpartition(".")[2], mesh.platform or chips_here()
    if name == "BasicLauncher" or platform == "cpu":
        return
    if name == "SlurmLauncher":
        owned = launcher.tasks_per_node == 1 and "exclusive" in launcher.additional_parameters
        remedy = "use hydra/launcher=slurm, which asks for whole nodes"
    elif name == "RayLauncher":
        needed, remote = max(device_count(mesh), 1), launcher.ray.remote
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
    """The platform that JAX would choose, without starting JAX."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu"
    for kind, patterns in CHIPS.items():
        if any(any(Path("/dev").glob(pattern)) for pattern in patterns):
            return kind
    return "cpu"


def are_listed(config) -> bool:
    """Whether the config asks for a list of videos. A plan is one of `images` at once."""
    several = None if config.task == "plan" else config.images
    return not (config.prompts is config.seeds is several is None)


def read(config) -> list[Job]:
    """Every job the config asks for: prompts × seeds, in order."""
    rows = read_prompts(config.prompts) if config.prompts is not None else [(1, {}, None)]
    seeds, folder = read_seeds(config), folder_of(config.prompts)
    if len(rows) * len(seeds) > MOST_JOBS:
        raise ConfigError(f"prompts and seeds: {len(rows)} x {len(seeds)} videos; at most {MOST_JOBS} in one list")
    jobs: list[Job] = []
    names: Counter[str] = Counter()
    for number, row, error in rows:
        for seed in seeds:
            job = make_job(number, row | ({} if seed is None else {"seed": seed}), folder, error)
            if seed is not None and row.get("seed") is not None:
                log.warning("line %d: its own seed=%s gives way to seeds=%s", number, row["seed"], seed)
            names[job.name] += 1
            if names[job.name] > 1:  # a duplicate line
                job.name += f"-{names[job.name]}"
            jobs.append(job)
    return jobs


def make_job(number: int, row: dict, folder: Path | None, error: str | None) -> Job:
    """One line of the list; `folder` is the list's, if it is a file."""
    said = {TEXT_KEYS.get(key, key): value for key, value in row.items() if value is not None}
    try:
        files = {key: files_of(key, said.pop(key), folder) for key in inputs.FILES if key in said}
        values = trust.parsed(said)
    except ConfigError as problem:
        error = error or f"line {number}: {problem}"
    if error is not None:
        return Job(f"line{number:04d}", [], error)
    named = {key: [os.path.relpath(path, folder) for path in paths] for key, paths in files.items()}
    return Job(name_of(values | named), trust.overrides(values) + [file_override(key, files[key]) for key in files])


def folder_of(source: str | None) -> Path | None:
    """The folder of a list that is a file."""
    return None if source is None or source.lstrip().startswith("[") else Path(source).resolve().parent


def files_of(key: str, value, folder: Path | None) -> list[Path]:
    """A line's picture or video: a file in the list's folder, or several (references)."""
    names = trust.read_literal(value) if isinstance(value, str) and value.startswith("[") else value
    names = names if isinstance(names, list) else [names]
    named = [name for name in names if isinstance(name, str) and name and "\0" not in name]
    paths = [path for name in named if folder and (path := (folder / name).resolve()).is_relative_to(folder)]
    if not paths or len(paths) != len(names):
        raise ConfigError(f"{key}={trust.shown(value)}: a list may only name files in its own folder")
    if len(paths) > 1 and key != "references":
        raise ConfigError(f"{key}={trust.shown(value)}: takes one file")
    return paths


def file_override(key: str, paths: list[Path]) -> str:
    texts = [str(path) for path in paths]
    return f"{key}={trust.written(texts if key == 'references' else texts[0])}"


def name_of(values: dict) -> str:
    """A folder's name: words of the prompt, a hash of the line, the seed."""
    text, seed = values.get("prompt.text"), values.get("seed")
    end = "" if seed is None else f"seed{seed}"
    if text is None:
        return end
    start = re.sub(r"[^a-z0-9]+", "-", text.lower())[:NAME_LETTERS].strip("-") or "prompt"
    line = {key: value for key, value in values.items() if key != "seed"}
    digest = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join(filter(None, (start, digest, end)))


def read_prompts(source: str):
    """(line number, {key: value}, error) of every prompt in a JSON list or a .txt, .csv or .jsonl file."""
    if source.lstrip().startswith("["):
        try:
            prompts = json.loads(source)
        except (ValueError, RecursionError) as error:
            remedy = """write prompts='["first", "second"]'"""
            raise ConfigError(f"prompts={trust.shown(source)}: not a JSON list ({error}); {remedy}") from error
        entries = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
        rows = [(number, *checked(entry, number)) for number, entry in enumerate(entries, start=1)]
    else:
        rows = list(read_file(Path(source)))
    if not rows:
        shown = source if folder_of(source) else trust.shown(source)
        raise ConfigError(f"prompts={shown}: holds no prompt; write one a line")
    return rows


def read_file(path: Path):
    if path.suffix not in READERS:
        raise ConfigError(f"prompts={path}: unknown kind of file; use .txt (a prompt a line), .csv or .jsonl")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts={path}: cannot be read as UTF-8 text ({error})") from error
    for number, row, problem in READERS[path.suffix](content):
        yield (number, *checked(row, number)) if problem is None else (number, {}, problem)


def read_lines(content):
    for number, line in enumerate(content.split("\n"), start=1):  # not splitlines: it also splits at Unicode separators
        if line.strip():
            yield number, {"prompt": line.strip()}, None


def read_csv(content):
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(content))
    for row in reader:
        extra = row.pop(None, None)
        error = f"line {reader.line_num}: more fields than the header has ({extra})" if extra else None
        yield reader.line_num, {key.strip(): value for key, value in row.items() if value not in (None, "")}, error


def read_jsonl(content):
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line), None
        except (ValueError, RecursionError) as error:
            yield number, {}, f"line {number}: not JSON ({error})"


READERS = {".txt": read_lines, ".csv": read_csv, ".jsonl": read_jsonl}


def checked(row, number):
    """The row, and its error if it is invalid."""
    if not isinstance(row, dict):
        return {}, f"line {number}: not a mapping of keys to values"
    if not isinstance(row.get("prompt"), str):
        return {}, f"line {number}: no prompt"
    return row, None


def read_seeds(config) -> list:
    """`seeds=8`, or `images=8`: eight from `seed` on; `seeds=[3,5]`: those; unset: each job's own."""
    if config.images is not None:
        if config.seeds is not None or not 0 < config.images <= MOST_TOGETHER:
            raise ConfigError(f"images={config.images}: from 1 to {MOST_TOGETHER}, and without seeds")
        return list(range(config.seed, config.seed + config.images))
    if config.seeds is None:
        return [None]
    if isinstance(config.seeds, int) and 0 < config.seeds <= MOST_JOBS:
        return list(range(config.seed, config.seed + config.seeds))
    if OmegaConf.is_list(config.seeds) and config.seeds and all(type(seed) is int for seed in config.seeds):
        return list(dict.fromkeys(config.seeds))
    most = f"how many (from 1 to {MOST_JOBS}), or a list such as seeds=[1,2,3]"
    raise ConfigError(f"seeds={trust.shown(config.seeds)}: {most}")


def share(jobs: list[Job], shard: str | None) -> list[Job]:
    """This machine's jobs: with `3/12` every twelfth, from the third on."""
    part, parts = read_shard(shard)
    return jobs[part - 1 :: parts]


def groups(jobs: list[Job], most: int) -> Iterator[list[Job]]:
    """The jobs in order: at most so many together that follow each other and differ only in APART."""

    def settings(job: Job) -> list[str | None]:
        return [job.error, *(text for text in job.overrides if key_of(text) not in APART)]

    for _, alike in itertools.groupby(jobs, settings):
        while group := list(itertools.islice(alike, most)):
            yield group


def read_shard(shard: str | None) -> tuple[int, int]:
    """`3/12` -> (3, 12)."""
    try:
        part, parts = (1, 1) if shard is None else map(int, shard.split("/"))
    except ValueError as error:
        raise ConfigError(f"shard={shard}: write part/parts, e.g. shard=3/12") from error
    if not 1 <= part <= parts:
        raise ConfigError(f"shard={shard}: the part must be from 1 to {max(parts, 1)}")
    return part, parts
