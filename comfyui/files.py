"""A workflow's pictures, videos and sounds as files, the form in which the runner takes them: in a private folder that
is deleted when the node is done."""
import subprocess
import tempfile
from pathlib import Path

import imageio_ffmpeg
import numpy
from PIL import Image

from wan_torchax.config.clips import ffmpeg
from wan_torchax.config.schema import ConfigError

PREFIX = "wan-torchax-comfyui-"
SHAPES = {4: "IMAGE (frames, height, width, channels)", 3: "MASK (frames, height, width)"}


def private_folder() -> tempfile.TemporaryDirectory:
    """A new folder, mode 700, deleted at the end of the `with` block or when the process exits."""
    return tempfile.TemporaryDirectory(prefix=PREFIX)


def write_picture(path: Path, frame: numpy.ndarray) -> str:
    """Write uint8 (height, width, 3) as PNG; returns its path."""
    Image.fromarray(frame).save(path.with_suffix(".png"))
    return str(path.with_suffix(".png"))


def write_video(path: Path, frames: numpy.ndarray, fps: int) -> str:
    """Write uint8 (frames, height, width, 3) as lossless video; returns its path."""
    path = path.with_suffix(".mkv")
    sizes = dict(size=frames.shape[2:0:-1], fps=fps, codec="libx264rgb", pix_fmt_in="rgb24", pix_fmt_out="rgb24")
    exact = dict(quality=None, output_params=["-crf", "0"], macro_block_size=1)
    writer = imageio_ffmpeg.write_frames(path, **sizes, **exact)
    writer.send(None)
    for frame in frames:
        writer.send(numpy.ascontiguousarray(frame))
    writer.close()
    return str(path)


def write_sound(path: Path, sound) -> str:
    """Write ComfyUI's AUDIO, a waveform (1, channels, samples) and its rate, as WAV; returns its path."""
    wave, rate = (sound.get(part) if isinstance(sound, dict) else None for part in ("waveform", "sample_rate"))
    shape = tuple(getattr(wave, "shape", ()))
    if len(shape) != 3 or shape[0] != 1 or 0 in shape or not isinstance(rate, int):
        given = f"a waveform of shape {shape}" if shape else f"a {type(sound).__name__}"
        raise ConfigError(f"audio: {given}; it takes ComfyUI's AUDIO, one sound (1, channels, samples) and its rate")
    samples = numpy.ascontiguousarray(wave[0].detach().float().cpu().numpy().T, "<f4")
    raw = ["-f", "f32le", "-ac", str(shape[1]), "-ar", str(rate), "-i", "-"]
    file = str(path.with_suffix(".wav"))
    command = [ffmpeg(), "-y", "-v", "error", *raw, "-c:a", "pcm_f32le", file]
    subprocess.run(command, input=samples.tobytes(), check=True)
    return file


def pixels(name: str, tensor, dimensions: int) -> numpy.ndarray:
    """ComfyUI's IMAGE (four dimensions) or MASK (three), from 0 to 1, as uint8 with three channels."""
    shape = tuple(getattr(tensor, "shape", ()))
    if len(shape) != dimensions or 0 in shape or (dimensions == 4 and shape[3] not in (1, 3, 4)):
        given = f"of shape {shape}" if shape else f"a {type(tensor).__name__}"
        raise ConfigError(f"{name}: {given}; it takes ComfyUI's {SHAPES[dimensions]}")
    array = tensor.detach().float().cpu().numpy()
    array = array[..., :3] if dimensions == 4 else array[..., None]
    return numpy.broadcast_to((array.clip(0, 1) * 255).round().astype(numpy.uint8), (*array.shape[:3], 3))
