"""validate(): every problem at once, each with its key, its value and the nearest valid choice."""
import json
import math

import pytest
from omegaconf import OmegaConf

from tests.conftest import make_config
from wan_torchax.config.schema import ConfigError, PipelineStage
from wan_torchax.config.validation import spec_axes, validate
from wan_torchax.config.wording import nearest_multiple, nested

# overrides -> what the message must say
BAD = {
    "task=genrate": "task=genrate: unknown; nearest: generate",
    "stages=[]": "stages=[]: name at least one of text, denoise, decode",
    "stages=[text,denoize]": "stages=denoize: unknown; nearest: denoise",
    "stages=[denoise,text]": "nearest [text,denoise]",
    "stages=[text,text]": "each once and in order; nearest [text]",
    "stages=[decode]": "decode takes latents, which denoise gives; add denoise to stages, or resume=",
    "stages=[text,decode]": "decode takes latents, which denoise gives; add denoise to stages, or resume=",
    "guidance=batch": "guidance=batch: unknown; nearest: batched",
    "guidance_scale=-1": "guidance_scale=-1.0: must be from 0 to 20",
    "guidance_scale=nan": "guidance_scale=nan: must be from 0 to 20",
    "pipeline=v2v strength=nan": "strength=nan: must be from 0 to 1; null is the default",
    "pipeline=v2v strength=inf": "strength=inf: must be from 0 to 1",
    "camera=5": "camera=[5]: pipeline=t2v moves no camera",
    "camera={zoom_in:1}": "moves no camera",
    "steps=0": "steps=0: must be from 1 to 1000; nearest 1",
    "steps=5000": "nearest 1000",
    "seed=-3": "seed=-3: must be from 0 to 4294967295; 4294967293 gives the same noise",
    "resolution.height=100": "resolution.height=100: must be a multiple of 16; nearest 96 or 112",
    "resolution.width=1": "resolution.width=1: must be a multiple of 16; nearest 16 or 32",
    "resolution.height=512": "resolution.height=512: demo takes 64 to 256; nearest 256",
    "resolution.frames=80": "resolution.frames=80: must be 4n+1; nearest 77 or 81",
    "resolution.frames=0": "resolution.frames=0: must be 4n+1; nearest 1 or 5",
    "resolution.frames=401": "demo takes at most 81",
    "resolution.fps=0": "resolution.fps=0: must be from 1 to 120",
    "resolution.flow_shift=0": "resolution.flow_shift=0.0: must be above 0",
    "model.dtype.vae=bf16": "model.dtype.vae=bf16: unknown; nearest: bfloat16",
    "compile.matmul_precision=best": "compile.matmul_precision=best: unknown",
    "output.quality=99": "output.quality=99: an H.264 CRF from 0",
    "prompt.file=/no/such/file": "prompt.file=/no/such/file: no such file",
    "prompt.negative_file=/no/such/file": "prompt.negative_file=/no/such/file: no such file",
    "resume=/no/such/run": "resume=/no/such/run: no such run folder",
    "mesh.platform=tpv": "mesh.platform=tpv: unknown; nearest: tpu",
    "mesh.axes.tp=0": "mesh.axes.tp=0: must be at least 1, or -1",
    "mesh.axes={dp:-1,sp:1,tp:-1}": "only one axis may be -1, not dp and tp",
    "mesh=cpu_8 mesh.axes.tp=3": "sharding.axes.heads=tp (size 3): 8 heads do not divide over 3 devices; sizes that",
    "sharding.axes.heads=pt": "sharding.axes.heads: the mesh has no axis 'pt'; nearest: tp",
    "sharding.axes.heads=[tp,tp]": "an axis may shard one dimension only",
    "sharding.axes.heads=3": "each entry must be an axis name",
    "sharding.gather=dp": "sharding.gather=dp: heads and mlp of sharding.axes share the blocks' weights already",
    "sharding.attention.ulysses=pt": "sharding.attention.ulysses: the mesh has no axis 'pt'; nearest: tp",
    "model.weights.transformer.attention_in.axes=[hed]": "hed is no name of sharding.axes; nearest: heads",
    "model.weights.transformer.attention_in.axes=[heads,heads]": "each name of sharding.axes at most once",
    "model.weights.transformer.attention_in.pattern='(oops'": "not a regular expression",
    "attention.self.kernel=flash": "attention.self.kernel=flash: unknown; nearest: splash",
    "attention.self.kernel=splash": "attention.self.kernel=splash: serves head dims 64 and 128, the model has 32",
    "model=wan21_t2v_14b resolution=480p attention=splash_v6e attention.self.block_q=1000":
        "attention.self.block_q=1000: must be a multiple of 128",
    "attention=cudnn": "attention.self.kernel=cudnn: takes bfloat16, and model.dtype.transformer=float32",
    "attention.self.block_q=64": "attention.self.block_q=64: kernel=auto brings its own; name the kernel's file",
    "ops.upsample.implementation=os.system":
        "ops.upsample.implementation=os.system: not in patches or kernels; set allow_external_ops=true",
    "+ops.mine={op:aten.gelu}": "ops.mine={'op': 'aten.gelu'}: needs op, implementation and why",
    "ops.upsample.op=gelu": "ops.upsample.op=gelu: write it as aten.<op>",
    "ops.conv3d.platforms=[cuda]": "ops.conv3d.platforms=cuda: unknown",
    "pipeline.stages.decode.takes=[latent]":
        "pipeline.stages.decode.takes=latent: neither an input nor given by a stage",
    "pipeline.stages.decode.uses=[vea]": "pipeline.stages.decode.uses=vea: unknown; nearest: vae",
    "pipeline.stages.decode.gives=[embeddings]": "pipeline.stages: embeddings is given twice",
    "pipeline.inputs.prompt=prompt.txt": "pipeline.inputs.prompt=prompt.txt: no such key in the config",
    "model=wan21_t2v_14b resolution=demo": "resolution.height=128: wan21_t2v_14b takes 256 to 1280; nearest 256",
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_input_is_told(overrides):
    with pytest.raises(ConfigError) as error:
        validate(make_config(*overrides.split(" ") if not overrides.startswith("prompt=") else [overrides]))
    assert BAD[overrides] in str(error.value)


def test_a_stage_that_the_project_does_not_have_is_told():
    config = make_config()
    OmegaConf.update(config, "pipeline.stages.upscale", PipelineStage(["vae"], ["frames"], ["larger"]), force_add=True)
    with pytest.raises(ConfigError, match="pipeline.stages=upscale: unknown; "):
        validate(config)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        validate(make_config("steps=0", "resolution.frames=80", "guidance=none"))
    assert str(error.value).startswith("3 problems")
    assert all(key in str(error.value) for key in ("steps=0", "resolution.frames=80", "guidance=none"))


def test_a_rule_for_weights_can_be_added_and_taken_away():
    config = make_config("+model.weights.transformer.mine={pattern:'proj_out.weight',axes:[mlp]}")
    validate(config)
    assert config.model.weights.transformer.mine.axes == ["mlp"]
    config = make_config("~model.weights.transformer.control")
    validate(config)
    assert "control" not in config.model.weights.transformer


def test_the_default_config_is_valid():
    validate(make_config())


def test_nearest_multiples_surround_the_value():
    for value in range(1, 200):
        numbers = [int(word) for word in nearest_multiple(value, 16).replace("or", "").replace("nearest", "").split()]
        assert all(number % 16 == 0 and number > 0 for number in numbers)
        distance = min(value % 16, 16 - value % 16)
        assert value < 16 or min(abs(number - value) for number in numbers) <= distance + math.ulp(1)


def test_spec_axes_reads_nested_lists():
    assert spec_axes(["dp", None, ["sp", "tp"]]) == ["dp", "sp", "tp"]


def test_settings_are_nested_and_left_as_they_are():
    """Where one lies in another too, in either order: a recipe's key is of the settings."""
    settings = {"a.b": 1, "a": {"b": 1, "c": None}, "a.c.d": 2, "e.f": [{"g": 3}]}
    before = json.dumps(settings)
    made = nested(settings)
    assert made == {"a": {"b": 1, "c": {"d": 2}}, "e": {"f": [{"g": 3}]}}
    made["e"]["f"][0]["g"] = 4
    assert json.dumps(settings) == before
