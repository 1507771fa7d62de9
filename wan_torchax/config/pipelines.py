"""Problems of a pipeline: its graph, the segments that it repeats, its decoders, which stages run, and the size of what
they make. Part of the checks of validation.py. No JAX, no torch."""
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from wan_torchax import own_path
from wan_torchax.config import inputs
from wan_torchax.config.commandline import options, read_option
from wan_torchax.config.geometry import is_segmented, segment_count
from wan_torchax.config.graph import Graph
from wan_torchax.config.long import longer_with, most_frames
from wan_torchax.config.registry import STAGES, family_of
from wan_torchax.config.schema import DTYPES
from wan_torchax.config.wording import nearest_multiple, one_of

MOST_SHIFT = 50  # FLUX's grows with the image: 25 at four megapixels


def pipeline_problems(config: DictConfig) -> Iterator[str]:
    """The graph itself: every name exists, and every value a stage takes is available by then."""
    graph, family = Graph.of(config.pipeline), family_of(config)
    for name, stage in graph.stages.items():
        yield from one_of("pipeline.stages", name, STAGES)
        for component in stage.uses:
            yield from one_of(f"pipeline.stages.{name}.uses", component, family.components)
            if component in family.components and family.described_by(component) not in config.model.dtype:
                yield f"model.dtype.{family.described_by(component)}: missing; one of: {', '.join(DTYPES)}"
    yield from segment_problems(config)
    for name, value in graph.missing(graph.stages):
        yield f"pipeline.stages.{name}.takes={value}: neither an input nor given by a stage before {name}"
    given = [value for stage in graph.stages.values() for value in stage.gives]
    for value in sorted({value for value in given if given.count(value) > 1 or value in graph.inputs}):
        yield f"pipeline.stages: {value} is given twice; every value has one name and one giver"
    for value, key in graph.inputs.items():
        parent, _, last = key.rpartition(".")
        if OmegaConf.select(config, parent) is None or last not in OmegaConf.select(config, parent):
            yield f"pipeline.inputs.{value}={key}: no such key in the config"


def segment_problems(config: DictConfig) -> Iterator[str]:
    """Repeated stages must be consecutive, cover whole latent frames, and carry values that they give."""
    segments, names = config.pipeline.segments, list(config.pipeline.stages)
    if not segments.stages:
        return
    key, stages = "pipeline.segments", list(segments.stages)
    if "".join(f"/{name}/" for name in stages) not in "".join(f"/{name}/" for name in names):
        yield f"{key}.stages={stages}: must be stages of the pipeline that follow each other: {', '.join(names)}"
        return
    scale = family_of(config).geometry(config.model.architecture).frame_scale
    one, rule = (0, f"{scale}n") if segments.remembered else (1, f"{scale}n+1")  # behind others, all frames are alike
    if segments.frames < 1 or (segments.frames - one) % scale:
        yield f"{key}.frames={segments.frames}: must be {rule}; {nearest_multiple(segments.frames, scale, one)}"
    elif segments.frames > config.model.max_frames:
        yield f"{key}.frames={segments.frames}: {config.model.name} takes at most {config.model.max_frames}"
    elif not 0 <= segments.dropped < segments.frames:
        yield f"{key}.dropped={segments.dropped}: must be from 0 to {segments.frames - 1}"
    if not 0 <= segments.overlap < segments.frames:
        yield f"{key}.overlap={segments.overlap}: must be from 0 to {segments.frames - 1}"
    given = [value for name in stages for value in config.pipeline.stages[name].gives]
    for value, source in segments.carry.items():
        yield from one_of(f"{key}.carry.{value}", source, given)


def decoder_problems(config: DictConfig) -> Iterator[str]:
    """The decoders of the video and of previews against the model, and where their weights are."""
    used, tiny = Graph.of(config.pipeline).components(config.pipeline.stages), family_of(config).tiny
    name = tiny.component if tiny else ""
    if config.vae.component not in used:
        yield f"vae={config.vae.name}: model={config.model.name} has its own VAE alone; use vae=exact"
    elif config.preview.component not in (config.vae.component, name):
        yield f"preview={config.preview.name}: model={config.model.name} has its own VAE alone; use preview=exact"
    elif config.vae.component == name:
        yield from missing_decoder(config, f"vae={config.vae.name}", name)
    elif config.preview.component == name and config.preview_every:
        yield from missing_decoder(config, f"preview={config.preview.name}", name)
    given, model = config.model.paths.get(name), config.model.name
    own = read_option("model", model).get("paths", {}).get(name) if model in options("model") else None
    if given not in (None, own) and name not in (config.vae.component, config.preview.component):
        remedy = f"set vae=tiny or preview=tiny, or leave it out: ~model.paths.{name}"
        yield f"model.{name}={given}: nothing decodes with it; {remedy}"


def missing_decoder(config: DictConfig, chosen: str, component: str) -> Iterator[str]:
    """Checkpoints bring no tiny decoder, except the demo's; a plan needs none."""
    is_there = component in config.model.paths or (own_path(config.model.path) / component).is_dir()
    if config.task != "plan" and not is_there:
        remedy = f"give model.{component}=taew2_1.safetensors (docs/models.md says which goes with which model)"
        yield f"{chosen}: model={config.model.name} brings no tiny decoder; {remedy}"


def stage_problems(config: DictConfig) -> Iterator[str]:
    """Which of the pipeline's stages run."""
    choices = list(config.pipeline.stages)
    if not config.stages:
        yield f"stages=[]: name at least one of {', '.join(choices)}"
    for stage in config.stages:
        yield from one_of("stages", stage, choices)
    ordered = [stage for stage in choices if stage in config.stages]
    if set(ordered) == set(config.stages) and list(config.stages) != ordered:
        yield f"stages={list(config.stages)}: each once and in order; nearest [{','.join(ordered)}]"
    yield from apart_problems(config)


def apart_problems(config: DictConfig) -> Iterator[str]:
    """A stage that goes on from an earlier segment needs the stage that gives what is carried over."""
    graph = Graph.of(config.pipeline)
    for value, source in graph.carry.items():
        giver = graph.giver(source)
        takers = [name for name in config.stages if name in graph.stages and value in graph.stages[name].takes]
        if takers and giver not in config.stages and segment_count(config) > 1:
            reason = f"{takers[0]} goes on from what {giver} gives of the segment before"
            yield f"stages={list(config.stages)}: {reason}; add {giver} to stages"


def missing_problems(config: DictConfig) -> Iterator[str]:
    """Values that a stage takes but neither an earlier stage nor another run gives."""
    graph = Graph.of(config.pipeline)
    if config.task != "generate" or config.resume is not None:
        return
    for name, value in graph.missing(config.stages):
        giver = graph.giver(value)
        yield (
            f"stages={list(config.stages)}: {name} takes {value}, which {giver} gives; add {giver} to stages, or "
            f"resume=<run folder that holds the {giver} stage>"
        )


def resolution_problems(config: DictConfig) -> Iterator[str]:
    model, resolution = config.model, config.resolution
    geometry = family_of(config).geometry(model.architecture)
    for key, multiple in geometry.multiples.items():
        size = resolution[key]
        if size % multiple:
            yield f"resolution.{key}={size}: must be a multiple of {multiple}; {nearest_multiple(size, multiple)}"
        elif key not in inputs.unknown_sides(config) and not model.min_size <= size <= model.max_size:
            closest = min(max(size, model.min_size), model.max_size)
            yield f"resolution.{key}={size}: {model.name} takes {model.min_size} to {model.max_size}; nearest {closest}"
    frames, scale = resolution.frames, geometry.frame_scale
    if frames < 1 or ((frames - 1) % scale and not is_segmented(config)):
        yield f"resolution.frames={frames}: must be {scale}n+1; {nearest_multiple(frames, scale, 1)}"
    elif frames > most_frames(config):
        yield f"resolution.frames={frames}: {model.name} takes at most {most_frames(config)}{longer_with(config)}"
    if not 1 <= resolution.fps <= 120:
        yield f"resolution.fps={resolution.fps}: must be from 1 to 120; usual 16"
    if not 0 < resolution.flow_shift <= MOST_SHIFT:
        shift = resolution.flow_shift
        yield f"resolution.flow_shift={shift}: must be above 0 and at most {MOST_SHIFT}; usual 3.0 (480p) or 5.0 (720p)"
