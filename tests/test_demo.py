"""The demo model: its world, what is stored, what run.py and diffusers draw; and that training is what it seems."""
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.conftest import listed
from tests.fork import warm

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models/demo"
sys.path.insert(0, str(ROOT / "tools"))
import demo_world as world  # noqa: E402
import judge_demo as judge  # noqa: E402


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# ---------------------------------------------------------------- the world


def test_held_out_combinations_never_appear_in_training():
    random = Random(0)
    for _ in range(3000):
        for thing in world.sample_scene(random).things:
            assert not world.is_held_out(thing.colour, thing.shape, thing.motion)


def test_held_out_prompts_are_fixed_and_only_of_held_out_things():
    prompts = world.held_out_prompts()
    assert len(prompts) >= 60 and prompts == world.held_out_prompts()
    assert all(world.is_held_out(t.colour, t.shape, t.motion) for _, scene in prompts for t in scene.things)


def test_every_part_of_a_held_out_combination_is_seen_in_training():
    for left, right in ((0, 1), (0, 2), (1, 2)):
        seen = {(c[left], c[right]) for c in world.SEEN}
        assert {(c[left], c[right]) for c in world.HELD_OUT} <= seen


# ---------------------------------------------------------------- what is stored


def test_model_is_small_and_safetensors_only():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25_000_000
    assert {path.suffix for path in files if path.name != "README.md"} <= {".json", ".safetensors"}


def test_tokenizer_takes_any_text(pipeline):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL / "tokenizer")
    for text in ("A big red star, spinning.", "a dragon?!", "静止，模糊", "naïve 🙂"):
        tokens = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in tokens and tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text.replace("，", ",")
    assert len(tokenizer) <= pipeline.text_encoder.config.vocab_size
    assert tokenizer.tokenize("a red ball") == ["▁a", "▁red", "▁ball"]


def test_every_caption_word_is_one_token():
    from transformers import AutoTokenizer

    tokenizer, random = AutoTokenizer.from_pretrained(MODEL / "tokenizer"), Random(1)
    for _ in range(300):
        text = world.caption(world.sample_scene(random), random)
        words = text.replace(",", " ,").replace(".", " .").split()
        assert len(tokenizer.tokenize(text)) == len(words), text


def test_text_encoder_shares_its_embedding(pipeline):
    encoder = pipeline.text_encoder
    assert encoder.dtype == torch.float32
    assert encoder.shared.weight.data_ptr() == encoder.encoder.embed_tokens.weight.data_ptr()


def test_compression_is_wans(pipeline):
    assert (pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial) == (4, 8)
    assert type(pipeline.transformer).__name__ == "WanTransformer3DModel"


# ---------------------------------------------------------------- what it can do


@pytest.mark.system
@torch.no_grad()
def test_vae_rebuilds_clips(pipeline):
    random = Random(3)
    things, background = world.motion_numbers(world.sample_scene(random, pair_share=1.0), random)
    clip = world.render(things[None], background[None])
    rebuilt = pipeline.vae.decode(pipeline.vae.encode(clip).latent_dist.mode()).sample
    error = (rebuilt - clip).square().mean().item()
    assert 10 * np.log10(4 / error) >= 30


def test_metrics_meet_their_targets():
    metrics = json.loads((MODEL / "metrics.json").read_text())
    held_out = metrics["held_out"]
    assert held_out["colour"] >= 0.95 and held_out["motion"] >= 0.90 and held_out["shape"] >= 0.85
    assert metrics["held_out_prompts"] >= 60 and metrics["vae_psnr_db"] >= 30


DRAWN = {
    "a big orange ball moving from left to right on a black background": world.Scene(
        (world.Thing("orange", "circle", "right", "big"),), "black"),
    "a big red heart bouncing on the left and a yellow star spinning on the right on a blue background": world.Scene(
        (world.Thing("red", "heart", "bouncing", "big", "left"),
         world.Thing("yellow", "star", "spinning", place="right")), "blue"),
}
STEPS = 12  # enough for one thing, and spares half a minute
HARDLY = 1.01  # no guidance to speak of; at 1 the programs are others, and compiled anew
BALL = "a red ball moving to the right"  # over whatever background


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, cache):
    """Frames by (prompt, negative prompt, guidance scale): one run.py draws everything the tests below look at."""
    folder = tmp_path_factory.mktemp("drawn")
    rows = [{"prompt": prompt, "negative_prompt": "", "guidance_scale": 4.0,
             "steps": STEPS if len(scene.things) == 1 else 20}
            for prompt, scene in DRAWN.items()]
    pairs = (("white background", 4.0), ("white background", HARDLY), ("black background", 4.0))
    rows += [{"prompt": BALL, "negative_prompt": negative, "guidance_scale": guidance, "steps": 6}
             for negative, guidance in pairs]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    places = [f"prompts={folder}/prompts.jsonl", f"hydra.run.dir={folder}/run", cache, "output.keep_frames=true"]
    assert warm().run(places, {"XLA_FLAGS": ""}, seconds=600).returncode == 0  # many steps: better compiled well
    runs = listed(folder / "run")
    return {tuple(row.values())[:3]: load_file(path / "decode.safetensors")["frames"] for row, path in zip(rows, runs)}


@pytest.mark.system
@pytest.mark.parametrize("prompt", DRAWN)
def test_prompt_is_drawn_right(drawn, prompt):
    verdict = judge.judge(drawn[prompt, "", 4.0], DRAWN[prompt])
    assert all(verdict.values()), verdict


@pytest.mark.system
def test_negative_prompt_is_kept_away_from_as_far_as_guidance_says(drawn):
    without_white, unguided, without_black = (
        drawn[BALL, negative, guidance][:, :8, :8].mean()  # a corner: the background
        for negative, guidance in (("white background", 4.0), ("white background", HARDLY), ("black background", 4.0))
    )
    assert without_white + 20 < unguided < without_black - 20


# ---------------------------------------------------------------- training


@torch.no_grad()
def test_training_takes_quicker_ways_to_the_same_numbers(pipeline):
    import train_demo

    things, background = world.motion_numbers(world.sample_scene(Random(0)), Random(0))
    clip = world.render(things[None], background[None], size=32)
    latents = pipeline.vae.encode(clip).latent_dist.mean
    whole = deepcopy(pipeline.vae)
    train_demo.take_whole_clips(whole)
    torch.testing.assert_close(train_demo.encode_whole(whole, clip)[0], latents, atol=1e-3, rtol=1e-3)
    decoded = train_demo.decode_whole(whole, latents).clamp(-1, 1)
    torch.testing.assert_close(decoded, pipeline.vae.decode(latents).sample, atol=1e-3, rtol=1e-3)

    noise, time = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([700.0])
    padded = dict(do_classifier_free_guidance=False, max_sequence_length=world.PROMPT_TOKENS)
    text = pipeline.encode_prompt("a red circle", **padded)[0]
    expected = pipeline.transformer(noise, time, text, return_dict=False)[0]
    denoiser = train_demo.Denoiser(pipeline.text_encoder, deepcopy(pipeline.transformer)).pad_once()
    tokens = train_demo.tokenize(pipeline.tokenizer, ["a red circle"])
    torch.testing.assert_close(denoiser(noise, time, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.system
def test_training_resumes_where_it_stopped(tmp_path):
    command = [sys.executable, "tools/train_demo.py", "--smoke", f"output={tmp_path}"]
    subprocess.run([*command, "denoiser.steps=1"], cwd=ROOT, check=True, capture_output=True)
    log = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    said = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert not any(line["stage"] == "vae" and "error" in line for line in said)
    stages = json.loads((tmp_path / "model/metrics.json").read_text())["stages"]
    assert stages["vae"]["step"] == 2 and stages["denoiser"]["step"] == 3
