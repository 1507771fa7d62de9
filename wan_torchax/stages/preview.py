"""Previews of latents that are still being denoised, by a decoder that is quick enough for all frames: conf/preview."""
import numpy

from wan_torchax.events import silence
from wan_torchax.records.files import Spool
from wan_torchax.stages.decode import Decode, Decoding


class Preview(Decode):
    """Not a stage of a pipeline: a helper of those that denoise, whose components are loaded beside theirs."""

    @classmethod
    def component(cls, config):
        return config.preview.component

    def preview(self, estimate, video):
        """All frames of a video."""
        latents, decoding = numpy.asarray(estimate)[video : video + 1], Decoding(self, None, silence, Spool())
        chunks = [decoding.decode(latent)[0] for latent in numpy.split(latents, latents.shape[2], axis=2)]
        return numpy.concatenate(chunks)
