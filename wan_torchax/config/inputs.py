"""What the user gives a pipeline: texts, typed or from files, and pictures. No JAX, no torch."""
import hashlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from wan_torchax.config.commandline import literal
from wan_torchax.config.wording import one_of

FILES = ("image", "last_image")  # keys of the config that name a picture
FITS = ("cover", "contain", "stretch")
MOST_BYTES = 200_000_000
MOST_PIXELS = 100_000_000
LEAST_SIDE = 16


def with_texts(config: DictConfig) -> DictConfig:
    """The config with the texts of its prompt files in it, as if they had been typed."""
    texts, prompt = config.copy(), config.prompt
    for key, file in (("text", prompt.file), ("negative", prompt.negative_file)):
        text = prompt[key] if file is None else Path(file).read_text(encoding="utf-8")
        texts.prompt[key] = literal((text or "").strip())
    texts.prompt.file = texts.prompt.negative_file = None
    return texts


def taken(config: DictConfig) -> list[str]:
    """The keys of pictures that the config's pipeline takes."""
    return [key for key in config.pipeline.inputs.values() if key in FILES]


def fingerprints(config: DictConfig) -> dict[str, str]:
    """Sixteen hex digits of each picture's content, by key."""
    return {key: digest(Path(config[key])) for key in taken(config) if config[key] is not None}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def input_problems(config: DictConfig) -> Iterator[str]:
    """Pictures that are missing, not taken, or none."""
    yield from one_of("fit", config.fit, FITS)
    for key in FILES:
        if key in taken(config):
            if config[key] is None:
                yield f"{key}: missing; pipeline={config.pipeline.name} starts from it: {key}=photo.jpg"
            else:
                yield from picture_problems(f"{key}={config[key]}", Path(config[key]))
        elif config[key] is not None:
            remedy = "choose a model that does, e.g. model=wan22_i2v_a14b, and for two pictures pipeline=flf2v"
            yield f"{key}={config[key]}: pipeline={config.pipeline.name} takes no such picture; {remedy}"


def picture_problems(key: str, path: Path) -> Iterator[str]:
    """From the file's header, before anything decodes it: a small file may claim to be a huge picture."""
    from PIL import Image  # --help does without it

    if not path.is_file():
        yield f"{key}: no such file"
    elif path.stat().st_size > MOST_BYTES:
        yield f"{key}: has more than {MOST_BYTES // 10**6} MB; save it smaller"
    else:
        try:
            with Image.open(path) as picture:
                width, height = picture.size
                if width * height <= MOST_PIXELS:
                    picture.load()  # all of it: half a file has a good header
        except Image.DecompressionBombError:
            yield f"{key}: more than {MOST_PIXELS // 10**6} million pixels; save it smaller"
            return
        except Exception as error:  # whatever Pillow's decoders make of it
            yield f"{key}: not a picture that Pillow reads ({error}); save it as PNG or JPEG"
            return
        if width * height > MOST_PIXELS:
            yield f"{key}: {width} x {height}, more than {MOST_PIXELS // 10**6} million pixels; save it smaller"
        elif min(width, height) < LEAST_SIDE:
            yield f"{key}: {width} x {height} is too small; at least {LEAST_SIDE} a side"
