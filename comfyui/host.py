"""What ComfyUI offers a node: progress, previews, cancelling, and word that memory is needed. All of it optional."""
import functools
import logging

from wan_torchax.events import Advanced, Began, Compiled, Previewed

try:
    import comfy.model_management as management
    from comfy.utils import ProgressBar
except ImportError:  # a test or a script: nobody watches and nobody cancels
    management = ProgressBar = None
try:
    import folder_paths
except ImportError:
    folder_paths = None

log = logging.getLogger("wan")
PREVIEW_PIXELS = 512  # ComfyUI shrinks a preview to this many a side


class Listener:
    """Shows a Session's events on the node that is running. A cancelled prompt raises here, so between steps."""

    def __init__(self, steps: int):
        self.steps, self.bar = steps, None

    def __call__(self, event) -> None:
        raise_if_cancelled()
        if isinstance(event, Compiled):
            log.info("compiled %s in %.1f s", event.program, event.seconds)
        elif isinstance(event, Began):
            self.bar = ProgressBar(event.total) if ProgressBar is not None and event.total else None
        elif isinstance(event, Advanced) and self.bar is not None and event.count:
            self.bar.update(event.count)
        elif isinstance(event, Previewed):
            show_preview(self.steps, event.step, event.frame)


def adapter_files() -> dict[str, str]:
    """The safetensors in the folders where ComfyUI keeps LoRAs: names as its own nodes show them -> paths."""
    names = folder_paths.get_filename_list("loras") if folder_paths is not None else []
    return {name: folder_paths.get_full_path("loras", name) for name in names if name.endswith(".safetensors")}


def raise_if_cancelled() -> None:
    if management is not None:
        management.throw_exception_if_processing_interrupted()


def show_preview(steps: int, step: int, frame) -> None:
    """A frame (height, width, 3) as it looks after `step` of `steps`, on the node that is running."""
    if ProgressBar is None:
        return
    from PIL import Image

    ProgressBar(steps).update_absolute(step, steps, ("JPEG", Image.fromarray(frame), PREVIEW_PIXELS))


def on_memory_request(release) -> None:
    """Call `release()` when ComfyUI wants more memory than it could free itself: by its button, POST /free, or a model.

    ComfyUI has no hook for memory it does not manage. Every such request goes through `free_memory`, with a size no
    machine has when everything is to be unloaded.
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
