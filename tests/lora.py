"""Adapters as each trainer writes them, with random numbers: what merging is tested on."""
from pathlib import Path

import torch
from safetensors.torch import save_file

# diffusers' names -> Wan's own, of the modules that the adapters below change.
ORIGINAL = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o", "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v", "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "norm2": "norm3",
    "attn1.norm_q": "self_attn.norm_q", "scale_shift_table": "modulation",
}
TOP = {
    "proj_out": "head.head", "condition_embedder.time_proj": "time_projection.1", "patch_embedding": "patch_embedding",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0", "scale_shift_table": "head.modulation",
}


def original(module: str) -> str:
    """blocks.0.attn1.to_q -> blocks.0.self_attn.q."""
    block, number, part = (*module.split(".", 2), "", "")[:3] if module.startswith("blocks.") else ("", "", module)
    return f"{block}.{number}.{ORIGINAL[part]}" if block else TOP[part]


class Learned:
    """What a trainer learned: of modules, low-rank factors of two ranks, and whole differences of tensors."""

    def __init__(self, weights: dict[str, torch.Tensor], seed: int = 0, alpha: float | None = 6.0, top: bool = True):
        self.alpha, self.generator = alpha, torch.Generator().manual_seed(seed)
        self.pairs, self.diffs = {}, {}
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            known = module.split(".", 2)[-1] in ORIGINAL if module.startswith("blocks.") else top and module in TOP
            if name.endswith(".weight") and weight.ndim == 2 and known:
                rank = 4 if "attn1" in module else 2
                self.pairs[module] = self.random(rank, weight.shape[1]), self.random(weight.shape[0], rank)

    def random(self, *shape):
        return 0.2 * torch.randn(shape, generator=self.generator)

    def differ(self, weights: dict[str, torch.Tensor], *names: str) -> "Learned":
        """Also whole differences of these tensors."""
        self.diffs |= {name: self.random(*weights[name].shape) for name in names}
        return self

    def changes(self) -> dict[str, torch.Tensor]:
        """The formula, in plain torch: what is added to each tensor at strength 1."""

        def scale(rank):
            return 1.0 if self.alpha is None else self.alpha / rank

        low = {f"{module}.weight": scale(len(down)) * up @ down for module, (down, up) in self.pairs.items()}
        return low | self.diffs

    # ------------------------------------------------------------ formats

    def save(self, path: Path, prefix="", name=lambda module: module, low=("lora_A.weight", "lora_B.weight"),
             metadata=None, dtype=torch.float32) -> Path:
        tensors = {}
        for module, (down, up) in self.pairs.items():
            key = prefix + name(module)
            tensors |= {f"{key}.{low[0]}": down.to(dtype), f"{key}.{low[1]}": up.to(dtype)}
            if self.alpha is not None and metadata is None:
                tensors[f"{key}.alpha"] = torch.tensor(self.alpha)
        for tensor, value in self.diffs.items():
            module, _, kind = tensor.rpartition(".")
            if kind == "scale_shift_table":
                key = f"{prefix}{module or 'head'}.diff_m"
            else:
                key = f"{prefix}{name(module)}.{'diff_b' if kind == 'bias' else 'diff'}"
            tensors[key] = value
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
        return path


def flat(module: str) -> str:
    return original(module).replace(".", "_")


FORMATS = {
    "diffusers": dict(prefix="transformer."),
    "ComfyUI": dict(prefix="diffusion_model.", name=original),
    "ai-toolkit": dict(prefix="diffusion_model.", name=original, low=("lora_down.weight", "lora_up.weight")),
    "musubi": dict(prefix="lora_unet_", name=flat, low=("lora_down.weight", "lora_up.weight")),
    "kohya": dict(prefix="lora_unet__", name=flat, low=("lora_down.weight", "lora_up.weight")),
    "Lightning": dict(name=original, low=("lora_down.weight", "lora_up.weight")),
    "DiffSynth": dict(name=original, low=("lora_A.default.weight", "lora_B.default.weight")),
}
