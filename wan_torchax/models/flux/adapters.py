"""Trainers' names for the modules of FLUX.1's transformer."""
import re

from wan_torchax.models.family import AdapterNames

PREFIX = r"(?:base_model\.model\.)?(?:transformer\.)?"
NATIVE = re.compile(r"transformer_blocks")


def translate(module: str, native: bool) -> str | None:
    return module if native else None


NAMES = AdapterNames(PREFIX, NATIVE, translate)
