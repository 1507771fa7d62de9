"""Text to embeddings."""
import functools
import html
import logging
import re
from pathlib import Path

import jax.numpy as jnp
import numpy
import tokenizers

from wan_torchax.config.geometry import prompt_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.records.provenance import sources, versions
from wan_torchax.records.store import Store
from wan_torchax.runtime.checkpoint import fingerprint
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage

log = logging.getLogger("wan")


class Text(Stage):
    """Prompt and negative prompt to embeddings (prompts, tokens, width), zero where there is padding."""

    settings = ("model.text_tokens", "model.dtype.transformer")
    result_settings = (
        "model.path", "model.paths", "model.revision", "model.text_tokens", "model.dtype.text_encoder",
        "model.dtype.transformer", "ops",
    )
    results_remembered = 64

    @classmethod
    def derived(cls, resolved):
        return {"prompts": prompt_count(resolved.config)}

    def build(self):
        from wan_torchax.patches import call_module

        module, dtype = self.module("text_encoder"), self.config.model.dtype.transformer

        def encode(arrays, tokens, mask):
            hidden = call_module(module, arrays, tokens, attention_mask=mask, return_dict=False)[0]
            return jnp.where(mask[..., None] > 0, hidden, 0).astype(dtype)

        ids = struct(self.mesh, (self.recipe.derived["prompts"], self.config.model.text_tokens), "int32")
        self.add("encode", Program(encode, "text_encoder", [ids, ids], replicated(self.mesh)))

    @classmethod
    def result_shapes(cls, config):
        width = config.model.architecture.transformer.text_dim
        return {"embeddings": (prompt_count(config), config.model.text_tokens, width)}

    def check(self, resolved):
        load_tokenizer(tokenizer_folder(resolved), Store.of(resolved.config))

    def run(self, resolved, values, tell):
        prompts = [values["prompt"], values["negative_prompt"] or ""][: self.recipe.derived["prompts"]]
        limit, store = resolved.config.model.text_tokens, Store.of(resolved.config)
        tokens = tokenize(tokenizer_folder(resolved), prompts, limit, store)
        embeddings = numpy.asarray(self("encode", *self.programs.put("encode", tokens))).astype(numpy.float32)
        if not numpy.isfinite(embeddings).all():
            raise NotFinite("the embeddings are not finite", resolved.config, "text_encoder")
        return {"embeddings": embeddings}

    @classmethod
    def seen_inputs(cls, settings):
        return {key: clean(settings[key] or "") for key in ("prompt.text", "prompt.negative") if key in settings}

    @classmethod
    def temporaries(cls, resolved):
        """Scores of one layer."""
        heads = resolved.config.model.architecture.text_encoder.num_heads
        return 4 * heads * resolved.config.model.text_tokens**2 * 4


def tokenizer_folder(resolved) -> Path:
    return resolved.checkpoints["text_encoder"].folder.parent / "tokenizer"


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: Path, store: Store | None = None) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer that transformers makes of a folder, and the id that fills up a prompt. From the store it comes
    without transformers, which takes seconds to import."""
    made_from = {"tokenizer": fingerprint([folder]), "versions": versions(), "sources": sources()}
    if entry := store and store.read("tokenizer", made_from):
        return tokenizers.Tokenizer.from_buffer(entry.arrays["tokenizer"].tobytes()), entry.about["padding"]
    import transformers

    try:
        options = dict(local_files_only=True, trust_remote_code=False)
        made = transformers.AutoTokenizer.from_pretrained(folder, **options)
        tokenizer, padding = made.backend_tokenizer, made.pad_token_id
    except Exception as error:  # its libraries raise all kinds
        raise ConfigError(f"{folder}: not a readable tokenizer ({error}); download it again") from error
    tokenizer.no_padding(), tokenizer.no_truncation()
    if store:
        content = numpy.frombuffer(tokenizer.to_str().encode(), "uint8")
        store.write("tokenizer", made_from, {"padding": padding}, {"tokenizer": content})
    return tokenizer, padding


def clean(prompt: str) -> str:
    """A prompt as Wan's own pipeline cleans it: broken Unicode mended, HTML's entities read, also where they were
    written twice, and one space wherever there is any."""
    if not (prompt.isascii() and prompt.isprintable()) or "&" in prompt:  # ftfy leaves all others as they are
        import ftfy

        prompt = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", prompt).strip()


def tokenize(folder: Path, prompts, limit: int, store: Store | None = None):
    """Token ids and mask as int32 arrays; a prompt that is too long is cut, and a warning says where."""
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
