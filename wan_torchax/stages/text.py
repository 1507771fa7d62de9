"""Text to embeddings."""
import functools
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import prompt_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage

log = logging.getLogger("wan")


class Text(Stage):
    """Prompt and negative prompt to embeddings (prompts, tokens, width), zero where there is padding."""

    settings = ("model.text_tokens", "model.dtype.transformer")
    result_settings = (
        "model.path", "model.revision", "model.text_tokens", "model.dtype.text_encoder", "model.dtype.transformer",
        "ops",
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
        load_tokenizer(tokenizer_folder(resolved))

    def run(self, resolved, values, tell):
        prompts = [values["prompt"], values["negative_prompt"] or ""][: self.recipe.derived["prompts"]]
        tokens = tokenize(tokenizer_folder(resolved), prompts, resolved.config.model.text_tokens)
        embeddings = numpy.asarray(self("encode", *self.programs.put("encode", tokens))).astype(numpy.float32)
        if not numpy.isfinite(embeddings).all():
            raise NotFinite("the embeddings are not finite", resolved.config, "text_encoder")
        return {"embeddings": embeddings}

    @classmethod
    def temporaries(cls, resolved):
        """Scores of one layer."""
        heads = resolved.config.model.architecture.text_encoder.num_heads
        return 4 * heads * resolved.config.model.text_tokens**2 * 4


def tokenizer_folder(resolved) -> Path:
    return resolved.checkpoints["text_encoder"].folder.parent / "tokenizer"


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: Path):
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its libraries raise all kinds
        raise ConfigError(f"{folder}: not a readable tokenizer ({error}); download it again") from error


def tokenize(folder: Path, prompts, limit: int):
    """Token ids and mask as int32 arrays; a prompt that is too long is cut, and a warning says where."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    tokenizer = load_tokenizer(folder)
    prompts = [prompt_clean(prompt) for prompt in prompts]
    for prompt in prompts:
        tokens = tokenizer(prompt, truncation=False, verbose=False).input_ids
        if len(tokens) > limit:
            lost = tokenizer.decode(tokens[limit - 1 :], skip_special_tokens=True)[:200]
            log.warning("the prompt has %d tokens and is cut after %d; this is lost: %r", len(tokens), limit, lost)
    batch = tokenizer(prompts, padding="max_length", max_length=limit, truncation=True, return_tensors="np")
    return batch.input_ids.astype("int32"), batch.attention_mask.astype("int32")
