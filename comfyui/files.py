"""Pictures and videos of a workflow as files, which is how the runner takes them. Named by what they hold."""
import hashlib
import tempfile
from pathlib import Path

import imageio_ffmpeg
import numpy
from PIL import Image

FOLDER = Path(tempfile.gettempdir()) / "wan-torchax-comfyui"


def write_picture(frame: numpy.ndarray) -> str:
    """uint8 (height, width, 3) as PNG; gives its path."""
    return write(frame, ".png", lambda path: Image.fromarray(frame).save(path))


def write_video(frames: numpy.ndarray, fps: int) -> str:
    """uint8 (frames, height, width, 3) without loss; gives its path."""

    def encode(path):
        sizes = dict(size=frames.shape[2:0:-1], fps=fps, codec="libx264rgb", pix_fmt_in="rgb24", pix_fmt_out="rgb24")
        writer = imageio_ffmpeg.write_frames(path, **sizes, output_params=["-crf", "0"], macro_block_size=1)
        writer.send(None)
        for frame in frames:
            writer.send(numpy.ascontiguousarray(frame))
        writer.close()

    return write(frames, f"-{fps}.mkv", encode)


def write(pixels: numpy.ndarray, end: str, save) -> str:
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(repr(pixels.shape).encode() + numpy.ascontiguousarray(pixels).data).hexdigest()[:32]
    path, partial = FOLDER / f"{name}{end}", FOLDER / f"{name}.partial{end}"
    if not path.exists():
        save(partial)
        partial.rename(path)
    return str(path)


def pixels(tensor) -> numpy.ndarray:
    """ComfyUI's IMAGE (frames, height, width, 3) or MASK (frames, height, width), 0 to 1, as uint8 with three
    channels."""
    array = (tensor.float().cpu().numpy()[..., :3] if tensor.ndim == 4 else tensor.float().cpu().numpy()[..., None])
    return numpy.broadcast_to((array.clip(0, 1) * 255).round().astype(numpy.uint8), (*array.shape[:3], 3))
