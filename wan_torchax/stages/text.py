"""Prompts to prompt embeddings."""
import jax.numpy as jnp
import numpy

from wan_torchax.config.geometry import text_count
from wan_torchax.config.live import later_prompts
from wan_torchax.config.resolve import View
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.models.family import TextEncoding
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage

DRIVING = "driving_embeddings"


class Text(Stage):
    """Prompt and negative prompt through the family's text encoders, and later prompts of a live video; outputs have
    shape (prompts, …). Of a driving video's prompt the embeddings are a value of their own."""

    settings = ("model.text_tokens", "model.dtype.transformer")
    results_remembered = 64

    @classmethod
    def derived(cls, name, job):
        driving = "driving_prompt" in job.graph.stages[name].takes
        return {"prompts": text_count(job.config) + later_count(name, job) + driving}

    def build(self):
        for encoding in self.encodings():
            self.add(encoding.component, self.program(encoding))

    def encodings(self) -> list[TextEncoding]:
        """The family's encodings that the pipeline uses."""
        return [one for one in self.family.texts if set(one.shapes(self.config)) & set(self.gives)]

    def program(self, encoding: TextEncoding) -> Program:
        module, dtype = self.module(encoding.component), self.config.model.dtype.transformer
        shape = self.recipe.derived["prompts"], encoding.tokens(self.config)

        def encode(arrays, *tokens):
            values = encoding.encode(module, arrays, *tokens)
            return {name: value.astype(dtype) if is_float(value) else value for name, value in values.items()}

        ids = struct(self.mesh, shape, "int32")
        return Program(encode, encoding.component, [ids] * encoding.inputs, replicated(self.mesh))

    @classmethod
    def result_shapes(cls, name, job):
        gives, prompts = job.graph.stages[name].gives, cls.derived(name, job)["prompts"]
        shapes = {key: shape for one in job.family.texts for key, shape in one.shapes(job.config).items()}
        if DRIVING not in gives:
            return {key: (prompts, *shapes[key]) for key in gives}
        return {key: (1 if key == DRIVING else prompts - 1, *shapes["embeddings"]) for key in gives}

    def check(self, view):
        for encoding in self.encodings():
            self.tokenize(encoding, view, [""])

    def tokenize(self, encoding: TextEncoding, view: View, prompts: list[str]):
        checkpoint = view.checkpoints[encoding.component]
        return encoding.tokenize(checkpoint.folders, prompts, encoding.tokens(view.config), view.store)

    def run(self, view, values, emit):
        later = [text for _, text in later_prompts(values.get("later_prompts", ()))]
        later += [values[name] for name in ("driving_prompt",) if name in values]
        count = self.recipe.derived["prompts"] - len(later)
        prompts = [*[values["prompt"], values["negative_prompt"] or ""][:count], *later]
        made = {}
        for encoding in self.encodings():
            program = encoding.component
            tokens = self.programs.put(program, self.tokenize(encoding, view, prompts))
            made |= {key: numpy.asarray(value).astype(numpy.float32) for key, value in self(program, *tokens).items()}
        if not all(numpy.isfinite(value).all() for value in made.values()):
            raise NotFinite("the embeddings are not finite", view.config, encoding.component)
        if DRIVING in self.gives:
            made["embeddings"], made[DRIVING] = numpy.split(made["embeddings"], [count])
        return {name: made[name] for name in self.gives}

    @classmethod
    def seen_inputs(cls, settings, family):
        clean = family.texts[0].clean
        return {key: clean(settings[key] or "") for key in ("prompt.text", "prompt.negative") if key in settings}

    @classmethod
    def temporaries(cls, resolved):
        return max(one.temporaries(resolved.config) for one in resolved.family.texts)


def later_count(name: str, job) -> int:
    """How many prompts follow the first."""
    return len(job.config.live.prompts) if "later_prompts" in job.graph.stages[name].takes else 0


def is_float(array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)
