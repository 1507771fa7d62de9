"""How large outliers may be before an 8-bit mode breaks: the same model, rescaled.

    python benchmarks/outliers.py outputs/outliers           # the demo model; resumes videos where it stopped
    python benchmarks/outliers.py --model random-1.3b        # velocity only; on a CPU with fewer blocks (--set)
    python benchmarks/outliers.py --smoke                    # one factor, two modes, no videos

Activation channels are multiplied by D where they are produced, and the consuming weights divided by it: SmoothQuant in
reverse. The function stays the same, which is checked in float32, but the quantized values have outliers. D is
log-normal, and in a few channels larger by the swept factor; how large it is for trained weights is not known here.
Errors are those of one forward's velocity against the original model in float32, also as multiples of bfloat16's; the
rest of an 8-bit mode's model is bfloat16. PSNR is against the exact float32 video. Ends with one JSON line.
"""
import argparse
import datetime
import json
import platform
import sys
import tempfile
from pathlib import Path

import gpu  # first: it configures JAX to share the device with torch
import numpy
import quality
import torch
from diffusers import WanTransformer3DModel

from wan_torchax.records import provenance

FACTORS = [1, 10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000]
SPREAD, SHARE = 0.5, 0.01  # of D's logarithm; of channels that are outliers
BF16 = "model.dtype.transformer=bfloat16"
MODES = {"float32": ["model.dtype.transformer=float32", "compile.matmul_precision=highest"], "bf16": [BF16]} | {
    name: [BF16, f"precision={name}"] for name in ("int8_weights", "int8", "fp8")
}
SIZES = {
    "demo": ["model=demo", *gpu.FEW_BLOCKS["smoke"]],
    "random-1.3b": ["model=wan21_t2v_1_3b", "resolution.height=256", "resolution.width=256", "resolution.frames=1"],
}
LEAST_PSNR = 30.0


# ---------------------------------------------------------------- the same function with outliers


@torch.no_grad()
def rescale(model, factor: float, seed: int) -> None:
    """Give a text-to-video transformer outliers in the inputs of its linear layers, in place.

    Not in that of the feed-forward's second layer: a factor does not pass through the GELU before it.
    """
    weights, generator = dict(model.named_parameters()), torch.Generator().manual_seed(seed)
    dim = model.config.num_attention_heads * model.config.attention_head_dim

    def channels(count=dim):
        scales = torch.exp(SPREAD * torch.randn(count, generator=generator))
        scales[torch.randperm(count, generator=generator)[: round(SHARE * count)]] *= factor
        return scales.to(model.device)

    def multiply(array, scales):
        array *= scales if array.ndim == 1 else scales[:, None]  # its rows

    def fold(scales, producer, *consumers):
        for part in (f"{producer}.weight", f"{producer}.bias"):
            if part in weights:
                multiply(weights[part], scales)
        divide(scales, *consumers)

    def divide(scales, *consumers):
        for consumer in consumers:
            weights[f"{consumer}.weight"].div_(scales)  # its columns

    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    for block in blocks:
        for attention in (f"{block}.attn1", f"{block}.attn2"):
            fold(channels(), f"{attention}.to_v", f"{attention}.to_out.0")
            # Queries and keys are multiplied with each other. RoPE rotates pairs of channels: both are scaled alike.
            pairs = channels(dim // 2).repeat_interleave(2)
            fold(pairs, f"{attention}.norm_q", f"{attention}.norm_k")
        fold(channels(), f"{block}.norm2", f"{block}.attn2.to_q")
    text = (f"{block}.attn2.to_{name}" for block in blocks for name in "kv")
    fold(channels(), "condition_embedder.text_embedder.linear_2", *text)
    # norm * (1 + scale) + shift, each the sum of a block's table and the time projection, which all blocks share.
    time = [weights[f"condition_embedder.time_proj.{part}"].unflatten(0, (6, dim)) for part in ("weight", "bias")]
    for shift, scale, names in (0, 1, ["attn1.to_q", "attn1.to_k", "attn1.to_v"]), (3, 4, ["ffn.net.0.proj"]):
        scales = channels()
        for part in time:
            multiply(part[shift], scales)
            multiply(part[scale], scales)
        for block in blocks:
            table = weights[f"{block}.scale_shift_table"][0]
            table[shift] *= scales
            table[scale] = scales * (1 + table[scale]) - 1
            divide(scales, *(f"{block}.{name}" for name in names))


# ---------------------------------------------------------------- measures


def relative(found, expected) -> float:
    return float(numpy.linalg.norm(found - expected) / numpy.linalg.norm(expected))


def load(options, config):
    """The original model in float32."""
    if options.model == "demo":
        return WanTransformer3DModel.from_pretrained(gpu.ROOT / "models/demo", subfolder="transformer").to(gpu.DEVICE)
    return gpu.transformer_module(config)


@torch.no_grad()
def forward(model, *inputs):
    """The velocity, and the size of outliers: a token's largest value over its median, in the inputs that `rescale`
    affects; median over tokens, mean over layers. This can be measured for trained weights too."""
    peaks, hooks = [], []

    def look(_, arrays):
        sizes = arrays[0].abs().flatten(0, -2)
        peaks.append((sizes.amax(-1) / sizes.median(-1).values).median().item())

    for name, module in model.blocks.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("ffn.net.2"):
            hooks.append(module.register_forward_pre_hook(look))
    velocity = model(*inputs, return_dict=False)[0].cpu().numpy()
    for hook in hooks:
        hook.remove()
    return velocity, float(numpy.mean(peaks))


def velocities(options, folder: Path) -> list[dict]:
    """A row for each factor and mode; for the demo model also the rescaled checkpoints, as <folder>/<factor>."""
    exact_config = gpu.configure(*options.set, *MODES["float32"], "guidance_scale=1")
    latents, texts = gpu.random_inputs(exact_config, torch.float32)
    model, rows, stages, configs, reference = load(options, exact_config), [], {}, {}, None
    for mode in options.modes:
        configs[mode] = gpu.configure(*options.set, *MODES[mode], "guidance_scale=1")
        stages[mode], *_ = gpu.build(configs[mode], "denoise", lambda _: model)
        stages[mode].components["transformer"].free()
    for factor in [None, *options.factors]:
        if factor is not None:
            model = load(options, exact_config)
            rescale(model, factor, options.seed)
            if options.model == "demo":
                model.save_pretrained(folder / f"{factor:g}" / "transformer")
        hidden, timestep, _ = gpu.peer_inputs(exact_config, latents, torch.float32)
        exact, peak = forward(model, hidden, timestep, texts[0])
        reference = exact if reference is None else reference
        changed = relative(exact, reference)
        print(f"factor {factor}: the exact velocity differs by {changed:.1e}, peaks are {peak:.0f}", flush=True)
        found = {}
        for mode, stage in stages.items():
            component = stage.components["transformer"]
            component.arrays = gpu.hand_over(stage.specs["transformer"], model)
            found[mode] = relative(gpu.velocity(stage, configs[mode], latents, texts), reference)
            component.free()
            rows.append({"factor": factor, "peak": peak, "changed": changed, "mode": mode, "error": found[mode]})
            if "bf16" in found:
                rows[-1]["times_bf16"] = found[mode] / found["bf16"]
            print(f"  {mode}: {found[mode]:.3%}", flush=True)
    return rows


def add_videos(options, rows: list[dict], folder: Path) -> None:
    """Add PSNR and the judge's verdicts to the rows."""
    prompts = quality.world.held_out_prompts()[: options.prompts]
    clips = [(prompt, number) for number, (prompt, _) in enumerate(prompts)]
    extra = [f"steps={options.steps}"]
    quality.make(folder, "exact", [], clips, extra)
    for row in sorted(rows, key=lambda row: options.modes.index(row["mode"])):  # so that each mode is compiled once
        name, paths = f"{row['mode']} None", []
        if row["factor"] is not None:
            name = f"{row['mode']} {row['factor']:g}"
            paths = [f"+model.paths.transformer={folder.resolve() / format(row['factor'], 'g')}"]
        quality.make(folder, name, [*options.set, *MODES[row["mode"]], *paths], clips, extra)
        compared = [quality.compare((folder, name, number, scene)) for number, (_, scene) in enumerate(prompts)]
        row["psnr"] = float(numpy.mean([one["psnr"] for one in compared]))
        row["judged_right"] = sum(one[aspect] for one in compared for aspect in quality.ASPECTS)
        row["judged"] = len(quality.ASPECTS) * len(compared)
        row["broken"] = row["psnr"] < LEAST_PSNR or row["judged_right"] < row["judged"]


def table(rows: list[dict]) -> str:
    lines = [
        "| factor | peaks | mode | velocity's error | times bf16's | PSNR dB | judged right |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        factor = "as it was" if row["factor"] is None else f"{row['factor']:g}"
        multiple = f"{row['times_bf16']:.2f}" if "times_bf16" in row else ""
        video = f"{row['psnr']:.1f} | {row['judged_right']} of {row['judged']}" if "psnr" in row else " | "
        lines.append(f"| {factor} | {row['peak']:.0f} | {row['mode']} | {row['error']:.2%} | {multiple} | {video} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where checkpoints and videos are kept; default: not kept")
    parser.add_argument("--model", choices=SIZES, default="demo")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seed", type=int, default=0, help="of D")
    parser.add_argument("--prompts", type=int, default=2, help="of the demo model's videos; 0: none")
    parser.add_argument("--steps", type=int, default=20, help="of the videos")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the configs")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.set = [*SIZES[options.model], *options.set]
    if options.model != "demo":
        options.prompts = 0  # its videos would be noise
    if options.smoke:
        options.factors, options.modes, options.prompts = [50], ["bf16", "int8"], 0
        options.set += gpu.SMALL
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        rows = velocities(options, folder)
        if options.prompts:
            add_videos(options, rows, folder)
    import jax

    report = {
        "command": f"python benchmarks/outliers.py {' '.join(sys.argv[1:])}", "date": str(datetime.date.today()),
        "device": jax.devices()[0].device_kind, "machine": platform.machine(), "versions": provenance.versions(),
        "n": {"velocities": 1, "videos": options.prompts}, "steps": options.steps, "seed": options.seed,
        "spread": SPREAD, "share": SHARE, "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
