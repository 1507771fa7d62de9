"""What a torch module becomes under JAX. Importing this imports them all, and with them torch and diffusers."""
from wan_torchax.models import image_encoder, text_encoder, transformer, vae

__all__ = ["image_encoder", "text_encoder", "transformer", "vae"]
