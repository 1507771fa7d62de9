"""The demo model as it is stored: tokenizer, VAE, a clip through diffusers' own pipeline; and that training resumes."""
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

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
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


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

# The weights are of a training cut short (models/demo/metrics.json says how far it got). Strict: once a better
# training meets a target, its test says so, and the mark goes.
half_trained = pytest.mark.xfail(strict=True, raises=AssertionError, reason="the demo model is not trained to its targets yet")


@half_trained
@torch.no_grad()
def test_vae_rebuilds_clips(pipeline):
    random = Random(3)
    for pair_share in (0.0, 1.0):
        things, background = world.motion_numbers(world.sample_scene(random, pair_share=pair_share), random)
        clip = world.render(things[None], background[None])
        rebuilt = pipeline.vae.decode(pipeline.vae.encode(clip).latent_dist.mode()).sample
        error = (rebuilt - clip).square().mean().item()
        assert 10 * np.log10(4 / error) >= 30


@half_trained
def test_prompt_is_drawn_right(pipeline):
    scene = world.Scene((world.Thing("orange", "circle", "right", "big"),), "black")
    clip = pipeline(
        "a big orange ball moving from left to right on a black background", height=128, width=128, num_frames=17,
        num_inference_steps=16, guidance_scale=4.0, generator=torch.Generator().manual_seed(0), output_type="np",
    ).frames[0]
    verdict = judge.judge((clip * 255).round().astype(np.uint8), scene)
    assert all(verdict.values()), verdict


@half_trained
def test_metrics_meet_their_targets():
    held_out = json.loads((MODEL / "metrics.json").read_text())["held_out"]
    assert held_out["colour"] >= 0.95 and held_out["motion"] >= 0.90 and held_out["shape"] >= 0.85


# ---------------------------------------------------------------- training


def test_training_resumes_where_it_stopped(tmp_path):
    command = [sys.executable, "tools/train_demo.py", "--smoke", f"output={tmp_path}"]
    subprocess.run([*command, "denoiser.steps=1"], cwd=ROOT, check=True, capture_output=True)
    log = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    said = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert not any(line["stage"] == "vae" and "error" in line for line in said)
    stages = json.loads((tmp_path / "model/metrics.json").read_text())["stages"]
    assert stages["vae"]["step"] == 2 and stages["denoiser"]["step"] == 3
