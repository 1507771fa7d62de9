"""A video of a face to what the transformer attends to of it."""
from pathlib import Path
from types import SimpleNamespace

import numpy

from wan_torchax.config.geometry import text_count
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.models.family import FaceEncoding
from wan_torchax.models.pictures import read_mirrored
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage


class Face(Stage):
    """A video through the family's encoders of a face (Family.faces): (prompts, …)."""

    settings = ("model.dtype.transformer",)
    reads = ("resolution.frames", "resolution.fps", "fit")

    @classmethod
    def encoding(cls, name, job) -> FaceEncoding:
        return job.family.faces[job.graph.stages[name].gives[0]]

    @classmethod
    def problems(cls, name, job):
        value = job.graph.stages[name].gives[0]
        if value not in job.family.faces:
            model, pipeline = f"model={job.config.model.name}", f"pipeline={job.config.pipeline.name}"
            yield f"{pipeline}: {model} takes no {value}, which it gives; choose another pipeline"

    @classmethod
    def parts(cls, family):
        return {one.component: one.part for one in family.faces.values()}

    @classmethod
    def derived(cls, name, job):
        side = cls.encoding(name, job).side(job.config)
        return {"frames": (job.config.resolution.frames, side, side, 3), "prompts": text_count(job.config)}

    @classmethod
    def result_shapes(cls, name, job):
        return {job.graph.stages[name].gives[0]: (text_count(job.config), *cls.encoding(name, job).shape(job))}

    def build(self):
        encoding = self.family.faces[self.gives[0]]
        module, prompts = self.module(encoding.component), self.recipe.derived["prompts"]

        def encode(arrays, frames):
            return encoding.encode(module, arrays, frames, prompts)

        frames = struct(self.mesh, self.recipe.derived["frames"], "uint8")
        self.add("encode", Program(encode, encoding.component, [frames], replicated(self.mesh)))

    def run(self, view, values, emit):
        count, side, *_ = self.recipe.derived["frames"]
        size = SimpleNamespace(frames=count, fps=view.config.resolution.fps, height=side, width=side)
        frames = read_mirrored(Path(values["face"]), size, view.config.fit, view.first_frame)
        embeddings = numpy.asarray(self("encode", *self.programs.put("encode", (frames,)))).astype(numpy.float32)
        if not numpy.isfinite(embeddings).all():
            component = self.programs.entries["encode"].component
            raise NotFinite("the face's embeddings are not finite", view.config, component)
        return {self.gives[0]: embeddings}

    @classmethod
    def temporaries(cls, resolved):
        return max(one.temporaries(resolved.config) for one in resolved.family.faces.values())
