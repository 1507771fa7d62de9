"""What ComfyUI offers a node: progress, previews, cancellation and memory requests. All of it optional."""
import functools
import logging

from wan_torchax.events import Advanced, Began, Compiled, Decoded, Previewed, Queued

try:
    import comfy.model_management as management
    from comfy.utils import ProgressBar
except ImportError:  # a test or a script: no progress, no cancellation
    management = ProgressBar = None
try:
    import folder_paths
except ImportError:
    folder_paths = None

log = logging.getLogger("wan")
PREVIEW_PIXELS = 512  # ComfyUI shrinks previews to this size


class Listener:
    """Shows a Session's events on the running node. If the prompt is cancelled, it raises here, between steps."""

    def __init__(self, steps: int):
        self.steps, self.bar, self.phase, self.done = steps, None, Began(""), 0
        self.is_live = False  # whether frames come while others are made

    def __call__(self, event) -> None:
        raise_if_cancelled()
        if isinstance(event, Compiled):
            log.info("compiled %s in %.1f s", event.program, event.seconds)
        elif isinstance(event, Began):
            self.bar = ProgressBar(event.total) if ProgressBar is not None and event.total else None
            self.phase, self.done = event, 0
        elif isinstance(event, Advanced) and self.bar is not None and event.count and event.phase == self.phase.phase:
            self.done += event.count
            self.bar.update(event.count)
        elif isinstance(event, Queued):
            self.is_live = True
        elif isinstance(event, Decoded) and self.is_live:
            show_preview(self.phase.total or self.done, self.done, event.frames[-1])
        elif isinstance(event, Previewed):
            show_preview(self.steps, event.step, event.frames[len(event.frames) // 2])


def adapter_files() -> dict[str, str]:
    """The safetensors files in ComfyUI's LoRA folders: names as its own nodes show them -> paths."""
    names = folder_paths.get_filename_list("loras") if folder_paths is not None else []
    return {name: folder_paths.get_full_path("loras", name) for name in names if name.endswith(".safetensors")}


def raise_if_cancelled() -> None:
    if management is not None:
        management.throw_exception_if_processing_interrupted()


def show_preview(steps: int, step: int, frame) -> None:
    """Show a frame (height, width, 3) on the running node, after `step` of `steps`."""
    if ProgressBar is None:
        return
    from PIL import Image

    ProgressBar(steps).update_absolute(step, steps, ("JPEG", Image.fromarray(frame), PREVIEW_PIXELS))


def on_memory_request(release) -> None:
    """Call `release()` when ComfyUI needs more memory than it can free itself: for its button, POST /free, or a model.

    ComfyUI has no hook for memory that it does not manage. Every such request goes through `free_memory`; to unload
    everything, it asks for more than any machine has.
    """
    if management is None:
        return
    original = management.free_memory

    @functools.wraps(original)
    def free_memory(memory_required, device, *arguments, **options):
        unloaded = original(memory_required, device, *arguments, **options)
        if management.get_free_memory(device) < memory_required:
            release()
        return unloaded

    management.free_memory = free_memory
