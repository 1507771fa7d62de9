"""The owner's folder of adapters (serve.adapters): what a request may name, with trigger words and a picture.

    offered = in_folder(config)         # {"style": Offered(style.safetensors, words="a sketch of", picture=style.png)}

What a file says of itself is a stranger's text: a few printable words, shown and never used.
"""
import contextlib
import json
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from wan_torchax import own_path
from wan_torchax.serve.choices import fits, shapes_of

log = logging.getLogger("wan")
PICTURES = (".preview.png", ".png", ".preview.jpg", ".jpg", ".jpeg", ".webp")  # beside the file, as others save them
WORDS = ("modelspec.trigger_phrase", "trigger_words", "trigger_word", "activation text")  # metadata of trainers
LETTERS, TAGS = 120, 3  # shown of them at most


@dataclass(frozen=True)
class Offered:
    """An adapter that a request may name."""

    path: Path
    words: str  # that its trainer says to put into a prompt
    picture: Path | None


def in_folder(config) -> dict[str, Offered]:
    """Adapters of the folder that fit the model, by name."""
    shapes = shapes_of(config) if config.serve.adapters else None
    offered: dict[str, Offered] = {}
    for path in sorted(own_path(config.serve.adapters).glob("*.safetensors")) if shapes else ():
        name = re.sub(r"\W", "_", path.stem, flags=re.ASCII)
        if name in offered or not fits({name: {"path": str(path)}}, shapes, config):
            reason = f"{offered[name].path.name} has the same name" if name in offered else "does not fit the model"
            log.warning("serve.adapters: %s is not offered: %s", path.name, reason)
            continue
        pictures = (path.with_name(path.stem + suffix) for suffix in PICTURES)
        offered[name] = Offered(path, words_of(path), next((one for one in pictures if one.is_file()), None))
    return offered


def words_of(path: Path) -> str:
    """Trigger words from a file's metadata; of tags, the most frequent ones."""
    with contextlib.suppress(Exception):  # whatever a stranger wrote
        with safe_open(path, framework="numpy") as handle:
            metadata = handle.metadata() or {}
        texts = [metadata[key] for key in WORDS if key in metadata]
        if not texts and "ss_tag_frequency" in metadata:
            counts: Counter = Counter()
            for tags in json.loads(metadata["ss_tag_frequency"]).values():
                counts.update({str(tag).strip(): int(count) for tag, count in tags.items()})
            texts = [", ".join(tag for tag, _ in counts.most_common(TAGS))]
        printable = "".join(letter if letter.isprintable() else " " for letter in " ".join(texts)[:1000])
        return " ".join(printable.split())[:LETTERS]
    return ""
