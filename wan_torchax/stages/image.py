"""Images to image embeddings for cross-attention."""
from pathlib import Path

import numpy

from wan_torchax.config.resolve import View
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.models.family import PictureEncoding
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage


class Image(Stage):
    """Images, in the pipeline's order, through the family's image encoder: (images, …). If it gives several values, the
    images are shared evenly among them. Of a video, the first frame."""

    settings = ("model.dtype.transformer",)
    results_remembered = 16

    @classmethod
    def encoding(cls, name, job) -> PictureEncoding:
        return job.family.pictures[job.graph.stages[name].gives[0]]

    @classmethod
    def result_shapes(cls, name, job):
        stage = job.graph.stages[name]
        shape = len(stage.takes) // len(stage.gives), *cls.encoding(name, job).shape(job.config)
        return dict.fromkeys(stage.gives, shape)

    @classmethod
    def derived(cls, name, job):
        return {"pictures": list(job.graph.stages[name].takes)}

    @classmethod
    def reads_for(cls, name, job):
        return *cls.reads, *cls.encoding(name, job).settings

    def build(self):
        encoding = self.family.pictures[self.gives[0]]
        module, own = self.module(encoding.component), self.family.described_by(encoding.component)
        dtype, given = self.config.model.dtype[own], self.config.model.dtype.transformer

        def encode(arrays, pixels):
            return encoding.encode(module, arrays, pixels.astype(dtype)).astype(given)

        shape = len(self.recipe.derived["pictures"]), *encoding.pixels(self.config)
        pixels = struct(self.mesh, shape, "float32")
        self.add("encode", Program(encode, encoding.component, [pixels], replicated(self.mesh)))

    def folders(self, view: View) -> dict[str, Path]:
        component = self.family.pictures[self.gives[0]].component
        return dict(view.checkpoints[component].folders)

    def check(self, view):
        self.family.pictures[self.gives[0]].check(self.folders(view))

    def run(self, view, values, emit):
        read, folders = self.family.pictures[self.gives[0]].read, self.folders(view)
        pixels = numpy.stack([read(folders, values[name], view.config) for name in self.recipe.derived["pictures"]])
        embeddings = numpy.asarray(self("encode", *self.programs.put("encode", (pixels,)))).astype(numpy.float32)
        if not numpy.isfinite(embeddings).all():
            component = self.programs.entries["encode"].component
            raise NotFinite("the picture's embeddings are not finite", view.config, component)
        return dict(zip(self.gives, numpy.split(embeddings, len(self.gives))))

    @classmethod
    def temporaries(cls, resolved):
        return max(one.temporaries(resolved.config) for one in resolved.family.pictures.values())
