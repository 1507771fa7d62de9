"""Schedulers as tables, guidance, prompts, dtypes and what stops a run."""
import diffusers
import jax
import numpy
import pytest
import torch
from safetensors.numpy import load_file

import run
from tests.conftest import make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.stages import denoise as stages


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm"])
def test_the_table_steps_as_diffusers_does(scheduler, steps):
    """A made-up model that depends on latents and time, through diffusers' scheduler and through our coefficients."""
    config = make_config(f"scheduler={scheduler}", f"steps={steps}")
    timesteps, coefficients = stages.scheduler_table(config)
    theirs = getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)
    theirs.set_timesteps(steps)
    latents = torch.randn(1, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    state = numpy.zeros((coefficients.shape[1], *latents.shape), numpy.float32)
    state[0] = latents
    for index, timestep in enumerate(theirs.timesteps):
        latents = theirs.step(torch.sin(3 * latents) + timestep / 1000, timestep, latents, return_dict=False)[0]
        state = stages.advance(state, numpy.sin(3 * state[0]) + timesteps[index] / 1000, coefficients[index])
    numpy.testing.assert_allclose(state[0], latents.numpy(), atol=2e-5)
    assert numpy.array_equal(timesteps, theirs.timesteps.numpy().astype("float32"))


def test_a_scheduler_that_is_none_is_told():
    with pytest.raises(ConfigError, match="not a scheduler in diffusers"):
        stages.scheduler_table(make_config("scheduler.target=WanPipeline"))


@pytest.mark.parametrize("argument", ["algorithm_type=sde-dpmsolver++", "+thresholding=true"])
def test_a_scheduler_that_no_table_can_stand_for_is_told(argument):
    sign, argument = ("+", argument[1:]) if argument[0] == "+" else ("", argument)
    with pytest.raises(ConfigError, match="is not deterministic and linear"):
        stages.scheduler_table(make_config("scheduler=dpm", f"{sign}scheduler.arguments.{argument}", "steps=8"))


def test_noise_is_the_seed_alone():
    first, again, other = (stages.noise(make_config(*overrides)) for overrides in (["seed=1"], ["seed=1", "mesh=cpu_8"], ["seed=2"]))
    assert numpy.array_equal(first, again) and not numpy.array_equal(first, other)
    wanted = torch.randn((1, 16, 5, 16, 16), generator=torch.Generator("cpu").manual_seed(1))
    assert numpy.array_equal(first, wanted.numpy())


def test_a_prompt_that_is_too_long_is_cut_and_told_where():
    warnings = []
    tokens, mask = stages.tokenize(make_config(), ["red circle " * 600 + "THE END"], warnings.append)
    assert tokens.shape == mask.shape == (1, 512) and mask.sum() == 512
    assert "cut after 512" in warnings[0] and "red circle" in warnings[0]
    stages.tokenize(make_config(), ["a red circle"], warnings.append)
    assert len(warnings) == 1


def latents(folder):
    return load_file(folder / "denoise.safetensors")["latents"]


def test_guidance(generate):
    """Sequential is batched; at scale 1 the negative prompt plays no part; else it does."""
    only = "stages=[text,denoise]"
    batched = latents(generate(only, folder="batched"))
    sequential = latents(generate(only, "guidance=sequential", folder="sequential"))
    numpy.testing.assert_allclose(sequential, batched, atol=1e-4)
    other = latents(generate(only, "negative_prompt=a blue star", folder="other"))
    assert numpy.abs(other - batched).max() > 1e-3
    plain = latents(generate(only, "guidance_scale=1", "negative_prompt=a blue star", folder="plain"))
    again = latents(generate(only, "guidance_scale=1", "negative_prompt=", folder="again"))
    assert numpy.array_equal(plain, again)


@pytest.mark.parametrize("override", ["guidance=sequential", "guidance_scale=1"])
def test_one_forward_at_a_time_runs_on_a_mesh_with_dp(generate, override):
    one = latents(generate("stages=[text,denoise]", override, folder="one"))
    eight = latents(generate("stages=[text,denoise]", override, "mesh=cpu_8", folder="eight"))
    numpy.testing.assert_allclose(eight, one, atol=1e-4)


def test_bfloat16_everywhere_is_close_to_float32(generate):
    exact = load_file(generate(folder="exact") / "decode.safetensors")["frames"].astype(float)
    half = load_file(generate("model.dtype={text_encoder:bfloat16,transformer:bfloat16,vae:bfloat16}", folder="half") / "decode.safetensors")["frames"]
    assert 0 < numpy.abs(exact - half).mean() < 4


def test_float32_islands_are_kept():
    config = make_config("model.dtype.transformer=bfloat16")
    stage = stages.build_denoise(config, run.make_mesh(config))
    kept = {name.split(".")[-2] if "scale_shift" not in name else "scale_shift_table" for name, tensor in stage.tensors.items() if tensor.dtype == "float32"}
    assert {"norm2", "scale_shift_table", "rope"} <= kept
    assert stage.tensors["blocks.0.block.attn1.to_q.weight"].dtype == "bfloat16"


@pytest.mark.parametrize("frames", [5, 17])
def test_the_decode_programs_do_not_grow_with_the_video(frames):
    config = make_config(f"resolution.frames={frames}")
    run.find_checkpoint(config, "decode")
    lowered = stages.lower(stages.build_decode(config, run.make_mesh(config)))
    sizes = {name: len(program.as_text()) for name, program in lowered.items()}
    longer = make_config("resolution.frames=81")
    run.find_checkpoint(longer, "decode")
    again = stages.lower(stages.build_decode(longer, run.make_mesh(longer)))
    assert sizes == {name: len(program.as_text()) for name, program in again.items()}


def test_numbers_that_overflow_stop_the_run_and_write_nothing(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "noise", lambda config: numpy.full(stages.latent_shape(config), numpy.inf, numpy.float32))
    with pytest.raises(stages.NotFinite, match=r"after step 1 of 3: the checkpoint may be damaged; a guidance_scale that is too high"):
        generate()
    assert not (tmp_path / "run" / "video.mp4").exists() and not (tmp_path / "run" / "denoise.safetensors").exists()
    assert (tmp_path / "run" / "text.safetensors").exists()


def test_a_compilation_during_a_stage_is_an_error():
    with pytest.raises(RuntimeError, match="compiled during a stage"), stages.no_compilation():
        jax.jit(lambda x: x * 3.25 + 1)(numpy.ones(7)).block_until_ready()


def test_a_program_that_cannot_be_compiled_fails_where_it_is_needed():
    config = make_config("sharding.transformer.activations.blocks.spec=[null,null,null,null]")
    stage = stages.build_denoise(config, run.make_mesh(config))
    with stages.compiling({"denoise": stage}, lambda *report: None), pytest.raises(ConfigError, match="shorten the spec"):
        stage.compiled["step"].result()


def test_an_activation_rule_that_matches_nothing_is_told():
    config = make_config("sharding.transformer.activations.blocks.pattern='block\\.\\d+'")
    with pytest.raises(ConfigError, match=r"sharding.transformer.activations.blocks.pattern=.* matches no module; nearest: blocks.0"):
        stages.build_denoise(config, run.make_mesh(config))
