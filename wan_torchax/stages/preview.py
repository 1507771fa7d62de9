"""Previews of latents that are still being denoised, by a decoder that is quick enough for all frames: conf/preview."""
import numpy

from wan_torchax.stages.decode import Decode


class Preview(Decode):
    """Not a stage of a pipeline: a helper of those that denoise, whose components are loaded beside theirs."""

    @classmethod
    def component(cls, config):
        return config.preview.component

    def preview(self, estimate, video):
        """All frames of a video."""
        chunks, caches, latents = [], None, numpy.asarray(estimate)[video : video + 1]
        for index in range(latents.shape[2]):
            latent = self.programs.put("first", (latents[:, :, index : index + 1],))
            (frames,), _, caches = self("later", *latent, caches) if index else self("first", *latent)
            chunks.append(frames)
        return numpy.concatenate(chunks)
