"""What a torch module becomes under JAX. Importing this imports them all, and with them torch and diffusers."""
from wan_torchax import private

# diffusers imports torch_xla where that is installed, for attention on its own devices. Kaggle's and Colab's TPU
# machines have one, built for another torch than ours: its import fails. Nothing here uses it.
private.hide_torch_xla()

from wan_torchax.models import image_encoder, text_encoder, transformer, vae  # noqa: E402

__all__ = ["image_encoder", "text_encoder", "transformer", "vae"]
