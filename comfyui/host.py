"""What ComfyUI offers a node: progress, previews, cancelling, and word that memory is needed. All of it optional."""
import functools

try:
    import comfy.model_management as management
    from comfy.utils import ProgressBar
except ImportError:  # a test or a script: nobody watches and nobody cancels
    management = ProgressBar = None

PREVIEW_PIXELS = 512  # ComfyUI shrinks a preview to this many a side


class Bar:
    """An `engine.Watcher.bar` on the node that is running. A cancelled prompt raises here, so between steps."""

    def __init__(self, total, description, **options):
        self.bar = ProgressBar(total) if ProgressBar is not None and total else None

    def __enter__(self):
        raise_if_cancelled()
        return self

    def __exit__(self, *error):
        return False

    def update(self, count=1):
        raise_if_cancelled()
        if self.bar is not None:
            self.bar.update(count)

    def refresh(self):
        raise_if_cancelled()


def raise_if_cancelled() -> None:
    if management is not None:
        management.throw_exception_if_processing_interrupted()


def show_preview(steps: int, step: int, frame) -> None:
    """The video's middle frame (height, width, 3) as it looks after `step` of `steps`, on the node that is running."""
    if ProgressBar is None:
        return
    from PIL import Image

    ProgressBar(steps).update_absolute(step, steps, ("JPEG", Image.fromarray(frame), PREVIEW_PIXELS))


def on_memory_request(release) -> None:
    """Call `release()` when ComfyUI wants more memory than it could free itself: its button, POST /free, or a large model.

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
