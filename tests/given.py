"""Pictures and videos for pipelines that start from them: noise with some shape in it, made once a session.

    given.picture("first"), given.clip("mask")          # paths, of another aspect than the video's
    given.overrides("vace")                             # all that a pipeline takes
"""
import os
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy
from PIL import Image

from tests.conftest import FOLDER

SIZES = {"first": (90, 70), "last": (64, 100)}
TAKEN = {  # by pipelines
    "t2v": (), "v2v": ("video",), "i2v": ("image",), "i2v_clip": ("image",), "ti2v": ("image",), "i2v_long": ("image",),
    "flf2v": ("image", "last_image"), "flf2v_clip": ("image", "last_image"), "vace": ("video", "mask", "references"),
    "s2v": ("image", "audio"), "fun_control": ("video", "image"), "fun_control_5b": ("video", "image"),
    "fun_camera": ("image", "camera"), "fun_camera_5b": ("image", "camera"), "animate": ("image", "pose", "face"),
    "replace": ("image", "pose", "face", "background", "mask"),
    "animate2": ("image", "video"),
}


def overrides(pipeline: str) -> list[str]:
    files = {
        "image": picture("first"), "last_image": picture("last"), "video": clip("video"), "mask": clip("mask"),
        "references": f"[{picture('first')},{picture('last')}]", "pose": clip("pose"), "face": clip("face"),
        "background": clip("background"), "camera": "zoom_in", "audio": sound(),
    }
    texts = ["driving_prompt=somebody dances"] if pipeline == "animate2" else []
    return [f"pipeline={pipeline}", *(f"{key}={files[key]}" for key in TAKEN[pipeline]), *texts]


def picture(name: str) -> Path:
    def write(path):
        width, height = SIZES[name]
        pixels = numpy.random.default_rng(len(name)).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        pixels[: height // 2] //= 4
        Image.fromarray(pixels).save(path)

    return made(f"{name}.png", write)


def clip(name: str, count: int = 9) -> Path:
    """A video or a mask, without loss; as many frames as `count` says."""

    def write(path):
        frames = numpy.random.default_rng(len(name) % 5).integers(0, 256, (count, 80, 96, 3), dtype=numpy.uint8)
        frames[:, :40] //= 3
        if name == "mask":
            frames[:] = 0
            for number, frame in enumerate(frames):
                frame[8 * number % 40 :, 30:70] = 255
        sizes = dict(size=(96, 80), fps=16, codec="libx264rgb", pix_fmt_in="rgb24", pix_fmt_out="rgb24")
        writer = imageio_ffmpeg.write_frames(path, **sizes, output_params=["-crf", "0"])
        writer.send(None)
        for frame in frames:
            writer.send(numpy.ascontiguousarray(frame))
        writer.close()

    return made(f"{name}-{count}.mkv", write)


def sound(seconds: float = 0.6, rate: int = 16_000, channels: int = 1, suffix: str = "wav") -> Path:
    """A tone whose pitch and loudness change; a second channel is its negative at half the loudness."""

    def write(path):
        times = numpy.arange(int(seconds * rate)) / rate
        wave = numpy.sin(2 * numpy.pi * (200 + 300 * times) * times) * (0.2 + 0.5 * numpy.sin(7 * times) ** 2)
        both = numpy.stack([wave, -0.5 * wave][:channels], axis=1).astype(numpy.float32)
        raw = ["-f", "f32le", "-ac", str(channels), "-ar", str(rate), "-i", "-"]
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *raw, str(path)]
        subprocess.run(command, input=both.tobytes(), check=True)

    return made(f"sound-{seconds}-{rate}-{channels}.{suffix}", write)


def made(name: str, write) -> Path:
    path = Path(FOLDER) / "given" / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        mine = path.with_name(f"{os.getpid()}-{name}")
        write(mine)
        os.replace(mine, path)
    return path
