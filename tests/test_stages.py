"""Schedulers as tables, guidance, prompts, dtypes and what stops a run."""
import diffusers
import jax
import numpy
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.conftest import ROOT, SMALL, build, make_config, metrics, resolve_here, run_into
from wan_torchax.config.geometry import guided
from wan_torchax.config.schema import ConfigError
from wan_torchax.events import silence
from wan_torchax.kernels import splash
from wan_torchax.models.tokens import tokenize
from wan_torchax.runtime.programs import NotFinite, Unexpected, compiling, no_compilation
from wan_torchax.session import session
from wan_torchax.stages import denoise, sampling


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm"])
def test_the_table_steps_as_diffusers_does(scheduler, steps):
    """A made-up model that depends on latents and time, through diffusers' scheduler and through our coefficients."""
    config = make_config(f"scheduler={scheduler}", f"steps={steps}")
    timesteps, coefficients, _ = sampling.scheduler_table(config)
    theirs = getattr(diffusers, config.scheduler.target)(**config.scheduler.arguments)
    theirs.set_timesteps(steps)
    latents = torch.randn(1, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    state = numpy.zeros((coefficients.shape[1], *latents.shape), numpy.float32)
    state[0] = latents
    for index, timestep in enumerate(theirs.timesteps):
        latents = theirs.step(torch.sin(3 * latents) + timestep / 1000, timestep, latents, return_dict=False)[0]
        state = sampling.advance(state, numpy.sin(3 * state[0]) + timesteps[index] / 1000, coefficients[index])
    numpy.testing.assert_allclose(state[0], latents.numpy(), atol=2e-5)
    assert numpy.array_equal(timesteps, theirs.timesteps.numpy().astype("float32"))


def test_a_scheduler_that_is_none_is_told():
    with pytest.raises(ConfigError, match="not a scheduler in diffusers"):
        sampling.scheduler_table(make_config("scheduler.target=WanPipeline"))


def test_a_scheduler_that_no_table_can_stand_for_is_told():
    with pytest.raises(ConfigError, match="its steps are not linear"):
        sampling.scheduler_table(make_config("scheduler=dpm", "+scheduler.arguments.thresholding=true", "steps=8"))


@pytest.mark.parametrize("override", ["scheduler.arguments.prediction_type=none", "+scheduler.arguments.shift=3"])
def test_arguments_that_a_scheduler_does_not_take_are_told(override):
    message = r"scheduler.target=UniPCMultistepScheduler: fails with .*; use scheduler=unipc"
    with pytest.raises(ConfigError, match=message):
        sampling.scheduler_table(make_config(override))


@pytest.mark.parametrize("shape", [(1, 16, 5, 16, 16), (1, 16, 3, 15, 13), (1, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_noise_is_torchs_to_the_last_bit_or_two(seed, shape):
    """Also where the last group of sixteen is not whole. Processors differ in the last bits of logarithms."""
    expected = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    numpy.testing.assert_allclose(sampling.noise(seed, shape), expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("seed", [0, 2025])
def test_noise_in_bfloat16_is_torchs(seed):
    """Torch 2.13 draws it from other bits than 2.10. Values on the edge between two may round to either."""
    shape, recent = (2, 16, 3, 5, 7), torch.__version__ >= "2.13"
    expected = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.bfloat16)
    drawn = sampling.noise(seed, shape, "bfloat16" if recent else "bfloat16_8bit")
    assert (drawn != expected.float().numpy()).mean() < 1e-3
    numpy.testing.assert_allclose(drawn, expected.float().numpy(), rtol=2**-7)


def test_noise_of_eight_bits_has_few_values():
    drawn = sampling.noise(0, (1, 16, 5, 16, 16), "bfloat16_8bit")
    assert drawn.max() <= 3.34 and abs(drawn.std() - 1) < 0.05
    numpy.testing.assert_allclose(drawn[0, 0, 0, 0, :4], [1.4609375, 0.29101562, 0.9609375, 1.5703125], rtol=1e-6)
    assert numpy.array_equal(sampling.rounded(drawn), drawn)


def test_linear_sigmas_are_shifted_once():
    config = make_config("scheduler=flow_euler", "steps=50", "resolution.flow_shift=7")
    times = sampling.scheduler_table(config).timesteps
    numpy.testing.assert_allclose(times[-3:], [308.8235, 225.8065, 125.0], rtol=1e-5)
    twice = sampling.scheduler_table(make_config("scheduler=euler", "steps=50", "resolution.flow_shift=7")).timesteps
    assert abs(twice[-1] - 46.8) < 0.1


def test_noise_is_the_seed_alone():
    first, again, other = (sampling.noise(seed, (1, 16, 5, 16, 16)) for seed in (1, 1, 2))
    assert numpy.array_equal(first, again) and not numpy.array_equal(first, other)


def test_a_prompt_that_is_too_long_is_cut_and_told_where(caplog):
    folder = ROOT / "models/demo/tokenizer"
    tokens, mask = tokenize(folder, ["red circle " * 600 + "THE END"], 512)
    assert tokens.shape == mask.shape == (1, 512) and mask.sum() == 512
    assert "cut after 512" in caplog.text and "red circle" in caplog.text
    caplog.clear()
    tokenize(folder, ["a red circle"], 512)
    assert not caplog.text


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
    numpy.testing.assert_allclose(eight, one, atol=1e-4 * numpy.abs(one).max())


def test_float32_islands_stay():
    tensors = build(resolve_here("model.dtype.transformer=bfloat16"), "denoise").specs["transformer"]
    full = {name for name, tensor in tensors.items() if tensor.dtype == "float32"}
    assert all(any(part in name for name in full) for part in ("norm2", "scale_shift_table", "rope"))
    assert tensors["blocks.*.attn1.to_q.weight"].dtype == "bfloat16"


@pytest.mark.system
def test_the_decode_programs_do_not_grow_with_the_video():
    sizes = []
    for frames in (5, 81):
        lowered = build(resolve_here(f"resolution.frames={frames}"), "decode").programs.lower()
        sizes.append({name: len(program.as_text()) for name, program in lowered.items()})
    assert sizes[0] == sizes[1]


def test_numbers_that_overflow_stop_the_run_and_write_nothing(generate, tmp_path, monkeypatch):
    infinite = numpy.float32(numpy.inf)
    monkeypatch.setattr(denoise, "noises", lambda seed, shape, dtype, skipped: iter([numpy.full(shape, infinite)]))
    message = r"after step 1 of 3: the checkpoint may be damaged; a guidance_scale that is too high"
    with pytest.raises(NotFinite, match=message):
        generate()
    assert not (tmp_path / "run" / "video.mp4").exists() and not (tmp_path / "run" / "denoise.safetensors").exists()
    assert (tmp_path / "run" / "text.safetensors").exists()


def test_a_compilation_during_a_stage_is_an_error():
    with pytest.raises(Unexpected, match="1 programs were compiled while text ran"), no_compilation("text"):
        jax.jit(lambda x: x * 3.25 + 1)(numpy.ones(7)).block_until_ready()


def test_a_program_that_cannot_be_compiled_fails_where_it_is_needed():
    programs = build(resolve_here("sharding.picture=[null,null,null,null,null,null]"), "decode").programs
    with compiling({"decode": programs}, silence), pytest.raises(ConfigError, match="shorten the spec"):
        programs.compiled["first"].result()


def test_a_stage_that_cannot_be_traced_stops_the_run_while_another_runs(generate, tmp_path):
    with pytest.raises(ConfigError, match="sharding.picture: an activation of shape"):
        generate("sharding.picture=[null,null,null,null,null,null]", "steps=900")
    assert not (tmp_path / "run" / "denoise.safetensors").exists()


def test_weights_of_the_last_stage_are_checked_before_the_first(generate, tmp_path):
    model = tmp_path / "model"
    tiny.copied("text", model)
    file = model / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"decoder.conv_in.bias": numpy.zeros((3, 5), "float32")}, file)
    with pytest.raises(ConfigError, match=r"decoder.conv_in.bias: shape \(3, 5\) in the checkpoint"):
        generate(f"model.path={model}")
    assert not (tmp_path / "run" / "text.safetensors").exists()


def test_embeddings_that_are_not_finite_are_no_result(generate, tmp_path):
    model = tmp_path / "model"
    tiny.copied("text", model)
    file = model / "text_encoder" / "model.safetensors"
    save_file({name: numpy.full_like(tensor, numpy.nan) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(NotFinite, match="the embeddings are not finite"):
        generate(f"model.path={model}", "stages=[text]")
    assert not (tmp_path / "run" / "text.safetensors").exists()


def test_an_empty_prompt_is_a_prompt_and_guidance_up_to_one_is_none(generate):
    assert [guided(make_config(f"guidance_scale={scale}")) for scale in (0, 0.5, 1, 1.01)] == [False] * 3 + [True]
    folder = generate("prompt=", "guidance_scale=0.5", "stages=[text]")
    embeddings = load_file(folder / "text.safetensors")["embeddings"]
    assert embeddings.shape[0] == 1 and numpy.abs(embeddings).max() > 0


ONE, SPREAD = ["mesh.axes.tp=1"], ["mesh=cpu_8", "sharding=sequence", "mesh.axes={dp:2,sp:4,tp:1}"]


@pytest.mark.system
@pytest.mark.parametrize("trusted, placed", [
    pytest.param(2.0**100, ONE, id="in range"), pytest.param(1.5, SPREAD, id="sequence"),
    pytest.param(1.5, ONE, id="one", marks=pytest.mark.full),
    pytest.param(1.5, [*ONE, "model.scan_blocks=false"], id="written out", marks=pytest.mark.full),
    pytest.param(1.5, [*ONE, "guidance=sequential"], id="sequential", marks=pytest.mark.full),
])
def test_what_attentions_guard_rescues_is_counted_and_told(tmp_path, unkept, monkeypatch, caplog, trusted, placed):
    """With a range so narrow that any row leaves it."""
    monkeypatch.setattr(splash, "TRUSTED_SUM", trusted)
    session.clear()  # programs of another range
    blocks = {"interpret": "true", "block_q": 128, "sub_q": 128, "block_kv": 128, "tile_kv": 128, "chunk_kv": 128}
    kernel = [f"attention.self.{key}={value}" for key, value in blocks.items()]
    kernel += ["attention=splash_v6e", "attention.cross.kernel=xla", "model.dtype.transformer=bfloat16"]
    with caplog.at_level("WARNING", logger="wan"):
        run_into(tmp_path, *SMALL, *tiny.model("wide"), *kernel, *placed, "steps=2", "stages=[text,denoise]")
    rescued = metrics(tmp_path)["attention_rescued"]
    told = [record.message for record in caplog.records if "guard fired" in record.message]
    session.clear()
    if trusted > 2:
        assert rescued == {"rows": 0, "layers_at_most": 0, "steps": 0} and not told
    else:
        assert rescued["rows"] > 0 and rescued["layers_at_most"] == 2 and rescued["steps"] == 2
        assert len(told) == 1 and "in 2 of 2 steps" in told[0]
