"""A pipeline's inputs: texts, typed or from files, pictures and videos. No JAX, no torch."""
import contextlib
import functools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from wan_torchax.config import camera, clips, live, sounds
from wan_torchax.config.commandline import key_of, literal
from wan_torchax.config.frames import Timed, open_picture, read_frames
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError, copied
from wan_torchax.config.wording import one_of

log = logging.getLogger("wan")
FITS = ("cover", "contain", "stretch")
MOST_BYTES = 200_000_000  # of a picture
MOST_VIDEO_BYTES = 4_000_000_000
MOST_PIXELS = 100_000_000
MOST_REFERENCES = 16
LEAST_SIDE = 16
LEAST_SECONDS = 0.3  # of a sound
SIZE_REMEDY = (
    "give image=photo.jpg, video=clip.mp4 or pose=pose.mp4 for a pipeline that takes it, or another resolution"
)
SHAPES = (16 / 9, 9 / 16, 1)  # of videos
TEXT_FILES = {"prompt.text": "prompt.file", "prompt.negative": "prompt.negative_file"}


def without_files(overrides: Iterable[str], said: Iterable[str]) -> list[str]:
    """Overrides without the files of prompts whose texts others say."""
    replaced = {TEXT_FILES.get(key_of(text)) for text in said}
    return [text for text in overrides if key_of(text) not in replaced]


def check_texts(overrides: Iterable[str]) -> None:
    said = set(map(key_of, overrides))
    for text, file in TEXT_FILES.items():
        if {text, file} <= said:
            raise ConfigError(f"{text} and {file}: both are given; leave one of them out")


def with_texts(config: DictConfig) -> DictConfig:
    """The config with its prompt files read, as if their texts had been typed."""
    texts, prompt = copied(config), config.prompt
    for key, file in (("text", prompt.file), ("negative", prompt.negative_file)):
        text = prompt[key] if file is None else Path(file).read_text(encoding="utf-8")
        texts.prompt[key] = literal((text or "").strip())
    texts.prompt.file = texts.prompt.negative_file = None
    return texts


def taken(config: DictConfig) -> list[str]:
    """The file keys that the config's pipeline takes."""
    return [key for key in dict.fromkeys(config.pipeline.inputs.values()) if key in FILES]


def paths(config: DictConfig, key: str) -> list[Path]:
    """A key's files: none, one or several."""
    value = config[key]
    return [Path(path) for path in ([] if value is None else [value] if isinstance(value, str) else value)]


def sound_of(config: DictConfig) -> Path | None:
    """The file whose sound goes into the video: the one that is spoken, or of the driving videos the first that has
    some."""
    if "audio" in taken(config):
        return next((path for path in paths(config, "audio") if path.is_file()), None)
    keys = [config.pipeline.inputs[value] for value in DRIVING if value in config.pipeline.inputs]
    files = [path for key in keys for path in paths(config, key)]
    return next((path for path in files if path.is_file() and clips.probe(path).has_sound), None)


def copies(folder: Path, key: str) -> list[Path]:
    """The copies of a key's files in a run folder, in order: inputs/image.png, inputs/references.0.png. Links out of
    the folder are ignored."""
    numbered = {}
    for path in folder.glob(f"inputs/{key}*"):
        match = re.fullmatch(rf"{key}(?:\.(\d+))?(?:\.[^.]+)?", path.name)
        if match and path.resolve().is_relative_to(folder.resolve()):
            numbered[path] = int(match[1] or 0)
    return sorted(numbered, key=lambda path: numbered[path])


def input_problems(config: DictConfig, whole: bool = True) -> Iterator[str]:
    """Files that are missing, not taken by the pipeline, or invalid; checks headers only unless `whole`."""
    yield from one_of("fit", config.fit, FITS)
    name, optional = config.pipeline.name, config.pipeline.optional
    for key, problems in FILES.items():
        files, shown = paths(config, key), f"{key}={config[key]}"
        if key not in taken(config):
            if files:
                remedy = "choose a model or pipeline that does; docs/models.md has a command for each"
                yield f"{shown}: pipeline={name} takes no such file; {remedy}"
        elif not files and key not in optional:
            yield f"{key}: missing; pipeline={name} starts from it: {key}={EXAMPLES[key]}"
        for path in files:
            yield from problems(f"{key}={path}", path, config, whole)
    if camera.is_taken(config) and not camera.moves_of(config.camera):
        yield f"camera: missing; pipeline={name} follows its path: camera=zoom_in; moves are {', '.join(camera.MOVES)}"
    if {"mask", "video"} <= {*taken(config)} and config.mask is not None and config.video is None:
        yield f"mask={config.mask}: says which parts of a video to keep; give video=clip.mp4 too"
    if len(config.references) > MOST_REFERENCES:
        yield f"references: {len(config.references)} pictures; at most {MOST_REFERENCES}"


def size_problems(config: DictConfig) -> Iterator[str]:
    """A size that follows the input files, where there is none to follow."""
    unknown = unknown_sides(config)
    if unknown and config.task != "serve":  # a server gets files with its requests
        yield f"resolution: there is no picture to derive {' and '.join(unknown)} from; {SIZE_REMEDY}"


def unknown_sides(config: DictConfig) -> list[str]:
    """Height and width, if they follow the input files and none can be read."""
    size = config.resolution
    return [key for key in ("height", "width") if size[key] == 0 and size.area is not None]


def picture_problems(key: str, path: Path, config: DictConfig, whole: bool) -> Iterator[str]:
    """Checks the header before decoding: a small file may claim to be a huge picture."""
    from PIL import Image  # not at import time: --help must be fast

    if not path.is_file():
        yield f"{key}: no such file"
    elif path.stat().st_size > MOST_BYTES:
        yield f"{key}: has more than {MOST_BYTES // 10**6} MB; save it smaller"
    else:
        try:
            with Image.open(path) as picture:
                width, height = picture.size
            if whole and width * height <= MOST_PIXELS:
                open_picture(path)  # decode all of it: a truncated file has a valid header
        except Image.DecompressionBombError:
            yield f"{key}: more than {MOST_PIXELS // 10**6} million pixels; save it smaller"
            return
        except Exception as error:  # Pillow's decoders raise all kinds
            yield f"{key}: not a picture that Pillow reads ({error}); save it as PNG or JPEG"
            return
        if width * height > MOST_PIXELS:
            yield f"{key}: {width} x {height}, more than {MOST_PIXELS // 10**6} million pixels; save it smaller"
        elif min(width, height) < LEAST_SIDE:
            yield f"{key}: {width} x {height} is too small; at least {LEAST_SIDE} a side"


def video_problems(key: str, path: Path, config: DictConfig, whole: bool) -> Iterator[str]:
    """A video must have enough frames at the output's frame rate; one that leads a live video, those of a chunk."""
    size, leads = config.resolution, live.is_given(config) and config.live.chunk is not None
    least, wanted = size.frames, f"resolution.frames={size.frames}"
    if leads:
        least = live.chunk_frames(config)[0]
        wanted = f"the {least} of a first chunk"
    if not path.is_file():
        yield f"{key}: no such file"
    elif path.stat().st_size > MOST_VIDEO_BYTES:
        yield f"{key}: has more than {MOST_VIDEO_BYTES // 10**9} GB; cut it shorter"
    else:
        try:
            clip = clips.probe(path)
            if clip.width * clip.height > MOST_PIXELS or min(clip.width, clip.height) < LEAST_SIDE:
                sizes = f"from {LEAST_SIDE} a side to {MOST_PIXELS // 10**6} million pixels"
                yield f"{key}: {clip.width} x {clip.height}; must be {sizes}"
                return
            if is_picture(path):
                yield f"{key}: is one picture; give a video of at least {least} frames"
                return
            count = frames_of(path, config) if whole else least
        except Exception as error:  # imageio-ffmpeg raises all kinds
            yield f"{key}: not a video that ffmpeg reads ({str(error).strip().splitlines()[-1][:200]}); save it as MP4"
            return
        if count < least:
            scale = family_of(config).geometry(config.model.architecture).frame_scale
            most = count if config.pipeline.segments.whole else (count - 1) // scale * scale + 1
            remedy = "give a longer one" if leads else f"use resolution.frames={most}" if count else "it is empty"
            yield f"{key}: has {count} frames at {size.fps} per second, fewer than {wanted}; {remedy}"


def sound_problems(key: str, path: Path, config: DictConfig, whole: bool) -> Iterator[str]:
    """A sound may be shorter than the video, which is then silent, or longer: what is beyond its end is left out. It is
    always decoded: the video may be as long."""
    if not path.is_file():
        yield f"{key}: no such file"
    elif path.stat().st_size > MOST_VIDEO_BYTES:
        yield f"{key}: has more than {MOST_VIDEO_BYTES // 10**9} GB; cut it shorter"
    else:
        try:
            samples = sounds.read(path)
        except Exception as error:  # ffmpeg's, and what subprocesses raise
            yield f"{key}: not a sound that ffmpeg reads ({str(error).strip()[:200]}); save it as WAV, MP3 or MP4"
            return
        if len(samples) < LEAST_SECONDS * sounds.RATE:
            yield f"{key}: {len(samples) / sounds.RATE:.3f} seconds of sound; at least {LEAST_SECONDS}"
        elif whole and not samples.any():
            log.warning("%s: silence; nobody will speak", key)


def frames_of(path: Path, config: DictConfig) -> int:
    """A video's frames, as far as they are needed. A short one is decoded, for the stages too; a long one is not kept
    in memory."""
    if config.pipeline.segments.stages or live.is_given(config):
        return clips.frame_count(path, config.resolution.fps)
    return len(read_frames(path, config.resolution, config.fit))


def mask_problems(key: str, path: Path, config: DictConfig, whole: bool) -> Iterator[str]:
    """A mask is a video, or one picture for all frames."""
    yield from (picture_problems if is_picture(path) else video_problems)(key, path, config, whole)


def is_picture(path: Path) -> bool:
    """By its suffix; a GIF by its number of frames, since ffmpeg reads a still one as ten or more."""
    from PIL import Image

    if path.suffix.lower() == ".gif":
        with contextlib.suppress(Exception), Image.open(path) as picture:  # input_problems reports errors
            return getattr(picture, "n_frames", 1) == 1
    return path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def side(name: str, area: int, multiple: int, buckets: bool, *files: str | None) -> int:
    """Height or width of a video of about this area, or in the nearest bucket, with the aspect ratio of the first file
    given; 0 if none is. ${side:…} in conf/resolution/auto.yaml."""
    width, height = next((aspect(Path(file)) for file in files if file is not None), (0, 0))
    if not (width and height):
        return 0
    if buckets:
        return nearest_bucket(height / width, area, multiple)[name == "width"]
    ratio = height / width if name == "height" else width / height
    return max(round((area * ratio) ** 0.5) // multiple * multiple, multiple)


def length_of(fps: int, otherwise: int, *files: str | None) -> int:
    """Frames at this rate of the first video given; `otherwise` if none is. ${length_of:…} in
    conf/resolution/driven.yaml."""
    with contextlib.suppress(Exception):  # input_problems reports errors
        video = next((Path(file) for file in files if file is not None), None)
        if video is not None and not is_picture(video):
            return clips.frame_count(video, fps) or otherwise
    return otherwise


def length_of_sound(file: str | None, fps: int, otherwise: int, dropped: int) -> int:
    """Frames of a video as long as a sound, without so many that are dropped at its beginning; `otherwise` if there is
    none. ${length_of_sound:…} in conf/resolution/spoken.yaml."""
    with contextlib.suppress(Exception):  # input_problems reports errors
        if file is not None:
            return max(sounds.frame_count(Path(file), fps) - dropped, 1)
    return otherwise


def follows(config: DictConfig, key: str) -> bool:
    """Whether resolution's `key` is that of the input files, unless it is given."""
    value = OmegaConf.to_container(config.resolution, resolve=False)[key]
    return isinstance(value, str) and value.startswith(("${side:", "${length_of:", "${length_of_sound:"))


def usual_sizes(config: DictConfig) -> list[tuple[int, int]]:
    """Widths and heights of about resolution.area, for a size that follows files that are not there yet."""
    area, multiple = config.resolution.area, config.model.size_multiple
    sides = [[round((area * ratio) ** 0.5 / multiple) * multiple for ratio in (shape, 1 / shape)] for shape in SHAPES]
    return [(width, height) for width, height in sides]


def nearest_bucket(ratio: float, area: int, multiple: int) -> tuple[int, int]:
    """Height and width, in whole tiles of `multiple` pixels a side, of at most this area: of the ratios that are no
    further from 1 the nearest. As in diffusers, whose ratios are rounded; at most 4 to 1."""
    most = round(area / multiple**2)
    heights, widths = [most], [1]
    while heights[-1] > 1:
        fits = (widths[-1] + 1) * heights[-1] <= most
        heights.append(heights[-1] - (not fits))
        widths.append(widths[-1] + fits)
    buckets = [(h, w) for h, w in zip(heights, widths) if max(h, w) <= 4 * min(h, w)]
    milder = [(h, w) for h, w in buckets if (round(h / w, 5) <= ratio if ratio >= 1 else round(h / w, 5) >= ratio)]
    height, width = min(milder, key=lambda pair: abs(round(pair[0] / pair[1], 5) - ratio))
    return height * multiple, width * multiple


def aspect(path: Path) -> tuple[int, int]:
    """Width and height of a picture or video, after EXIF rotation; zeros if it cannot be read."""
    with contextlib.suppress(Exception):  # input_problems reports errors
        status = path.stat()
        return read_aspect(path, status.st_mtime_ns, status.st_size)
    return 0, 0


@functools.lru_cache(maxsize=64)
def read_aspect(path: Path, *changed: int) -> tuple[int, int]:
    from PIL import Image, ImageOps

    if is_picture(path):
        with path.open("rb") as content, Image.open(Timed(content, path)) as picture:
            return ImageOps.exif_transpose(picture).size
    clip = clips.probe(path)
    return clip.width, clip.height


OmegaConf.register_new_resolver("side", side, replace=True)
OmegaConf.register_new_resolver("length_of", length_of, replace=True)
OmegaConf.register_new_resolver("length_of_sound", length_of_sound, replace=True)

# Config keys that name files, and the checks of a file.
FILES = {
    "image": picture_problems, "last_image": picture_problems, "video": video_problems, "pose": video_problems,
    "face": video_problems, "background": video_problems, "mask": mask_problems, "references": picture_problems,
    "audio": sound_problems,
}
DRIVING = ("background", "pose", "face", "driving")  # a pipeline's inputs: videos of whom a character moves like
VIDEOS = tuple(key for key, problems in FILES.items() if problems in (video_problems, mask_problems))
SOUNDS = ("audio",)
EXAMPLES = {
    "image": "photo.jpg", "last_image": "photo.jpg", "video": "clip.mp4",
    "pose": "pose.mp4, skeletons on black, frame by frame those of the person who moves (tools/skeleton.py)",
    "face": "face.mp4, that person's face, square, in the same frames", "mask": "mask.mp4",
    "background": "background.mp4, the video in which that person is replaced, painted black",
    "references": "[photo.jpg]", "audio": "speech.wav",
}
