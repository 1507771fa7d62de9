"""A sound's features to what the transformer attends to of them, in a segment."""
import numpy

from wan_torchax.config.geometry import text_count
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.models.family import VoiceEncoding
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage


class Voice(Stage):
    """A segment's features (frames, …) through the family's encoder of a voice (Family.voice): (prompts, …)."""

    settings = ("model.dtype.transformer",)

    @classmethod
    def problems(cls, name, job):
        if job.family.voice is None:
            model, pipeline = f"model={job.config.model.name}", f"pipeline={job.config.pipeline.name}"
            yield f"{pipeline}: {model} takes no sound, which it gives; choose another pipeline"

    @classmethod
    def parts(cls, family):
        return {} if family.voice is None else {family.voice.component: family.voice.part}

    @classmethod
    def derived(cls, name, job):
        encoding: VoiceEncoding = job.family.voice
        features = job.family.sounds[encoding.features].shape(job.config)
        return {"features": (job.config.resolution.frames, *features), "prompts": text_count(job.config)}

    @classmethod
    def result_shapes(cls, name, job):
        shapes = job.family.voice.shapes(job)
        return {value: (text_count(job.config), *shapes[value]) for value in job.graph.stages[name].gives}

    def build(self):
        encoding, derived = self.family.voice, self.recipe.derived
        module, prompts = self.module(encoding.component), derived["prompts"]

        def encode(arrays, features):
            return encoding.encode(module, arrays, features, prompts)

        features = struct(self.mesh, derived["features"], "float32")
        self.add("encode", Program(encode, encoding.component, [features], replicated(self.mesh)))

    def run(self, view, values, emit):
        features = values[self.family.voice.features]
        own = features[view.first_frame :][: self.recipe.derived["features"][0]]
        made = self("encode", *self.programs.put("encode", (own,)))
        made = {name: numpy.asarray(value).astype(numpy.float32) for name, value in made.items()}
        if not all(numpy.isfinite(value).all() for value in made.values()):
            raise NotFinite("what is heard is not finite", view.config, self.family.voice.component)
        return {name: made[name] for name in self.gives}

    @classmethod
    def temporaries(cls, resolved):
        return resolved.family.voice.temporaries(resolved.config)
