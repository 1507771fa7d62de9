"""Adapters for a transformer: LoRA, LoHa, LoKr, DoRA, OFT and weight diffs, in the formats of the common trainers.

    checkpoints = on(checkpoints, config)       # with their adapters: files located and hashed, headers read
    changes = place(adapters, shapes)           # {checkpoint name: [Change, …]}

Every key of a file is accounted for: it is applied, or belongs to another model of the family (warning), or to none
(error). Rank and alpha are read from the file. weights.py merges adapters while it loads; nothing here needs a device.
The family defines how trainers name its modules.
"""
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
from omegaconf import DictConfig
from safetensors import safe_open

from wan_torchax import own_path
from wan_torchax.config import adapters as config_adapters
from wan_torchax.config.adapters import PEFT_FILE, PEFT_SETTINGS
from wan_torchax.config.registry import family_of
from wan_torchax.config.resolve import Checkpoint
from wan_torchax.config.schema import Adapter, ConfigError
from wan_torchax.config.wording import listed
from wan_torchax.models.family import AdapterNames, Family, Rows
from wan_torchax.records.fingerprints import digest, hash_file
from wan_torchax.runtime.checkpoint import read_header
from wan_torchax.runtime.formats import STORED_DTYPES, Stored, split_rows, without_ones
from wan_torchax.runtime.merging import Change, Form

log = logging.getLogger("wan")
PROBLEMS_SHOWN = 20
EXAMPLES = 3
PATTERN_LETTERS, PATTERN_REPEATS, MOST_PATTERNS = 200, 3, 10_000  # limits for regular expressions in a file
INTEGERS = {"I64": "int64", "I32": "int32"}  # some trainers store alpha as an integer

LOHA = "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"
LOKR = "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"
TUCKER = "mid", "hada_t1", "hada_t2", "lokr_t2"  # between two factors, of a convolution
OFT = "oft_blocks", "rescale"
# Key suffix -> kind of tensor. DiffSynth and PEFT insert the adapter's name before the last part.
ENDS = {
    r"lora_(?:A|down)(?:\.\w+)?\.weight|(?:lora\.)?down\.weight": "down",
    r"lora_(?:B|up)(?:\.\w+)?\.weight|(?:lora\.)?up\.weight": "up",
    r"lora_mid\.weight": "mid", r"lora_B(?:\.\w+)?\.bias": "up_bias", r"alpha": "alpha",
    r"diff": "diff", r"diff_b": "diff_b", r"diff_m": "diff_m",
    r"dora_scale|lora_magnitude_vector(?:\.\w+)*": "norms",
    **{name: name for name in (*LOHA, *LOKR, *TUCKER[1:], *OFT)},
}
WHOLE = ("down", "alpha")  # what layers that are one in a file share
MOST_TURNS = 16  # of BOFT
PARTS = "a low-rank factor nor a diff"
OTHER_KINDS = {"oft_(?!blocks)": "PEFT's OFT", "boft_": "PEFT's BOFT", "set_weight": "a whole set of weights"}


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class File:
    """One adapter file and how it is applied."""

    name: str
    path: Path
    sha256: str
    strength: float | list[float]  # or one for each step
    allow_unmatched: bool
    blocks: tuple[float, ...] = ()  # factors of the strength, by the number of a block in its list


def on(checkpoints: Mapping[str, Checkpoint], config: DictConfig, local_only: bool = False) -> dict[str, Checkpoint]:
    """The checkpoints with the adapters that the config applies to them. With `local_only`, components whose adapters
    are not all local are dropped."""
    adapted, experts = dict(checkpoints), list(config.model.experts)
    for name, row in config_adapters.rows(config).items():
        for component in config_adapters.components(row, experts) if row.strength else ():
            if component not in adapted:
                continue
            path = find(name, row, local_only)
            if path is None:
                del adapted[component]
                continue
            parse(path, family_of(config).adapters)
            allow, blocks = config.adapter["allow_unmatched"], tuple(row.blocks)
            file = File(name, path, sha256_of(path), row.strength, allow, blocks)
            base = adapted[component]
            settings = digest(path.parent.glob(PEFT_SETTINGS)) if path.name == PEFT_FILE else ""
            strengths = f"{row.strength}{list(blocks) if blocks else ''}"
            fingerprint = f"{base.fingerprint}+{file.sha256[:16]}{settings}*{strengths}"
            adapted[component] = replace(base, fingerprint=fingerprint, adapters=(*base.adapters, file))
    return adapted


def described(config: DictConfig) -> dict[str, dict]:
    """The adapters as recorded in a run's metrics and video: file hash, strengths and target, by name."""
    rows = {name: row for name, row in config_adapters.rows(config).items() if row.strength}
    paths = {name: find(name, row, local_only=True) for name, row in rows.items()}
    return {
        name: {"sha256": paths[name] and sha256_of(paths[name]), "strength": row.strength, "target": row.target}
        | ({"blocks": row.blocks} if row.blocks else {})
        for name, row in rows.items()
    }


def find(name: str, row: Adapter, local_only: bool) -> Path | None:
    """An adapter's file: local, or downloaded from the Hub, with PEFT's settings beside it."""
    if row.path is not None:
        return config_adapters.file_of(own_path(row.path))
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    wanted = Path(row.file)
    beside = [str(wanted.with_name(PEFT_SETTINGS))] if wanted.name == PEFT_FILE else []
    try:
        for file in (*beside, row.file):
            key = f"adapter.{name}: {row.repo}, {file}"
            path = hf_hub_download(row.repo, file, revision=row.revision, local_files_only=local_only)
        return Path(path)
    except LocalEntryNotFoundError as error:
        if local_only:
            return None
        remedy = "connect once, or download it elsewhere and set path"
        raise ConfigError(f"{key}: the Hub cannot be reached and it is not in the local cache; {remedy}") from error
    except (EntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"{key}: not on the Hub, or not yours to read ({type(error).__name__})") from error


def sha256_of(path: Path) -> str:
    """The file's SHA-256. In the Hub's cache, LFS blobs are named by it."""
    if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name):
        return path.resolve().name
    status = path.stat()
    return hash_file(path, status.st_mtime_ns, status.st_size).hex()


# ---------------------------------------------------------------- parsing


@dataclass
class Contents:
    """A file's tensors by module, in diffusers' names, and the keys that match no model of the family."""

    # Rows are a layer in the file that is several in the model, or is laid out otherwise; see `split_layers`.
    modules: dict[str | Rows, dict[str, Stored]] = field(default_factory=lambda: defaultdict(dict))
    keys: dict[tuple[str | Rows, str], str] = field(default_factory=dict)  # (module, kind) -> the key in the file
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # with other keys
    settings: dict = field(default_factory=dict)  # PEFT's

    def add(self, module: str | Rows, kind: str, stored: Stored, key: str) -> None:
        if (module, kind) in self.keys:
            self.problems.append(f"{key}: is there twice, as {self.keys[module, kind]} too")
        else:
            self.modules[module][kind], self.keys[module, kind] = stored, key


def parse(path: Path, names: AdapterNames) -> Contents:
    """Classify every key of a file; reads only the header."""
    try:
        header = read_header(path)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from error
    if not header:
        raise ConfigError(f"{path}: has no tensors; download it again")
    contents, keys, ends = Contents(settings=peft_settings(path)), {}, "|".join(ENDS)
    for key in header:
        kind = next((name for part, name in OTHER_KINDS.items() if re.search(rf"[._]{part}", key)), None)
        if kind is not None:
            others = "LoRA, LoHa, LoKr, DoRA, LyCORIS' OFT and diffs are"
            raise ConfigError(f"{path}: {key} is {kind}, which is not implemented; {others}")
        keys[key] = re.fullmatch(rf"{names.prefix}(?P<module>[\w.]+?)\.(?P<end>{ends})", key)
    strangers = [key for key in header if not re.search(rf"\.(?:{ends})$", key)]
    if len(strangers) == len(header):
        remedy = "a whole model is a checkpoint folder, named by model.path"
        raise ConfigError(f"{path}: not an adapter: {strangers[0]} and all others are neither {PARTS}; {remedy}")
    contents.problems = [f"{key}: neither {PARTS}" for key in strangers]
    native = any(match and names.native.search(match["module"]) for match in keys.values())
    for key, match in keys.items():
        if key in strangers:
            continue
        kind = match and next(kind for end, kind in ENDS.items() if re.fullmatch(end, match["end"]))
        module = match and names.translate(match["module"], native)
        if kind == "diff_m" and module is None:
            module = names.modulation(match["module"])
        if module is None:
            contents.unknown.append(key)
        else:
            contents.add(module, kind, header[key], key)
    if contents.settings.get("use_dora") and not any("norms" in parts for parts in contents.modules.values()):
        raise ConfigError(f"{path}: is DoRA by its settings, and has no magnitudes; save it with them")
    return contents


def peft_settings(path: Path) -> dict:
    """lora_alpha and its patterns, which PEFT does not store as tensors: diffusers writes them to the file's metadata,
    PEFT to adapter_config.json."""
    try:
        with safe_open(path, framework="numpy") as handle:
            text = (handle.metadata() or {}).get("lora_adapter_metadata")
        if text is not None:
            settings = {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}
        elif path.name == PEFT_FILE:
            settings = dict(json.loads(path.with_name(PEFT_SETTINGS).read_text()))
        else:
            return {}
        patterns = {str(name): float(value) for name, value in (settings.get("alpha_pattern") or {}).items()}
        alpha, rank = settings.get("lora_alpha", settings.get("alpha")), int(settings.get("r") or 1)
        flags = {name: settings.get(name) is True for name in ("use_dora", "use_rslora")}
        alpha = None if alpha is None else float(alpha)
        if not all(map(math.isfinite, (alpha or 0, *patterns.values()))):
            raise ValueError("an alpha is not a finite number")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        remedy = f"{PEFT_FILE} needs the {PEFT_SETTINGS} that PEFT saved beside it"
        raise ConfigError(f"{path}: its settings cannot be read ({error}); {remedy}") from error
    if len(patterns) > MOST_PATTERNS:
        raise ConfigError(f"{path}: alpha_pattern has {len(patterns)} entries; at most {MOST_PATTERNS}")
    for pattern in patterns:
        check_pattern(path, pattern)
    # As in PEFT: a pattern matches the end of a module's name, starting at a dot.
    compiled = {re.compile(rf"(?:.*\.)?(?:{pattern})$"): value for pattern, value in patterns.items()}
    return {"lora_alpha": alpha, "alpha_pattern": compiled, "r": rank, **flags}


def check_pattern(path: Path, pattern: str) -> None:
    """Reject invalid regular expressions, and those that could backtrack catastrophically: the file is untrusted."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{path}: alpha_pattern {pattern[:80]!r} is no regular expression ({error})") from error
    repeats = len(re.findall(r"(?<!\\)[*+?{]", pattern))
    if len(pattern) > PATTERN_LETTERS or repeats > PATTERN_REPEATS or re.search(r"\)[*+{]", pattern):
        raise ConfigError(f"{path}: alpha_pattern {pattern[:80]!r} is more than a name of modules; leave it out")


def scale_of(contents: Contents, module: str, rank: int | None) -> float:
    """alpha / rank if the file gives alpha, else 1. Without a rank, alpha means nothing but to PEFT, whose settings say
    one."""
    alpha, settings = contents.modules[module].get("alpha"), contents.settings
    if alpha is not None:
        return read_number(alpha) / rank if rank else 1.0
    rank = rank or settings.get("r", 1)
    named = (value for pattern, value in settings.get("alpha_pattern", {}).items() if pattern.match(module))
    alpha = next(named, settings.get("lora_alpha"))  # as in PEFT, the first match wins
    if alpha is None:
        return 1.0
    return alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)


def read_number(stored: Stored) -> float:
    kind = STORED_DTYPES.get(stored.dtype) or INTEGERS.get(stored.dtype)
    if kind is None or math.prod(stored.shape) != 1:
        raise ConfigError(f"{stored.file}: an alpha of {stored.dtype} and shape {stored.shape}; it must be one number")
    number = float(numpy.fromfile(stored.file, kind, 1, offset=stored.offset)[0])
    if not math.isfinite(number):
        raise ConfigError(f"{stored.file}: an alpha is not a finite number; download it again, or leave it out")
    return number


# ---------------------------------------------------------------- matching against the model


@dataclass
class Placement:
    """What adapters change: tensors that are merged, and factors beside weights."""

    merged: dict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[str, list[tuple[int, Change]]] = field(default_factory=lambda: defaultdict(list))  # with first ranks
    strengths: list[tuple[slice, float | list[float]]] = field(default_factory=list)  # of ranks of factors

    def beside_of(self, adapter: File, placed: list[tuple[str, Change]], layers: Collection[str]) -> None:
        """Put an adapter's low-rank factors behind those before it, and the rest among what is merged."""
        begin, rank = self.rank, 0
        for name, change in placed:
            if name in layers and change.form.is_plain and len(change.factors) == 2:
                self.beside[name].append((begin, replace(change, scale=change.scale * block_factor(adapter, name))))
                rank = max(rank, change.factors[1].shape[0])
            elif isinstance(adapter.strength, list):
                reason = f"{name} is changed by more than low-rank factors in the blocks, so it is merged"
                raise ConfigError(f"adapter.{adapter.name}.strength={adapter.strength}: {reason}; give one number")
            else:
                self.merge(adapter, name, change)
        self.strengths.append((slice(begin, begin + rank), adapter.strength))

    def merge(self, adapter: File, name: str, change: Change) -> None:
        if strength := adapter.strength * block_factor(adapter, name):
            self.merged[name].append(with_strength(change, strength))

    @property
    def rank(self) -> int:
        return self.strengths[-1][0].stop if self.strengths else 0


def place(adapters: tuple[File, ...], shapes: Mapping[str, tuple], family: Family) -> dict[str, list[Change]]:
    """The changes that merged adapters make to tensors of these names and shapes. Raises one error with all
    mismatches."""
    return dict(place_all(adapters, shapes, family).merged)


def place_all(
    adapters: tuple[File, ...], shapes: Mapping[str, tuple], family: Family, layers: Collection[str] = (), room: int = 0
) -> Placement:
    """All changes: low-rank factors of these layers' weights beside them, if there is room for so many ranks."""
    placement = Placement()
    for adapter, placed in matched(adapters, shapes, family):
        if room:
            placement.beside_of(adapter, placed, layers)
            continue
        for name, change in placed:
            placement.merge(adapter, name, change)
    if placement.rank > room > 0:
        remedy = f"set adapter.rank={placement.rank}, or adapter.mode=merge"
        raise ConfigError(f"adapter.rank={room}: the adapters' ranks add up to {placement.rank}; {remedy}")
    return placement


def matched(
    adapters: tuple[File, ...], shapes: Mapping[str, tuple], family: Family
) -> Iterator[tuple[File, list[tuple[str, Change]]]]:
    """Each adapter and its changes, by tensor."""
    for adapter in adapters:
        placed, elsewhere, problems = match(parse(adapter.path, family.adapters), shapes, family)
        label = f"adapter.{adapter.name} ({adapter.path.name})"
        if not placed:
            problems += [f"{key}: no place in this model" for key in elsewhere]
            raise ConfigError(f"{label} is for another model; nothing in it fits:\n{listed(problems, PROBLEMS_SHOWN)}")
        if problems and not adapter.allow_unmatched:
            remedy = "choose the one for this model, or adapter.allow_unmatched=true to leave these out"
            raise ConfigError(f"{label} does not fit; {remedy}:\n{listed(problems, PROBLEMS_SHOWN)}")
        check_blocks(adapter, shapes)
        log.info("%s: added to %d tensors, strength %s", label, len({name for name, _ in placed}), adapter.strength)
        for what, left in (("are of another model and found no place", elsewhere), ("are left out", problems)):
            if left:
                log.warning("%s: %d keys %s, e.g. %s", label, len(left), what, "; ".join(left[:EXAMPLES]))
        yield adapter, [(name, replace(change, sha256=adapter.sha256)) for name, change in placed]


def block_of(name: str) -> int | None:
    """The number of a tensor's block in its list; None for tensors outside the blocks."""
    found = re.search(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else None


def check_blocks(adapter: File, shapes: Mapping[str, tuple]) -> None:
    """There is a factor for each block of the longest list."""
    count = 1 + max((number for number in map(block_of, shapes) if number is not None), default=-1)
    if adapter.blocks and len(adapter.blocks) != count:
        key = f"adapter.{adapter.name}.blocks"
        raise ConfigError(f"{key}: has {len(adapter.blocks)} numbers, the model {count} blocks; one for each")


def block_factor(adapter: File, name: str) -> float:
    """The factor of an adapter's strength for a tensor."""
    number = block_of(name)
    return adapter.blocks[number] if adapter.blocks and number is not None else 1.0


def with_strength(change: Change, strength: float) -> Change:
    """DoRA's strength applies after its norms, OFT's to its rotations, any other's to the addition."""
    if change.form.has_strength:
        return replace(change, strength=strength)
    return replace(change, scale=strength * change.scale)


def match(contents: Contents, shapes: Mapping[str, tuple], family: Family) -> tuple[list, list[str], list[str]]:
    """A file's changes to tensors of these names and shapes, as (name, Change); keys of other models of the family;
    problems."""
    split_layers(contents, shapes)
    placed, elsewhere, problems = place_one(contents, shapes, family.adapters.bare)
    problems += [f"{key}: no model of the family {family.name} has such a tensor" for key in contents.unknown]
    return placed, elsewhere, problems


def split_layers(contents: Contents, shapes: Mapping[str, tuple]) -> None:
    """Split each layer that is several in the model, such as one for queries, keys and values: the rows of its second
    factor, or of its diff, are those of the model's layers in turn. They share the first factor."""
    for rows in [module for module in contents.modules if isinstance(module, Rows)]:
        parts = contents.modules.pop(rows)
        counts = [shapes.get(f"{name}.weight", (0,))[0] for name in rows.names]
        if combined := [kind for kind in parts if kind in (*LOHA, *LOKR, *TUCKER, *OFT, "norms")]:
            keys = [contents.keys[rows, kind] for kind in combined]
            contents.problems += [f"{key}: its layer is several here; only LoRA and diffs are split" for key in keys]
            continue
        whole = next((part.shape[0] for kind, part in parts.items() if kind not in WHOLE and part.shape), sum(counts))
        if all(counts) and whole != sum(counts):
            keys = [contents.keys[rows, kind] for kind in parts]
            contents.problems += [f"{key}: {whole} outputs, the model's layers have {sum(counts)}" for key in keys]
            continue
        for kind, part in parts.items():
            shared = kind in WHOLE or not all(counts)
            pieces = dict.fromkeys(rows.names, part) if shared else split_rows(part, rows, counts)
            for name, piece in pieces.items():
                contents.add(name, kind, piece, contents.keys[rows, kind])


def place_one(
    contents: Contents, shapes: Mapping[str, tuple], bare: tuple[str, ...]
) -> tuple[list, list[str], list[str]]:
    """Changes as (tensor name, Change); keys of other models; problems."""
    placed, elsewhere, problems = [], [], list(contents.problems)
    for module, parts in contents.modules.items():
        used = set()
        for name, kinds, change in additions(contents, module, parts, bare):
            used |= set(kinds)
            keys = [contents.keys[module, kind] for kind in kinds]
            if name not in shapes and not is_deeper(name, shapes):
                elsewhere += keys
                continue
            fitted, misfits = fit(dict(zip(keys, change.factors)), shapes.get(name), change.form)
            problems += misfits
            if not misfits:
                placed.append((name, replace(change, factors=fitted)))
        alone = [contents.keys[module, kind] for kind in parts if kind not in used]
        problems += [f"{key}: its other half is missing" for key in alone]
    return placed, elsewhere, problems


def additions(contents: Contents, module: str, parts: dict[str, Stored], bare: tuple[str, ...]):
    """A module's changes: (tensor name, kinds of keys, those of the factors first, Change)."""
    weight, scale = module if module.endswith(bare) else f"{module}.weight", 1.0
    for combine, groups in groups_of(parts):
        kinds, turns = [kind for group in groups for kind in group], combine == "rotation"
        norms = ["norms"] if "norms" in parts and not turns else []
        scale = limit_of(parts) if turns else scale_of(contents, module, rank_of(groups, parts))
        form = Form(combine, tuple(map(len, groups)) if combine else (), bool(norms))
        factors = tuple(parts[kind] for kind in (*kinds, *norms))
        yield weight, [*kinds, *norms, *(["alpha"] if "alpha" in parts else [])], Change(scale, factors, form)
    for kind, name, times in (
        ("diff", weight, 1.0), ("diff_m", weight, 1.0), ("diff_b", f"{module}.bias", 1.0),
        ("up_bias", f"{module}.bias", scale),
    ):
        if kind in parts:
            yield name, [kind], Change(times, (parts[kind],))


def groups_of(parts: Mapping[str, Stored]):
    """What LoRA, LoHa, LoKr and OFT multiply, as far as a module has all of it: how it is combined, and groups of
    kinds."""

    def group(*kinds: str, core: str) -> tuple[str, ...]:
        return (*kinds, core) if core in parts and len(kinds) == 2 else kinds

    if {"down", "up"} <= parts.keys():
        yield "tucker" if "mid" in parts else None, (group("up", "down", core="mid"),)
    if set(LOHA) <= parts.keys():
        yield "hadamard", (group(*LOHA[:2], core="hada_t1"), group(*LOHA[2:], core="hada_t2"))
    whole = [(kind,) if kind in parts else (f"{kind}_a", f"{kind}_b") for kind in ("lokr_w1", "lokr_w2")]
    if all(kind in parts for one in whole for kind in one):
        yield "kronecker", (whole[0], group(*whole[1], core="lokr_t2"))
    if OFT[0] in parts:
        yield "rotation", (tuple(kind for kind in OFT if kind in parts),)


def rank_of(groups: tuple, parts: Mapping[str, Stored]) -> int | None:
    """The rank of the first group that is a product; None if none is, which is LoKr without a rank."""
    second = next((group[1] for group in groups if len(group) > 1), None)
    return second and max((*parts[second].shape, 1)[0], 1)


def limit_of(parts: Mapping[str, Stored]) -> float:
    """How long OFT's rotations may be, which its alpha says by the row."""
    *_, blocks, size, _ = (1, 1, 1, *parts[OFT[0]].shape)
    return read_number(parts["alpha"]) * blocks * size if "alpha" in parts else 0.0


def is_deeper(name: str, shapes: Mapping[str, tuple]) -> bool:
    """Whether the tensor belongs to a block beyond the model's last."""
    return re.sub(r"blocks\.\d+", "blocks.0", name) in shapes


def fit(factors: dict[str, Stored], shape: tuple | None, form: Form) -> tuple[tuple[Stored, ...], list[str]]:
    """The factors, by their keys, reshaped for `Change`; or why they do not fit, a line for each key."""
    if shape is None:
        return (), [f"{key}: the model has fewer blocks" for key in factors]
    known = ", ".join(STORED_DTYPES)
    unread = {key: one.dtype for key, one in factors.items() if one.dtype not in STORED_DTYPES}
    if unread:
        return (), [f"{key}: stored as {dtype}, which is none of {known}" for key, dtype in unread.items()]
    try:
        wanted = shapes_for([one.shape for one in factors.values()], shape, form)
    except ValueError as error:
        return (), [f"{key}: {error}" for key in factors]
    misfits = [
        f"{key}: shape {one.shape}, the model's tensor is {shape}"
        for (key, one), fitting in zip(factors.items(), wanted) if without_ones(one.shape) != without_ones(fitting)
    ]
    fitted = tuple(replace(one, shape=fitting) for one, fitting in zip(factors.values(), wanted))
    return fitted, misfits


def shapes_for(given: list[tuple], shape: tuple, form: Form) -> list[tuple]:
    """The shapes that factors must have for a tensor; raises if they do not go together."""
    if form.decomposed:
        *given, norms = given
        over_rows = len(norms) > 1 and norms[0] == 1 and shape[0] != 1
        size = (1, *shape[1:2], *[1] * len(shape[2:])) if over_rows else (shape[0], *[1] * len(shape[1:]))
        return [*shapes_for(given, shape, replace(form, decomposed=False)), size]
    if form.combine == "rotation":
        return [rotation_shape(given[0], shape), *[(shape[0], *[1] * len(shape[1:]))] * (len(given) - 1)]
    if form.combine == "tucker":
        sizes_of([given[0][1::-1], *given[1:]])  # its first factor is (rows, rank)
        return [(shape[0], given[0][1]), (given[1][0], *shape[1:2]), (*given[2][:2], *shape[2:])]
    if form.combine == "kronecker":
        outer, inner = (sizes_of(part) for part in (given[: form.groups[0]], given[form.groups[0] :]))
        product = (outer[0] * inner[0], outer[1] * inner[1], *inner[2:]) if len(outer) == 2 <= len(inner) else ()
        if without_ones(product) != without_ones(shape):
            raise ValueError(f"{outer} times {inner}, the model's tensor is {shape}")
        return given
    if form.combine == "hadamard":
        groups = given[: form.groups[0]], given[form.groups[0] :]
        return [one for group in groups for one in pair_shapes(group, shape)]
    return [shape] if len(given) == 1 else pair_shapes(given, shape)


def pair_shapes(given: list[tuple], shape: tuple) -> list[tuple]:
    """The shapes of two factors, or of two (rank, …) and what is between them."""
    first, second, *between = given
    if between:
        sizes_of(given)
        return [(first[0], shape[0]), (second[0], *shape[1:2]), (*between[0][:2], *shape[2:])]
    if len(first) < 2 or len(second) < 2 or first[1] != second[0] or not second[0]:
        raise ValueError(f"ranks differ: {first} and {second}")
    return [(shape[0], second[0]), (second[0], *shape[1:])]


def rotation_shape(given: tuple, shape: tuple) -> tuple:
    """Of OFT's blocks, or BOFT's, whose rows are grouped in pairs of ever larger halves."""
    *times, blocks, size, other = given if len(given) in (3, 4) else (0, 0, 0)
    fits = size == other and blocks * size == shape[0] > 0
    for count in times:
        fits = fits and 0 < count <= MOST_TURNS and size % 2 == 0 == shape[0] % (2 ** (count - 1) * size)
    if not fits:
        raise ValueError(f"rotations {given} do not turn {shape[0]} rows")
    return given


def sizes_of(group: list[tuple]) -> tuple:
    """The shape of one factor, or of the product of two, or of two with a third between them."""
    if len(group) == 1:
        return group[0]
    first, second, *between = group
    if between:
        if min(map(len, group)) < 2 or between[0][:2] != (first[0], second[0]) or not all(between[0][:2]):
            raise ValueError(f"ranks differ: {first}, {second} and {between[0]}")
        return (first[1], second[1], *between[0][2:])
    if len(first) != 2 or len(second) < 2 or first[1] != second[0]:
        raise ValueError(f"ranks differ: {first} and {second}")
    return (first[0], *second[1:])
