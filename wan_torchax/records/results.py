"""Stage results in a run folder: written atomically with the settings that produced them, read by `resume`."""
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy
from safetensors import SafetensorError, safe_open

from wan_torchax.config.schema import ConfigError
from wan_torchax.config.wording import listed
from wan_torchax.records.files import atomic

DIFFERENCES_SHOWN = 20


class Misfit(ConfigError):
    """A stored result is corrupt, or was made with other settings."""


def path_of(folder: Path, stage: str, segment: int | None = None) -> Path:
    return folder / (f"{stage}.safetensors" if segment is None else f"{stage}.{segment}.safetensors")


def save(path: Path, values: dict[str, numpy.ndarray], settings: dict) -> None:
    """Write a stage's values with the settings that produced them."""
    arrays = {name: numpy.ascontiguousarray(value) for name, value in values.items()}
    with atomic(path) as partial:
        write(partial, arrays, {"settings": json.dumps(settings), "checksum": checksum(arrays)})


def write(path: Path, arrays: dict[str, numpy.ndarray], metadata: dict[str, str]) -> None:
    """A safetensors file. The library would copy every array first, and frames may be larger than memory."""
    layout, end = {}, 0
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # keeps them aligned
    for name in names:
        begin, end = end, end + arrays[name].nbytes
        dtype = arrays[name].dtype  # float32 is F32, uint8 U8
        called = "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}"
        layout[name] = {"dtype": called, "shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": metadata, **layout}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(arrays[name].data)


def checksum(arrays: dict[str, numpy.ndarray]) -> str:
    """CRC32 of each array, to detect corruption."""
    return " ".join(f"{name}:{zlib.crc32(arrays[name].data):08x}" for name in sorted(arrays))


def read(path: Path, shapes: dict[str, tuple]) -> tuple[dict[str, numpy.ndarray], dict]:
    """A stage's values, checked against `shapes`, and the settings that produced them."""
    try:
        with safe_open(path, framework="numpy") as handle:
            values, about = {name: handle.get_tensor(name) for name in shapes}, handle.metadata()
        settings = dict(json.loads(about["settings"]))
        if "checksum" in about and about["checksum"] != checksum(values):
            raise ValueError("its bytes are not those that were written")
        for name, value in values.items():
            if value.shape != shapes[name]:
                raise ValueError(f"{name} has the shape {value.shape}, not {shapes[name]}")
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        remedy = "remove it to make it again"
        raise Misfit(f"{path}: not a stage result of this program ({error}); {remedy}") from error
    return values, settings


class Stored(Mapping):
    """A stage's values in its file, read where they are used: those of all segments or chunks may be larger than
    memory."""

    def __init__(self, path: Path, shapes: dict[str, tuple]):
        self.path, self.shapes = path, shapes

    def __getitem__(self, name: str) -> numpy.ndarray:
        return read(self.path, self.shapes)[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def compare(path: Path, made_with: dict, settings: dict) -> None:
    """Reject a result with other or missing settings. Weights that are not local are compared by path."""
    here = {key.partition(".")[2] for key, value in settings.items() if key.startswith("weights.") and value}
    unused = {"path.": lambda component: component in here, "weights.": lambda component: component not in here}
    counted = {
        key: value for key, value in settings.items()
        if not any(key.startswith(kind) and leaves_out(key.removeprefix(kind)) for kind, leaves_out in unused.items())
    }
    differences = [
        f"{key}: {made_with[key]!r} there, {value!r} now" if key in made_with else f"{key}: not recorded there"
        for key, value in json.loads(json.dumps(counted)).items()
        if key not in made_with or made_with[key] != value
    ]
    if differences:
        remedy = "run without resume, or with the same"
        raise Misfit(f"{path} was made with other settings; {remedy}:\n{listed(differences, DIFFERENCES_SHOWN)}")
