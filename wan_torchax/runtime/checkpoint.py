"""Locates checkpoints (local folder or file, Hub, bucket) and reads their headers. No JAX or torch, so errors come
early."""
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from wan_torchax import interruption, own_path
from wan_torchax.config.registry import family_of
from wan_torchax.config.resolve import Checkpoint, plain
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import listed
from wan_torchax.models.family import ComponentSpec
from wan_torchax.records.fingerprints import fingerprint
from wan_torchax.runtime import gguf, remote
from wan_torchax.runtime.formats import Stored, bytes_of, with_scales

# Metadata in config.json. How weights are quantized, their files say.
ABOUT_FILES = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type", "quantization_config")
FILES = (".safetensors", ".gguf")  # what a component may be a single file of
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def find_all(config, components: Iterable[str], required: bool = True) -> dict[str, Checkpoint]:
    """The checkpoint of each component. If not `required`, as for a plan, only local ones are used."""
    folder, paths = local_folder(config.model.path), config.model.paths
    if not required and folder is None:
        return {}
    there = [name for name in components if required or name in paths or (folder / name).is_dir()]
    return {component: find(config, component) for component in there}


def find_present(config, components: Iterable[str]) -> dict[str, Checkpoint]:
    """The local checkpoints among these components. Downloads nothing."""
    present = {}
    for component in components:
        with contextlib.suppress(ConfigError):
            present[component] = find(config, component, local_only=True)
    return present


def find(config, component: str, local_only: bool = False) -> Checkpoint:
    """One component's folder or file, architecture and fingerprint. Its config.json may extend the config's
    architecture but not contradict it; a file has none, and is described by that of model.path, if it is local."""
    model, family = config.model, family_of(config)
    path, key = model.paths.get(component, model.path), family.described_by(component)
    spec, expected = family.spec(component), model.architecture[key]
    file = single_file(path, component)
    source = model.path if file else path
    revision = model.revision if source == model.path else None
    place = file or find_folder(path, revision, component, local_only)
    folders = {name: find_folder(source, revision, name, local_only) for name in spec.beside}
    described = place if file is None else (local_folder(model.path) or place) / component
    architecture = plain(expected)
    if file is None or (described / "config.json").is_file():
        architecture = read_architecture(described, expected, key, spec)
    tensors = index(place)
    for one in (path for folder in folders.values() for path in sorted(folder.glob("*.json"))):
        check_ends(one)
    headers = {}
    if place.suffix == ".gguf":  # safetensors' headers are read there
        headers[place] = tuple((one.offset, one.offset + bytes_of(one)) for one in tensors.values())
    return Checkpoint(place, architecture, fingerprint([place, *folders.values()], headers), folders=folders)


# ---------------------------------------------------------------- folders


def single_file(path: str, component: str) -> Path | None:
    """The local file that a path names; None if it names no file."""
    file = own_path(path)
    if file.suffix in PICKLES and not file.is_dir():
        raise ConfigError(
            f"model.{component}={path}: can run code when opened and is not read; `python tools/convert.py {path}` "
            "writes it as safetensors"
        )
    if file.suffix not in FILES or file.is_dir():
        return None
    if not file.is_file():
        raise ConfigError(f"model.{component}={path}: no such file")
    return file


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
            f"elsewhere with `hf download {path}` and set model.path to the folder; weights may be a single file too: "
            f"model.{component}=<file>"
        ) from error


# ---------------------------------------------------------------- contents


def read_architecture(folder: Path, expected, component: str, spec: ComponentSpec) -> dict:
    """A component's config.json merged with conf/model; an error where they contradict. Of its `fields`, if it has
    some, only."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is no mapping of names to values")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: no readable config.json ({error}); download it again") from error
    stored = {
        name: value for name, value in stored.items()
        if (name in spec.fields if spec.fields is not None else not name.startswith("_") and name not in ABOUT_FILES)
    }
    stored = spec.described(stored)
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


def files_of(place: Path) -> list[Path]:
    """The weight files of a component: those of its folder, or the one that it is."""
    return [place] if place.is_file() else sorted(place.glob("*.safetensors"))


def index(place: Path) -> dict[str, Stored]:
    """Every tensor in a component's files."""
    files = files_of(place)
    if not files:
        others = ", ".join(path.name for pattern in ("*.bin", "*.pt*") for path in sorted(place.glob(pattern)))
        hint = f" ({others} can run code when opened and is not read; convert it to safetensors)" if others else ""
        raise ConfigError(f"{place}: no .safetensors files{hint}")
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            header = gguf.read_header(file) if file.suffix == ".gguf" else read_header(file)
        except Exception as error:
            kind = "GGUF" if file.suffix == ".gguf" else "safetensors"
            raise ConfigError(f"{file}: not a readable {kind} file ({error}); download it again") from error
        twice = next(iter(tensors.keys() & header.keys()), None)
        if twice is not None:
            places = f"{tensors[twice].file.name} and in {file.name}"
            raise ConfigError(f"{place}: {twice} is in {places}; keep one set of files")
        tensors |= header
    return with_scales(tensors)


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
