"""A pipeline as a graph: stages depend on each other through the values they take and give (conf/pipeline). No JAX, no
torch."""
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wan_torchax.config.geometry import previewer_of
from wan_torchax.config.schema import Pipeline, PipelineStage


def helpers_of(config) -> dict[str, PipelineStage]:
    """What decodes previews, if no stage of the pipeline does, and what encodes pictures of a live video again."""
    previewer, helpers = previewer_of(config), {}
    if previewer:
        helpers["preview"] = PipelineStage([previewer], ["latents"])
    if config.live.reencode:
        helpers["reencode"] = PipelineStage(["vae"], ["frames"], ["first_latent"])
    return helpers


@dataclass(frozen=True)
class Graph:
    """The stages of a pipeline, in the order they run."""

    inputs: dict[str, str]  # a value's name -> its config key
    stages: dict[str, PipelineStage]
    repeated: tuple[str, ...] = ()  # stages that run once per segment of a video
    carry: dict[str, str] = field(default_factory=dict)  # a value that a segment takes -> the previous segment's output
    helpers: dict[str, PipelineStage] = field(default_factory=dict)  # these do not run: others need them while they do

    @classmethod
    def of(cls, pipeline: Pipeline, helpers: Mapping[str, PipelineStage] | None = None) -> "Graph":
        segments = pipeline.segments
        repeated, carry = tuple(segments.stages), dict(segments.carry)
        return cls(dict(pipeline.inputs), dict(pipeline.stages), repeated, carry, dict(helpers or {}))

    def stage(self, name: str) -> PipelineStage:
        """A stage that runs, or one that helps."""
        return self.stages[name] if name in self.stages else self.helpers[name]

    def giver(self, value: str) -> str | None:
        """The stage that gives a value; None for an input."""
        return next((name for name, stage in self.stages.items() if value in stage.gives), None)

    def upstream(self, name: str, goes_on: bool = False) -> list[str]:
        """The stage and every stage it depends on, in order; if it `goes_on`, in the segment before too."""
        needed, carry = {name}, self.carry if goes_on else {}
        while True:
            takes = {value for stage in needed for value in self.stages[stage].takes}
            takes |= {carry[value] for value in takes if value in carry}
            more = {giver for value in takes if (giver := self.giver(value)) is not None}
            if more <= needed:
                return [stage for stage in self.stages if stage in needed]
            needed |= more

    def input_keys(self, name: str, goes_on: bool = False) -> list[str]:
        """The config keys of the inputs that reach a stage, directly or through other stages."""
        taken = {value for stage in self.upstream(name, goes_on) for value in self.stages[stage].takes}
        return [key for value, key in self.inputs.items() if value in taken]

    def components(self, names: Iterable[str]) -> list[str]:
        """The components of the named stages, each once."""
        return list(dict.fromkeys(component for name in names for component in self.stage(name).uses))

    def missing(self, names: Iterable[str], at_hand: Iterable[str] = ()) -> list[tuple[str, str]]:
        """(stage, value) for every value that a stage takes but neither an input nor an earlier stage gives."""
        given, absent = {*self.inputs, *self.carry, *at_hand}, []
        for name in names:
            absent += [(name, value) for value in self.stages[name].takes if value not in given]
            given |= set(self.stages[name].gives)
        return absent
