"""What a request may set, and its video's configuration. No JAX, no torch.

A request is untrusted: each field maps to a key that trust.py offers, or to a group whose options the owner allows
(serve.choices). It cannot name paths, code or flags; pictures and videos are sent as bytes.
"""
import base64
import contextlib
import functools
import io
import json
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from wan_torchax.config import clips, inputs, live, trust
from wan_torchax.config.commandline import changed, compose, key_of, quote
from wan_torchax.config.registry import family_of
from wan_torchax.config.resolve import Kept
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import OWN as ASKED
from wan_torchax.config.validation import text_problems, validate, validate_own
from wan_torchax.config.wording import nearest
from wan_torchax.records.outputs import is_under
from wan_torchax.records.report import without_places
from wan_torchax.serve.adapters import Offered, in_folder
from wan_torchax.serve.choices import RECIPE_KEYS, at_hand, is_recipe

# A request's field -> the config key.
FIELDS = {
    "prompt": "prompt.text",
    "negative_prompt": "prompt.negative",
    "driving_prompt": "driving_prompt",
    "seed": "seed",
    "steps": "steps",
    "guidance_scale": "guidance_scale",
    "guidance_scale_2": "guidance_scale_2",
    "frames": "resolution.frames",
    "width": "resolution.width",
    "height": "resolution.height",
    "fps": "resolution.fps",
    "flow_shift": "resolution.flow_shift",
    "fit": "fit",
    "strength": "strength",
    "conditioning_scale": "conditioning_scale",
    "camera": "camera",
    "quality": "output.quality",
    "later_prompts": "live.prompts",
}
ALIASES = {  # of OpenAI, SGLang and vLLM-Omni
    "num_inference_steps": "steps", "num_frames": "frames", "input_reference": "image", "image_reference": "image",
    "reference_url": "image", "video_reference": "video", "video_url": "video",
}
ADAPTER = "adapter."  # with the name of one in the owner's folder: its strength
NESTED = ("extra_body", "extra_params", "extra_json")  # objects, or their JSON, with further fields of the request
WITHOUT_EFFECT = ("user", "generator_device")  # accepted and ignored
OWN = ("task", "serve", "prompt.text", "hydra")  # for the server itself, not for its videos
PIPED = {"pipeline", "model", "preset"}  # groups that choose a pipeline
LETTERS = 32_000  # limit of a prompt, the same as OpenAI's
MOST_KEPT = 10_000  # letters of a request's overrides, beside its prompts, up to which its configuration is kept
FORMATS = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}
VIDEOS = {b"ftyp": ".mp4", b"\x1aE\xdf\xa3": ".webm"}  # magic numbers, at offset 0 or 4
SOUNDS = {b"ID3": ".mp3", b"\xff\xfb": ".mp3", b"\xff\xf3": ".mp3", b"fLaC": ".flac", b"OggS": ".ogg"}  # the same, at 0
DATA = re.compile(r"data:(?:image|video|audio)/[\w.;=, -]{1,80};base64,([A-Za-z0-9+/=\s]+)")


@dataclass(frozen=True)
class Base:
    """What the owner started the server with."""

    overrides: list[str]
    config: DictConfig

    @classmethod
    def of(cls, config: DictConfig, overrides: list[str]) -> "Base":
        return cls([text for text in overrides if not is_under(key_of(text), OWN)], config)

    @property
    def model(self) -> str:
        """The model's name for clients: the preset, or the model."""
        presets = [text.partition("=")[2] for text in self.overrides if key_of(text) == "preset"]
        return presets[-1] if presets else self.config.model.name

    @functools.cached_property
    def choices(self) -> dict[str, list[str]]:
        """Options that a request may choose: the owner's, and for other groups those that are present and fit."""
        named = {group: list(names) for group, names in self.config.serve.choices.items()}
        return at_hand(self.config) | named

    @functools.cached_property
    def adapters(self) -> dict[str, Offered]:
        """Adapters of the owner's folder that a request may name."""
        return in_folder(self.config)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys([self.model, *self.choices.get("preset", [])]))

    def overrides_for(self, values: dict, files: dict[str, list[Path]]) -> list[str]:
        """The overrides of a video's configuration: the owner's, then the request's."""
        said = trust.overrides(values)
        replaced = [key_of(one) for one in said]
        if any(is_recipe(group, values[group]) for group in ("adapter", "sampling") if group in values):
            replaced += RECIPE_KEYS
        kept = [text for text in self.overrides if not is_under(key_of(text), replaced)]
        kept = inputs.without_files(kept, said)
        config = compose([*kept, *said]) if PIPED & values.keys() else self.config
        every = 0 if live.is_on(config) else self.config.serve.preview_every  # a live video shows itself
        own = ["sweep.active=true", f"preview_every={every}"]
        own += [f"adapter.{name}.path={quote(str(one.path))}" for name, one in self.adapters.items()
                if f"adapter.{name}.strength" in values]
        named = {key: ",".join(quote(str(path)) for path in paths) for key, paths in files.items()}
        given = [f"{key}=[{names}]" if key == "references" else f"{key}={names}" for key, names in named.items()]
        return [*kept, *own, *said, *given]


def read(base: Base, fields: dict) -> tuple[dict, float | None]:
    """The validated config values of a request's fields, and the seconds it asks for."""
    fields, values, seconds = by_own_names(plain(fields)), {}, None
    for name, value in fields.items():
        if name in FIELDS:
            values[FIELDS[name]] = trust.offered_value(FIELDS[name], value)
        elif name in base.choices:
            values[name] = chosen(name, value, base.choices[name])
        elif name.startswith(ADAPTER):
            own = chosen("adapter", name.removeprefix(ADAPTER), list(base.adapters))
            values[f"{ADAPTER}{own}.strength"] = trust.offered_value(f"{ADAPTER}{own}.strength", value)
        elif name == "model":
            if chosen(name, value, base.models) != base.model:
                values["preset"] = value
        elif name == "size":
            values |= read_size(value)
        elif name == "seconds":
            seconds = read_seconds(value)
        elif name in ("n", "num_outputs_per_prompt"):
            if str(value) != "1":
                raise ConfigError(f"{name}={trust.shown(value)}: one video a request; ask again with another seed")
        elif name in WITHOUT_EFFECT:
            continue
        else:
            known = [*FIELDS, *ALIASES, *base.choices, "model", "size", "seconds"]
            raise ConfigError(f"{trust.shown(name)}: no such field; {nearest(name, known)}")
    read_prompt(values.get("prompt.text"))
    if "size" in fields and {"width", "height"} & fields.keys():
        raise ConfigError("size, and width or height: give one of the two")
    if seconds is not None and "resolution.frames" in values:
        raise ConfigError("seconds and frames: give one of the two")
    return values, seconds


def by_own_names(fields: dict) -> dict:
    """The fields that are given, by our names for them."""
    own: dict = {}
    for name, value in fields.items():
        if value is None:
            continue
        if (key := ALIASES.get(name, name)) in own:
            raise ConfigError(f"{name}: given twice, once as {key}")
        own[key] = value
    return own


def read_prompt(text) -> str:
    """A prompt, checked like run.py's."""
    if not isinstance(text, str) or not text or len(text) > LETTERS:
        raise ConfigError(f"prompt: must be a text of 1 to {LETTERS} characters")
    for problem in text_problems("prompt", text):
        raise ConfigError(problem)
    return text


def plain(fields: dict) -> dict:
    """The fields, with those of the objects in NESTED merged in."""
    fields = dict(fields)
    for name in NESTED:
        inner = fields.pop(name, None)
        with contextlib.suppress(ValueError, RecursionError):
            inner = json.loads(inner) if isinstance(inner, str) else inner
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"{name}: must be a JSON object")
        if twice := fields.keys() & (inner or {}).keys():
            raise ConfigError(f"{trust.shown(min(twice))}: given twice")
        fields |= inner or {}
    return fields


def chosen(name: str, value, names: list[str]) -> str:
    if value not in names:
        raise ConfigError(f"{name}={trust.shown(value)}: not served here; one of: {', '.join(names)}")
    return value


def read_size(value) -> dict[str, int]:
    """`832x480` -> width and height."""
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"size={trust.shown(value)}: write WIDTHxHEIGHT, e.g. 832x480")
    return {"resolution.width": int(match[1]), "resolution.height": int(match[2])}


def read_seconds(value) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < 3600:
        raise ConfigError(f"seconds={trust.shown(value)}: must be a number above 0, e.g. 4")
    return seconds


def make(base: Base, fields: dict, folder: Path) -> tuple[dict, DictConfig]:
    """A request's values and the configuration of its video; raises with run.py's message.

    `folder` has the request's files.
    """
    values, seconds = read(base, fields)
    files = files_in(folder)
    try:
        with decoding(base, files):
            if seconds is not None:
                values["resolution.frames"] = frames_for(seconds, compose(base.overrides_for(values, files)))
            config = configure(base.overrides_for(values, files), "headers")
    except ConfigError as error:
        message = str(error).replace(f"{folder}/inputs/", "")
        raise ConfigError(without_places(message, folder)) from error
    return values, config


def decoding(base: Base, files: dict):
    """A context that limits how long files of a request are decoded; the owner's may take any time."""
    seconds = base.config.serve.decode_seconds
    return clips.within(seconds, "serve.decode_seconds") if files else contextlib.nullcontext()


def configure(overrides: list[str], checked: str) -> DictConfig:
    """The valid configuration of a video, whose files are checked as `validate` does. Of those without files, which
    differ in little but their prompts, what they have in common is composed and checked once."""
    own = [text for text in overrides if key_of(text) in ASKED]
    common = [text for text in overrides if text not in own]
    kind = tuple(common), tuple(text.partition("=")[0] for text in own)
    if known := valid.get(kind):
        config = changed(pickle.loads(known), own)
        validate_own(config)
        return config
    config = compose(overrides)
    validate(config, checked)
    has_files = any(inputs.paths(config, key) for key in inputs.FILES)
    if not has_files and sum(map(len, common)) < MOST_KEPT:
        valid.keep(kind, pickle.dumps(config, pickle.HIGHEST_PROTOCOL))
    return config


valid = Kept(64)  # configurations, pickled


def frames_for(seconds: float, config: DictConfig) -> int:
    """The nearest number of frames that the model's VAE can make; of a live video, whole chunks."""
    if live.is_on(config):
        first, later = live.chunk_frames(config)
        return first + max(round((seconds * config.resolution.fps - first) / later), 0) * later
    scale = family_of(config).geometry(config.model.architecture).frame_scale
    return max(round((seconds * config.resolution.fps - 1) / scale), 0) * scale + 1


# ---------------------------------------------------------------- files


def files_in(folder: Path) -> dict[str, list[Path]]:
    """A job's input files by config key: inputs/image.png, inputs/references.0.png."""
    copies = {key: inputs.copies(folder, key) for key in inputs.FILES}
    return {key: paths for key, paths in copies.items() if paths}


def write_files(folder: Path, files: dict[str, list[bytes]]) -> None:
    """Save a request's files, under names of our own."""
    for name, contents in files.items():
        key = ALIASES.get(name, name)
        if name == "input_reference" and contents and video_suffix(contents[0]):
            name = key = "video"
        if key not in inputs.FILES:
            raise ConfigError(f"{trust.shown(name)}: takes no file; files are {', '.join(inputs.FILES)}")
        if (len(contents) > 1 and key != "references") or any((folder / "inputs").glob(f"{key}.*")):
            raise ConfigError(f"{name}: given twice")
        for number, content in enumerate(contents):
            place = f".{number}" if key == "references" else ""
            (folder / "inputs" / f"{key}{place}{suffix_of(name, content)}").write_bytes(content)


def suffix_of(name: str, content: bytes) -> str:
    """The suffix for a file's content. Only formats that cannot contain programs or links are accepted."""
    from PIL import Image

    if ALIASES.get(name, name) in inputs.VIDEOS and (suffix := video_suffix(content)):
        return suffix
    if name in inputs.SOUNDS:
        if suffix := sound_suffix(content):
            return suffix
        raise ConfigError(f"{name}: not a file that is taken; send WAV, MP3, FLAC, Ogg, MP4 or WebM")
    try:
        with Image.open(io.BytesIO(content), formats=list(FORMATS)) as picture:
            return FORMATS[picture.format]
    except Exception as error:  # Pillow raises all kinds on untrusted bytes
        kinds = "PNG, JPEG or WebP" + (", MP4 or WebM" if name in inputs.VIDEOS else "")
        raise ConfigError(f"{name}: not a file that is taken; send {kinds}") from error


def video_suffix(content: bytes) -> str | None:
    return next((suffix for start, suffix in VIDEOS.items() if start in (content[:4], content[4:8])), None)


def sound_suffix(content: bytes) -> str | None:
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        return ".wav"
    own = (suffix for start, suffix in SOUNDS.items() if content.startswith(start))
    return next(own, None) or video_suffix(content)


def is_file(name: str) -> bool:
    return ALIASES.get(name, name) in inputs.FILES


def bytes_of(name: str, value) -> list[bytes]:
    """Files in JSON: one, or a list."""
    return [content_of(name, item) for item in (value if isinstance(value, list) else [value])]


def content_of(name: str, value) -> bytes:
    """{"image_url": "data:image/png;base64,…"}, or only the URL; in a form, the JSON is text. Nothing is fetched from
    other servers."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    links = ("image_url", "video_url", "audio_url")
    link = next((value[key] for key in links if key in value), None) if isinstance(value, dict) else value
    match = DATA.fullmatch(link) if isinstance(link, str) else None
    if match is None:
        raise ConfigError(f"{name}: upload a file, or give its bytes as data:image/png;base64,…")
    try:
        return base64.b64decode(match[1])
    except ValueError as error:
        raise ConfigError(f"{name}: not base64") from error
