"""What task=port finds in diffusers' models, as the table of docs/porting.md.

    python benchmarks/port.py            # writes benchmarks/results/port.json, prints the table
    python benchmarks/port.py --smoke    # one small model, printed only
"""
import collections
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from wan_torchax.config.commandline import compose  # noqa: E402
from wan_torchax.tasks.port import port  # noqa: E402

MODELS = (
    "WanTransformer3DModel", "HunyuanVideo15Transformer3DModel", "AutoencoderKLHunyuanVideo15",
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "LTX2VideoTransformer3DModel", "CogVideoXTransformer3DModel",
    "QwenImageTransformer2DModel", "SD3Transformer2DModel", "MochiTransformer3DModel", "ZImageTransformer2DModel",
)
KINDS = {
    "branch on a value": "branches", "shape depends on values": "dynamic shapes", "tokens x tokens": "tokens²",
    "loop over tokens": "loops", "widens activations": "widened", "float64": "float64",
    "gather or scatter": "gathers", "no lowering": "not lowered",
}


def main() -> None:
    smoke = "--smoke" in sys.argv
    models, rows = {}, []
    for model in MODELS[-3:-2] if smoke else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            port(compose(["task=port", f"port.model={model}"]), Path(folder))
            report = json.loads((Path(folder) / "port.json").read_text())[0]
        counts = collections.Counter(one["kind"] for one in report["findings"])
        models[model] = {
            "parameters": report["parameters"], "traces": report["traces"], "findings": counts,
            "stacks": {stack["name"]: stack["blocks"] for stack in report["stacks"]},
            "notes": [rule["note"] for rule in report["rules"] if rule["note"]],
        }
        rows.append(row(model, models[model]))
    versions = {name: importlib.metadata.version(name) for name in ("diffusers", "torch", "torchax", "jax")}
    result = {"command": "python benchmarks/port.py", "device": "CPU", "n": 1, "versions": versions}
    result |= {"models": models, "rows": rows}
    if not smoke:
        (ROOT / "benchmarks/results/port.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print("\n".join(rows))
    print(json.dumps(result))


def row(model: str, found: dict) -> str:
    blocks = ", ".join(f"{count} {name}" for name, count in found["stacks"].items() if "." not in name) or "none"
    traps = ", ".join(f"{found['findings'][kind]} {word}" for kind, word in KINDS.items() if found["findings"][kind])
    traces = "yes" if found["traces"] == "yes" else "no, " + found["traces"].rpartition("/")[2]
    return f"| {model} | {found['parameters'] / 1e9:.2f} | {blocks} | {traces} | {traps or 'none'} |"


if __name__ == "__main__":
    main()
