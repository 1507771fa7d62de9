"""How dtypes, attention blocks and shardings change the demo model's video: eight fake CPU devices, one prompt.

    python benchmarks/demo_quality.py [key=value ...]       # about ten minutes on two cores
    python benchmarks/demo_quality.py --smoke               # two of the variants, small and short

Each video is compared with that of one device in float32 (PSNR, infinite if all pixels are the same) and judged
against the prompt. Splash does not support this model's head dim of 32, cuDNN does not run on CPUs.
"""
import os
import sys
import tempfile
from pathlib import Path

import numpy

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import demo_world as world  # noqa: E402
import judge_demo  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import wan_torchax  # noqa: E402

wan_torchax.leave_sys_path()
from wan_torchax.config.commandline import compose, rewrite  # noqa: E402
from wan_torchax.config.validation import validate  # noqa: E402
from wan_torchax.run import generate  # noqa: E402

BF16 = "model.dtype={text_encoder:bfloat16,transformer:bfloat16,vae:bfloat16}"
VARIANTS = {
    "float32, one device": [],
    "bf16 transformer": ["model.dtype.transformer=bfloat16"],
    "bf16 throughout": [BF16],
    "attention in blocks of 128 x 64": ["attention=xla", "attention.self.block_q=128", "attention.self.block_kv=64"],
    "smoothed keys": ["attention=xla", "attention.self.smooth_keys=true"],
    "blocks unrolled (no scan)": ["model.scan_blocks=false"],
    "tp=8": ["mesh=cpu_8", "mesh.axes={dp:1,sp:1,tp:8}"],
    "dp=2 x tp=4": ["mesh=cpu_8"],
    "dp=2 x sp=4, Ulysses": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence"],
    "sp=8, ring": ["mesh=cpu_8", "mesh.axes={dp:1,sp:8,tp:1}", "sharding=ring"],
    "dp=2 x sp=4, Ulysses, bf16": ["mesh=cpu_8", "mesh.axes={dp:2,sp:4,tp:1}", "sharding=sequence", BF16],
}
HEART = world.Thing("red", "heart", "bouncing", "big", "left")
STAR = world.Thing("yellow", "star", "spinning", place="right")
SMOKE = ["resolution.height=64", "resolution.width=64", "resolution.frames=5", "steps=2"]
SCENE = world.Scene((HEART, STAR), "blue")  # conf/prompt/default.yaml


def main() -> None:
    overrides, variants = sys.argv[1:], VARIANTS
    if "--smoke" in overrides:
        overrides, variants = SMOKE, {name: VARIANTS[name] for name in list(VARIANTS)[:2]}
    reference = None
    for name, variant in variants.items():
        with tempfile.TemporaryDirectory() as folder:
            config = compose(rewrite([*variant, "output.keep_frames=true", *overrides]))
            validate(config)
            generate(config, Path(folder))
            frames = load_file(Path(folder) / "decode.safetensors")["frames"].astype(float)
        reference = frames if reference is None else reference
        error = numpy.mean((frames - reference) ** 2)
        psnr = 10 * numpy.log10(255**2 / error) if error else numpy.inf
        verdict = judge_demo.judge(frames.astype(numpy.uint8), SCENE)
        wrong = ", ".join(aspect for aspect, right in verdict.items() if not right)
        print(f"| {name} | {psnr:.1f} dB | {'wrong: ' + wrong if wrong else 'right'} |", flush=True)


if __name__ == "__main__":
    main()
