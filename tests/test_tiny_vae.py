"""vae=tiny: TAEHV's decoder against its formulas, in files by its published names."""
import functools
import math

import jax
import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional

from tests import tiny
from tests.conftest import ROOT, build, make_config, resolve_here, results
from tests.test_convert import convert
from tests.test_session import run
from wan_torchax import events
from wan_torchax.config.commandline import rewrite
from wan_torchax.config.resolve import Job
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate
from wan_torchax.patches import torchax_on
from wan_torchax.runtime import recognition
from wan_torchax.runtime.checkpoint import find_all
from wan_torchax.runtime.components import Component
from wan_torchax.runtime.jobs import find_job
from wan_torchax.session import Session
from wan_torchax.tasks.generate import read_results

WIDTHS = 12, 8, 6, 10
DECODER = ["vae=tiny", f"model.architecture.tiny_vae.widths={list(WIDTHS)}"]
FIVE = ["++model.architecture.tiny_vae.latent_channels=24", "++model.architecture.tiny_vae.patch_size=2"]
EIGHT = ["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=sequence"]


def published(channels=16, patch=1, widths=WIDTHS) -> dict[str, torch.Tensor]:
    """A file's tensors, at random; of the encoder one, which nobody reads."""
    first, *_, last = widths
    shapes = {"encoder.0.weight": (5, 3, 3, 3), "decoder.1.weight": (first, channels, 3, 3), "decoder.1.bias": (first,)}
    for level, (width, following, frames) in enumerate(zip(widths, widths[1:], (1, 2, 2))):
        for block in range(3):
            name = f"decoder.{3 + 6 * level + block}.conv"
            for layer in (0, 2, 4):
                shapes[f"{name}.{layer}.weight"] = (width, width * (1 if layer else 2), 3, 3)
                shapes[f"{name}.{layer}.bias"] = (width,)
        shapes[f"decoder.{7 + 6 * level}.conv.weight"] = (frames * width, width, 1, 1)
        shapes[f"decoder.{8 + 6 * level}.weight"] = (following, width, 3, 3)
    shapes |= {"decoder.22.weight": (3 * patch**2, last, 3, 3), "decoder.22.bias": (3 * patch**2,)}
    torch.manual_seed(0)
    state = {name: torch.randn(shape) / math.prod(shape[1:]) ** 0.5 for name, shape in shapes.items()}
    state["decoder.22.weight"] *= 0.1  # colours from 0 to 1, few of them cut off
    state["decoder.22.bias"] = 0.5 + 0.1 * state["decoder.22.bias"]
    return state


def decoded(state, latents, patch=1):
    """The whole video at once: latents (1, channels, frames, height, width) to pixels (frames, 3, height, width)."""
    def convolve(name, video):
        weight = state[f"decoder.{name}.weight"]
        return functional.conv2d(video, weight, state.get(f"decoder.{name}.bias"), padding=weight.shape[-1] // 2)

    video = convolve(1, torch.tanh(latents[0].movedim(1, 0) / 3) * 3).relu()
    for level in range(3):
        for block in range(3):
            before = torch.cat([torch.zeros_like(video[:1]), video[:-1]])
            inside = torch.cat([video, before], dim=1)
            for layer in (0, 2, 4):
                inside = convolve(f"{3 + 6 * level + block}.conv.{layer}", inside.relu() if layer else inside)
            video = (inside + video).relu()
        video = video.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        video = convolve(f"{7 + 6 * level}.conv", video).reshape(-1, *video.shape[1:])
        video = convolve(8 + 6 * level, video)
    video = functional.pixel_shuffle(convolve(22, video.relu()), patch)
    return video.clamp(0, 1)[3:].numpy()


def in_pieces(resolved, state, latents):
    """The same from the decoder's own function, latent frame by latent frame."""
    stage = build(resolved, "decode")
    function, _ = resolved.family.tiny.decoder(stage.module("tiny_vae"), stage.config, stage.mesh)
    arrays = {name: jax.numpy.asarray(tensor.numpy()) for name, tensor in state.items() if name.startswith("decoder")}
    pieces, caches = [], None
    with torchax_on(stage.load_ops()):
        decode = jax.jit(function)
        for latent in latents.split(1, dim=2):
            pixels, caches = decode(arrays, jax.numpy.asarray(latent.numpy()), caches)
            pieces.append((numpy.asarray(pixels)[0] + 1) / 2)
    assert len(caches) == 9  # one tensor for each memory block
    return numpy.concatenate(pieces, axis=1).swapaxes(0, 1)


@pytest.mark.parametrize("frames, devices, patch", [
    (1, 1, 1), (5, 1, 1), (17, 8, 1), (5, 1, 2),
    pytest.param(17, 1, 1, marks=pytest.mark.full), pytest.param(5, 8, 2, marks=pytest.mark.full),
])
def test_it_is_the_published_decoder(frames, devices, patch):
    """Latents of odd sizes, which eight devices do not divide; one of them, two, several."""
    channels, kind = (16, "text") if patch == 1 else (24, "five")
    size = [f"resolution.height={72 * patch}", f"resolution.width={56 * patch}", f"resolution.frames={frames}"]
    resolved = resolve_here(*tiny.model(kind), *DECODER, *size, *(FIVE if patch == 2 else []),
                            *(EIGHT if devices == 8 else []))
    state, latents = published(channels, patch), 2 * torch.randn(resolved.latent_shape)
    assert latents.shape[2:] == ((frames + 3) // 4, 9, 7)
    expected = decoded(state, latents, patch)
    assert expected.shape == (frames, 3, 72 * patch, 56 * patch) and expected.std() > 0.1
    numpy.testing.assert_allclose(in_pieces(resolved, state, latents), expected, atol=1e-5)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "mine.safetensors"
    save_file(published(), path)
    return path


def test_a_run_decodes_with_it(generate, file):
    """The frames are those of its latents, and of the large VAE nothing is read."""
    folder = generate(*DECODER, f"model.tiny_vae={file}", "++model.paths.vae=/nowhere")
    made = results(folder)
    expected = decoded(published(), torch.from_numpy(made["latents"])).transpose(0, 2, 3, 1) * 255
    difference = numpy.abs(made["frames"] - expected)
    assert made["frames"].shape == (5, 64, 64, 3) and expected.std() > 5
    assert difference.max() <= 0.51  # rounded


PREVIEWS = ["preview=tiny", "preview_every=1", DECODER[1]]


def test_previews_show_every_frame_of_a_video(two_layers, file):
    """Decoded from what a step expects the latents to be, beside a video of the large VAE."""
    heard, session = [], Session()
    values = run(session, make_config(*two_layers, *PREVIEWS, f"model.tiny_vae={file}"), emit=heard.append)
    steps, previews = ([one for one in heard if isinstance(one, kind)] for kind in (events.Stepped, events.Previewed))
    assert [one.step for one in previews] == [1, 2] and len(steps) == 3
    for step, preview in zip(steps, previews):
        expected = decoded(published(), torch.from_numpy(numpy.array(step.estimate))).transpose(0, 2, 3, 1) * 255
        assert preview.frames.shape == (5, 64, 64, 3) and numpy.abs(preview.frames - expected).max() < 0.55
    plain = run(session, make_config(*two_layers))
    assert numpy.array_equal(plain["frames"], values["frames"]), "the video is not changed by how it is previewed"


@pytest.mark.system
def test_a_preview_of_several_frames_moves(generate, file, two_layers):
    folder = generate(*PREVIEWS, f"model.tiny_vae={file}")
    with Image.open(folder / "preview.png") as preview:
        assert (preview.n_frames, preview.size) == (5, (64, 64))
    config = make_config(*two_layers, f"resume={folder}", "stages=[decode]")  # previews are no part of what was made
    assert not read_results(find_job(config), folder).missing


def test_it_is_recognized(tmp_path):
    """As the VAE of a command line, and for `task=inspect`; other widths are another model's."""
    real, small = tmp_path / "taew2_1.safetensors", tmp_path / "small.safetensors"
    save_file(published(widths=(256, 128, 64, 64)), real)
    save_file(published(), small)
    models = recognition.recognize(real)
    assert models.keys() == {"tiny_vae"} and {"wan21_t2v_14b", "wan22_i2v_a14b"} <= {*models["tiny_vae"]}
    assert "wan22_ti2v_5b" not in models["tiny_vae"] and recognition.recognize(small) == {}
    given = recognition.with_models(rewrite([f"model.vae={real}", "model=wan21_t2v_1_3b", "resolution=480p"]))
    config = make_config(*given)
    assert config.vae.component == "tiny_vae" and config.model.paths == {"tiny_vae": str(real)}
    validate(config)
    exact = recognition.with_models(rewrite([f"model.vae={small}"]))
    assert make_config(*exact).vae.component == "vae"


@pytest.mark.system
def test_a_published_file_goes_through_the_converter(tmp_path):
    """Every name and shape of it, for both of Wan's VAEs."""
    for model, channels, patch in (("wan21_t2v_1_3b", 16, 1), ("wan22_ti2v_5b", 48, 2)):
        torch.save(published(channels, patch, (256, 128, 64, 64)), tmp_path / f"{model}.pth")
        assert convert(tmp_path / f"{model}.pth").returncode == 0
        file = tmp_path / f"{model}.safetensors"
        assert model in recognition.recognize(file)["tiny_vae"]
        config = make_config(f"model={model}", "vae=tiny", "resolution=704p", *rewrite([f"model.tiny_vae={file}"]))
        job = Job.of(config, find_all(config, ["tiny_vae"]))
        Component("tiny_vae", Session().place(job)).check()


@functools.cache
def planned(vae: str):
    resolved = resolve_here("model=wan21_t2v_14b", "resolution=480p", f"vae={vae}")
    return build(resolved, "decode")


def test_a_plan_counts_its_memory():
    exact, small = (planned(vae) for vae in ("exact", "tiny"))
    count = sum(numpy.prod(spec.shape) for spec in small.specs["tiny_vae"].values())
    assert 9e6 < count < 12e6  # the decoder of a file of 22 MB
    assert small.temporary_bytes < exact.temporary_bytes / 8


REFUSED = [
    (["model=wan21_t2v_14b", "vae=tiny"], "vae=tiny: model=wan21_t2v_14b brings no tiny decoder; give model.tiny_vae="),
    (["model=hunyuan15_t2v_480p", "vae=tiny"], "vae=tiny: model=hunyuan15_t2v_480p has its own VAE alone"),
    (["model=wan21_t2v_14b", "preview=tiny", "preview_every=5"], "preview=tiny: model=wan21_t2v_14b brings no tiny"),
    (["model=hunyuan15_t2v_480p", "preview=tiny"], "preview=tiny: model=hunyuan15_t2v_480p has its own VAE alone"),
    (["model=wan21_t2v_14b", "model.tiny_vae=a.safetensors"], "nothing decodes with it; set vae=tiny or preview=tiny"),
]


def test_a_models_own_is_not_taken_for_given(tmp_path):
    """Its VAE can be another one without a word about its tiny decoder."""
    (tmp_path / "vae").symlink_to(ROOT / "models/demo/vae")
    validate(make_config("model=demo_live", "vae=exact", f"model.vae={tmp_path}"))
    with pytest.raises(ConfigError, match="nothing decodes with it"):
        validate(make_config("model=demo_live", "vae=exact", f"model.vae={tmp_path}", f"model.tiny_vae={tmp_path}"))


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_what_it_cannot_do_is_told(overrides, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        validate(make_config(*overrides, "resolution=480p"))
