"""Locates checkpoints (local folder, Hub, bucket) and reads their headers. No JAX or torch, so errors come early."""
import contextlib
import json
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from wan_torchax import interruption, own_path
from wan_torchax.config.registry import family_of
from wan_torchax.config.resolve import Checkpoint, plain
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import listed
from wan_torchax.records.fingerprints import fingerprint
from wan_torchax.runtime import remote

ABOUT_FILES = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")  # metadata in config.json


def find_all(config, components: Iterable[str], required: bool = True) -> dict[str, Checkpoint]:
    """The checkpoint of each component. If not `required`, as for a plan, only local ones are used."""
    if not required and local_folder(config.model.path) is None:
        return {}
    return {component: find(config, component) for component in components}


def find_present(config, components: Iterable[str]) -> dict[str, Checkpoint]:
    """The local checkpoints among these components. Downloads nothing."""
    present = {}
    for component in components:
        with contextlib.suppress(ConfigError):
            present[component] = find(config, component, local_only=True)
    return present


def find(config, component: str, local_only: bool = False) -> Checkpoint:
    """One component's folder, architecture and fingerprint. Its config.json may extend the config's architecture but
    not contradict it."""
    model, family = config.model, family_of(config)
    path, key = model.paths.get(component, model.path), family.described_by(component)
    if path.endswith(".safetensors"):
        return find_file(config, component, path)
    revision = model.revision if path == model.path else None
    names = component, *family.spec(component).beside
    folder, *beside = (find_folder(path, revision, name, local_only) for name in names)
    architecture = read_architecture(folder, model.architecture[key], key, family.spec(component).fields)
    index(folder)
    for file in (path for other in beside for path in sorted(other.glob("*.json"))):
        check_ends(file)
    return Checkpoint(folder, architecture, fingerprint([folder, *beside]))


def find_file(config, component: str, path: str) -> Checkpoint:
    """A component whose weights are one file, wherever it is; its architecture is the config's."""
    file, family, key = own_path(path), family_of(config), f"model.paths.{component}={path}"
    if not file.is_file():
        raise ConfigError(f"{key}: no such file; give a .safetensors file of this machine, or a folder")
    if beside := family.spec(component).beside:
        raise ConfigError(f"{key}: {component} needs {', '.join(beside)} too; give the folder that holds them")
    index(file)
    return Checkpoint(file, plain(config.model.architecture[family.described_by(component)]), fingerprint([file]))


# ---------------------------------------------------------------- folders


def local_folder(path: str) -> Path | None:
    """The local folder that a path names, absolute or relative to the project; None if there is none."""
    local = own_path(path)
    return local if local.is_dir() else None


def find_folder(path: str, revision: str | None, component: str, local_only: bool) -> Path:
    """The folder of one component, downloaded if it is not local."""
    folder = (local_folder(path) or download(path, revision, component, local_only)) / component
    if not folder.is_dir():
        layout = "a checkpoint in diffusers layout has text_encoder, tokenizer, transformer and vae"
        raise ConfigError(f"model.path={path}: no folder {component}/; {layout}")
    return folder


def download(path: str, revision: str | None, component: str, local_only: bool) -> Path:
    """Fetch one component's safetensors and configs from the Hub; nothing else, so no remote code. Buckets are mirrored
    lazily."""
    interruption.check()
    if remote.is_remote(path):
        return remote.mirror(path, component)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    key = f"model.path={path}"
    patterns = [f"{component}/*.safetensors", f"{component}/*.json", f"{component}/*.model"]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns, local_files_only=local_only))
    except GatedRepoError as error:
        raise ConfigError(f"{key}: gated; accept its licence on the Hub, then `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{key}: neither a local folder nor a repository on the Hub that you can read") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{key}: the Hub cannot be reached and {component} is not in the local cache; connect once, or download "
            f"elsewhere with `hf download {path}` and set model.path to the folder"
        ) from error


# ---------------------------------------------------------------- contents


def read_architecture(folder: Path, expected, component: str, fields: Set[str] | None = None) -> dict:
    """A component's config.json merged with conf/model; an error where they contradict. Of `fields`, if given, only."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is no mapping of names to values")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: no readable config.json ({error}); download it again") from error
    stored = {
        name: value for name, value in stored.items()
        if (name in fields if fields is not None else not name.startswith("_") and name not in ABOUT_FILES)
    }
    differences = [
        f"{name}: {stored[name]} in the checkpoint, {value} in the config"
        for name, value in expected.items()
        if stored.get(name, value) != value
    ]
    if differences:
        described = f"model.architecture.{component}"
        raise ConfigError(f"{folder} is another model than {described} describes:\n{listed(differences)}")
    return stored | dict(expected)


def check_ends(file: Path) -> None:
    """Detect a truncated JSON file by its first and last character: parsing a whole tokenizer is slow."""
    with file.open("rb") as handle:
        first = handle.read(64).lstrip()[:1]
        handle.seek(max(file.stat().st_size - 64, 0))
        if (first, handle.read().rstrip()[-1:]) not in ((b"{", b"}"), (b"[", b"]")):
            raise ConfigError(f"{file}: not a whole JSON file; download it again")


@dataclass
class Stored:
    """A tensor's location on disk; the dtype is safetensors' name."""

    file: Path
    dtype: str
    shape: tuple
    offset: int
    shift: int = 0  # row i of the tensor is stored as row i + shift; after the last comes the first


def weight_files(folder: Path) -> list[Path]:
    """A component's safetensors files: those of its folder, or the one that is all of it."""
    return [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))


def index(folder: Path) -> dict[str, Stored]:
    """Every tensor in a component's safetensors files."""
    files = weight_files(folder)
    if not files:
        others = ", ".join(path.name for pattern in ("*.bin", "*.pt*") for path in sorted(folder.glob(pattern)))
        hint = f" ({others} can run code when opened and is not read; convert it to safetensors)" if others else ""
        raise ConfigError(f"{folder}: no .safetensors files{hint}")
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            header = read_header(file)
        except Exception as error:
            raise ConfigError(f"{file}: not a readable safetensors file ({error}); download it again") from error
        twice = next(iter(tensors.keys() & header.keys()), None)
        if twice is not None:
            places = f"{tensors[twice].file.name} and in {file.name}"
            raise ConfigError(f"{folder}: {twice} is in {places}; keep one set of files")
        tensors |= header
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """A file's tensors. Parsed here because safetensors' API does not expose offsets."""
    with safe_open(file, framework="numpy"):  # raises if header and file length disagree
        pass
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
