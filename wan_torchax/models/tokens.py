"""Prompts to token ids, with a checkpoint's tokenizer."""
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy
import tokenizers

from wan_torchax.config.schema import ConfigError
from wan_torchax.records.fingerprints import fingerprint
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store

log = logging.getLogger("wan")


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: Path, store: Store | None = None) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer that transformers loads from a folder, and its padding id. From the store it loads without
    transformers, which takes seconds to import."""
    made_from = {"tokenizer": fingerprint([folder]), "versions": versions(), "sources": sources()}
    if entry := store and store.read("tokenizer", made_from):
        return tokenizers.Tokenizer.from_buffer(entry.arrays["tokenizer"].tobytes()), entry.about["padding"]
    import transformers

    try:
        options = dict(local_files_only=True, trust_remote_code=False)
        made = transformers.AutoTokenizer.from_pretrained(folder, **options)
        tokenizer, padding = made.backend_tokenizer, made.pad_token_id
    except Exception as error:  # tokenizer libraries raise many types
        raise ConfigError(f"{folder}: not a readable tokenizer ({error}); download it again") from error
    tokenizer.no_padding(), tokenizer.no_truncation()
    if store:
        content = numpy.frombuffer(tokenizer.to_str().encode(), "uint8")
        store.write("tokenizer", made_from, {"padding": padding}, {"tokenizer": content})
    return tokenizer, padding


def tokenize(folder: Path, prompts: list[str], limit: int, store: Store | None = None, clean: Callable = str):
    """Token ids and mask as int32 arrays (prompts, limit). A prompt that is too long is truncated with a warning."""
    tokenizer, padding = load_tokenizer(folder, store)
    ids, mask = numpy.full((len(prompts), limit), padding, "int32"), numpy.zeros((len(prompts), limit), "int32")
    room = limit - tokenizer.num_special_tokens_to_add(False)
    for row, prompt in enumerate(prompts):
        encoding = tokenizer.encode(clean(prompt), add_special_tokens=False)
        if len(encoding) > room:
            count, lost = len(encoding) + limit - room, tokenizer.decode(encoding.ids[room:])[:200]
            log.warning("the prompt has %d tokens and is cut after %d; this is lost: %r", count, limit, lost)
            encoding.truncate(room)
        tokens = tokenizer.post_process(encoding).ids
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return ids, mask
