"""The first steps of a video at half height and width (config/coarse.py), and its conditions at that size.

To these stages the job is one of half height and width (Job.halved), whose values carry a prefix in the pipeline:

    coarse_encode   image -> coarse_condition
    coarse          embeddings, coarse_condition -> coarse_latents, as they are before the first step of the full size
"""
from dataclasses import replace

from wan_torchax.config.coarse import PREFIX
from wan_torchax.events import Stepped
from wan_torchax.stages.denoise import Denoise
from wan_torchax.stages.encode import Encode
from wan_torchax.stages.sampling import Table, coarse_steps, scheduler_table
from wan_torchax.stages.stage import Stage


class Halved(Stage):
    """A stage that sees the job at half height and width."""

    @classmethod
    def seen(cls, job):
        return job.halved()

    @classmethod
    def derived(cls, name, job):
        return super().derived(name, cls.seen(job))

    @classmethod
    def view_of(cls, name, job):
        return super().view_of(name, cls.seen(job))

    @classmethod
    def result_shapes(cls, name, job):
        (value,), (shape,) = job.graph.stages[name].gives, super().result_shapes(name, cls.seen(job)).values()
        return {value: shape}

    @classmethod
    def amount(cls, name, job):
        return super().amount(name, cls.seen(job))

    @classmethod
    def temporaries(cls, resolved):
        return super().temporaries(cls.seen(resolved))


class CoarseEncode(Halved, Encode):
    """Conditions of the coarse steps."""

    share = 1.0

    @staticmethod
    def known(value):
        return value.removeprefix(PREFIX)


class Coarse(Halved, Denoise):
    """The coarse steps, each computed in full: caches are for the steps after them."""

    share = 30.0
    reads = tuple(key for key in Denoise.reads if key != "cache")
    reads_beside = (*Denoise.reads_beside, "cache")

    @classmethod
    def table(cls, config, geometry, store):
        whole, (*_, height, width) = scheduler_table(config, store), geometry.latent_shape(config.resolution)
        return Table(*(column[: coarse_steps(config, height, width, store)] for column in whole))

    @classmethod
    def problems(cls, name, job):
        cls.derived(name, job)  # raises, if the steps are of one size only
        return iter(())

    @classmethod
    def takes(cls, name, job):
        return [value.removeprefix(PREFIX) for value in super().takes(name, job)]

    @classmethod
    def files(cls, job):
        return {}

    @classmethod
    def report(cls, resolved):
        return {}  # a run's metrics are of the steps of its full size

    def run(self, view, values, emit):
        def listener(event):
            emit(replace(event, work="coarse") if isinstance(event, Stepped) else event)

        own = {value.removeprefix(PREFIX): array for value, array in values.items()}
        return {self.gives[0]: super().run(view, own, listener)["latents"]}
