"""How prompt and negative prompt are combined (conf/guider): what cannot be. No JAX, no torch."""
from collections.abc import Iterator

from omegaconf import DictConfig

from wan_torchax.config import coarse
from wan_torchax.config.geometry import guided
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import GUIDERS, Guider
from wan_torchax.config.wording import one_of


def guider_problems(config: DictConfig) -> Iterator[str]:
    guider = config.guider
    if guider.mode is not None:
        yield from one_of("guider.mode", guider.mode, GUIDERS)
    limits = {"rescale": (0, 1), "zero_steps": (0, config.steps), "momentum": (-1, 1), "parallel": (0, 1)}
    limits |= {"most_norm": (0, 1e6), "nag": (1, 100), "nag_limit": (0, 100), "nag_share": (0, 1)}
    limits |= {"skip_scale": (0, 20), "skip_start": (0, 1), "skip_stop": (0, 1)}
    for name, (least, most) in limits.items():
        if not least <= guider[name] <= most:
            yield f"guider.{name}={guider[name]}: must be from {least} to {most:g}"
    if guider.mode != "apg" and differs(guider, "momentum", "parallel", "most_norm"):
        yield f"guider.mode={guider.mode}: momentum, parallel and most_norm are of guider=apg"
    if guider.nag == 1 and differs(guider, "nag_limit", "nag_share"):
        yield "guider.nag=1: is none, so nag_limit and nag_share are of no use; use guider=nag"
    if guider.nag != 1 and not family_of(config).has_nag:
        remedy = "use guider.nag=1, and guidance_scale above 1 for a negative prompt"
        yield f"guider.nag={guider.nag}: {config.model.family} has no cross-attention to text; {remedy}"
    yield from skip_problems(config)
    if not guided(config) and (guider.mode, guider.rescale, guider.zero_steps, *guider.skip_layers) != (None, 0, 0):
        reason = f"guidance_scale={config.guidance_scale} is none"
        if "guidance_scale" in config.pipeline.inputs.values():
            reason = "guidance is an input of the model"
        yield f"guider={guider.name}: combines prompt and negative prompt, and {reason}; use guider=cfg"


def skip_problems(config: DictConfig) -> Iterator[str]:
    """Skip-layer guidance."""
    guider, layers = config.guider, family_of(config).skippable(config.model.architecture)
    if not guider.skip_layers:
        if differs(guider, "skip_scale", "skip_start", "skip_stop", "skip_negative"):
            yield "guider.skip_layers=[]: skips none, so the other skip_ keys are of no use; name some, e.g. [9]"
        return
    key = f"guider.skip_layers={guider.skip_layers}"
    if not layers:
        yield f"{key}: {config.model.family} has no guidance to skip layers for; leave it out"
    elif not all(0 <= layer < layers for layer in guider.skip_layers):
        yield f"{key}: {config.model.name} has layers 0 to {layers - 1}; nearest {layers - 1}"
    if guider.skip_negative and differs(guider, "skip_scale"):
        yield f"guider.skip_scale={guider.skip_scale}: of a third pass, not of guider.skip_negative; leave one out"
    if guider.skip_start >= guider.skip_stop:
        yield f"guider.skip_start={guider.skip_start}: must be below guider.skip_stop={guider.skip_stop}"
    if coarse.is_on(config):
        yield f"{key}: pipeline={config.pipeline.name} counts its coarse steps apart; use one without them"


def differs(guider: DictConfig, *names: str) -> bool:
    """Whether one of these is not as usual."""
    usual = Guider()
    return any(guider[name] != getattr(usual, name) for name in names)
