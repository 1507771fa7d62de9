"""Where a checkpoint is and what it says of itself: a local folder or the Hub. No JAX, no torch: told before they load."""
import json
import os
from pathlib import Path

from wan_torchax import ROOT
from wan_torchax.config.schema import ConfigError


def find(model, component) -> Path:
    """The folder of one component of a checkpoint: local, or downloaded from the Hub."""
    local = Path(os.path.expanduser(model.path))
    if not local.is_absolute() and not local.exists():
        local = ROOT / model.path
    folder = (local if local.is_dir() else download(model, component)) / component
    if not folder.is_dir():
        raise ConfigError(f"model.path={model.path}: no folder {component}/; a checkpoint in diffusers layout has text_encoder, tokenizer, transformer and vae")
    return folder


def download(model, component) -> Path:
    """Fetch one component's safetensors and configs from the Hub; only those, so no remote code can come along."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [f"{component}/*.safetensors", f"{component}/*.json", f"{component}/*.model"]
    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ConfigError(f"model.path={model.path}: gated; accept its licence on the Hub, then `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"model.path={model.path}: neither a local folder nor a repository on the Hub that you can read") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path={model.path}: the Hub cannot be reached and {component} is not in the local cache; "
            f"connect once, or download elsewhere with `hf download {model.path}` and set model.path to the folder"
        ) from error


def read_architecture(folder: Path, expected, component: str) -> dict:
    """What config.json says of a component, refused where it contradicts conf/model."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no readable config.json ({error})") from error
    about_files = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")
    found = {name: value for name, value in found.items() if not name.startswith("_") and name not in about_files}
    differences = [f"{name}: {found[name]} in the checkpoint, {value} in the config" for name, value in expected.items() if found.get(name, value) != value]
    if differences:
        raise ConfigError(f"{folder} is another model than model.architecture.{component} describes:\n" + "\n".join(f"  - {line}" for line in differences))
    return found | dict(expected)
