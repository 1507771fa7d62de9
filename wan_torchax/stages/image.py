"""Pictures to the tokens that a transformer attends to."""
import functools
from pathlib import Path

import numpy

from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.pictures import clip_picture, read_preprocessing
from wan_torchax.stages.stage import Stage


class Image(Stage):
    """One or two pictures to embeddings (pictures, tokens, width)."""

    settings = ("model.dtype.transformer",)
    result_settings = ("model.path", "model.paths", "model.revision", "model.dtype.image_encoder", "ops")
    results_remembered = 16

    @classmethod
    def result_shapes(cls, config):
        encoder = config.model.architecture.image_encoder
        tokens = (encoder.image_size // encoder.patch_size) ** 2 + 1
        return {"image_embeddings": (pictures_taken(config.pipeline.stages), tokens, encoder.hidden_size)}

    @classmethod
    def derived(cls, resolved):
        return {"pictures": pictures_taken(resolved.graph.stages)}

    def build(self):
        from wan_torchax.models.image_encoder import encode_picture
        from wan_torchax.patches import call_module

        module, encoder = self.module("image_encoder"), self.config.model.architecture.image_encoder
        module.forward = functools.partial(encode_picture, module)
        dtype, given = self.config.model.dtype.image_encoder, self.config.model.dtype.transformer

        def encode(arrays, pixels):
            return call_module(module, arrays, pixels.astype(dtype)).astype(given)

        shape = (self.recipe.derived["pictures"], 3, encoder.image_size, encoder.image_size)
        pixels = struct(self.mesh, shape, "float32")
        self.add("encode", Program(encode, "image_encoder", [pixels], replicated(self.mesh)))

    def check(self, resolved):
        read_preprocessing(processor_folder(resolved))

    def run(self, resolved, values, tell):
        preprocessing = read_preprocessing(processor_folder(resolved))
        paths = [Path(values[name]) for name in ("image", "last_image") if name in values]
        pixels = numpy.stack([clip_picture(path, preprocessing) for path in paths])
        embeddings = numpy.asarray(self("encode", *self.programs.put("encode", (pixels,)))).astype(numpy.float32)
        if not numpy.isfinite(embeddings).all():
            raise NotFinite("the picture's embeddings are not finite", resolved.config, "image_encoder")
        return {"image_embeddings": embeddings}

    @classmethod
    def temporaries(cls, resolved):
        """A few copies of the widest layer."""
        encoder = resolved.config.model.architecture.image_encoder
        tokens = (encoder.image_size // encoder.patch_size) ** 2 + 1
        return 4 * tokens * encoder.intermediate_size * 4 * pictures_taken(resolved.graph.stages)


def pictures_taken(stages) -> int:
    return sum(value in ("image", "last_image") for value in stages["image"].takes)


def processor_folder(resolved) -> Path:
    return resolved.checkpoints["image_encoder"].folder.parent / "image_processor"
