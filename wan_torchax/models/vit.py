"""The tensors by which a file of a vision transformer, CLIP's or SigLIP's, is recognized."""
from collections.abc import Mapping


def landmarks(encoder: Mapping, extra: int = 0) -> dict[str, tuple[int, ...] | None]:
    """`extra` tokens stand before those of the picture: CLIP's class."""
    width, layers = encoder["hidden_size"], encoder["num_hidden_layers"]
    tokens = (encoder["image_size"] // encoder["patch_size"]) ** 2 + extra
    return {
        "embeddings.position_embedding.weight": (tokens, width),
        f"encoder.layers.{layers - 1}.mlp.fc2.weight": (width, encoder["intermediate_size"]),
        f"encoder.layers.{layers}.mlp.fc2.weight": None,
    }
