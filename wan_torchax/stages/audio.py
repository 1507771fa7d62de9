"""A sound to its features, frame by frame of the video."""
from pathlib import Path

import numpy

from wan_torchax.config import sounds
from wan_torchax.config.geometry import segment_count
from wan_torchax.devices.sharding import replicated, struct
from wan_torchax.models.family import SoundEncoding
from wan_torchax.runtime.programs import NotFinite, Program
from wan_torchax.stages.stage import Stage

PLACES = {"before": "int32", "after": "int32", "share": "float32", "heard": "float32"}


class Audio(Stage):
    """The sound of all segments through the family's encoder (Family.sounds): (frames, …). Where the sound is over,
    features are zero."""

    reads = ("resolution.fps",)

    @classmethod
    def encoding(cls, name, job) -> SoundEncoding:
        return job.family.sounds[job.graph.stages[name].gives[0]]

    @classmethod
    def derived(cls, name, job):
        frames = segment_count(job.config) * job.config.pipeline.segments.frames
        return {"frames": frames, "samples": -(-frames * sounds.RATE // job.config.resolution.fps)}

    @classmethod
    def result_shapes(cls, name, job):
        frames = cls.derived(name, job)["frames"]
        return {job.graph.stages[name].gives[0]: (frames, *cls.encoding(name, job).shape(job.config))}

    def build(self):
        encoding, derived = self.family.sounds[self.gives[0]], self.recipe.derived
        module = self.module(encoding.component)

        def encode(arrays, samples, count, places):
            hidden, share = encoding.encode(module, arrays, samples, count), places["share"][:, None]
            features = hidden[:, places["before"]] * (1 - share) + hidden[:, places["after"]] * share
            return (features * places["heard"][:, None]).swapaxes(0, 1)

        def array(dtype, *shape):
            return struct(self.mesh, shape, dtype)

        places = {name: array(dtype, derived["frames"]) for name, dtype in PLACES.items()}
        arguments = [array("float32", derived["samples"]), array("int32"), places]
        self.add("encode", Program(encode, encoding.component, arguments, replicated(self.mesh)))

    def run(self, view, values, emit):
        encoding, derived = self.family.sounds[self.gives[0]], self.recipe.derived
        samples = sounds.read(Path(values["audio"]))[: derived["samples"]]
        count = encoding.tokens(len(samples), view.config)
        places = frame_places(count, encoding.rate, encoding.steps, view.config.resolution.fps, derived["frames"])
        padded = numpy.zeros(derived["samples"], numpy.float32)
        padded[: len(samples)] = normalized(samples)
        arguments = self.programs.put("encode", (padded, numpy.int32(len(samples)), places))
        features = numpy.asarray(self("encode", *arguments)).astype(numpy.float32)
        if not numpy.isfinite(features).all():
            raise NotFinite("the sound's features are not finite", view.config, encoding.component)
        return {self.gives[0]: features}

    @classmethod
    def temporaries(cls, resolved):
        return max(one.temporaries(resolved.config) for one in resolved.family.sounds.values())


def normalized(samples: numpy.ndarray) -> numpy.ndarray:
    """With a mean of 0 and a variance of 1, as the encoder was trained; silence stays silent."""
    return (samples - samples.mean()) / numpy.sqrt(samples.var() + 1e-7)


def frame_places(tokens: int, rate: float, steps: float, fps: float, frames: int) -> dict[str, numpy.ndarray]:
    """Where each frame's features lie among so many tokens, `rate` a second: the tokens before and after, the latter's
    share, and 1 while there is sound. Tokens are first resampled linearly to `steps` a second, of which a frame takes
    the nearest."""
    resampled = int(tokens / rate * steps)
    nearest = numpy.round(numpy.arange(frames) / fps * steps).astype(int)
    heard = nearest < resampled
    places = numpy.where(heard, nearest, 0) * ((tokens - 1) / max(resampled - 1, 1))
    before = places.astype(int)
    values = before, numpy.minimum(before + 1, tokens - 1), places - before, heard
    return {name: value.astype(dtype) for (name, dtype), value in zip(PLACES.items(), values)}
