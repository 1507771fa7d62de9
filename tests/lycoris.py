"""LyCORIS' kinds of adapters by its published formulas, in plain torch and float64: what merging is compared with."""
import torch

from wan_torchax.runtime.adapters import LOHA

KINDS = "LoCon, Tucker", "LoHa, Tucker", "LoKr, Tucker", "OFT", "OFT, limited", "OFT, rescaled", "BOFT"

def tucker(core, first, second):
    """A convolution's factors: first (rank, rows), second (rank, columns)."""
    return torch.einsum("ij...,ip,jr->pr...", core, first, second).contiguous()


def rotations(blocks, alpha, rows, strength):
    """LyCORIS': Cayley's transform of a skew-symmetric matrix that is no longer than alpha by the row."""
    skew, one = blocks - blocks.transpose(-1, -2), torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    if 0 < alpha * rows < skew.norm():
        skew = skew * alpha * rows / (skew.norm() + 1e-8)
    return strength * (one + skew) @ torch.linalg.inv(one - skew) + (1 - strength) * one


def oft(weight, blocks, alpha, strength):
    turns = torch.block_diag(*rotations(blocks, alpha, len(weight), strength))
    return turns.T @ weight


def boft(weight, blocks, alpha, strength):
    """Each time, the rows that are turned together lie twice as far apart."""
    times, _, size, _ = blocks.shape
    for number, turns in enumerate(rotations(blocks, alpha, len(weight), strength)):
        half = 2**number * size // 2
        order = torch.arange(len(weight)).reshape(-1, 2, half).transpose(1, 2).flatten()
        turned = torch.empty_like(weight)
        turned[order] = torch.block_diag(*turns) @ weight[order]
        weight = turned
    return weight


def random(*shape):
    return (0.3 * torch.randn(*shape)).double()


def module(kind, weight, strength):
    """A module's tensors, and what LyCORIS makes of the weight with them, in float64."""
    rows, columns, *kernel = weight.shape
    core, hada = random(3, 3, *kernel), [random(*shape) for shape in ((3, rows), (3, columns)) * 2]
    alpha = {"alpha": torch.tensor(6.0)}
    if kind == "LoCon, Tucker":
        up, down = random(rows, 3), random(3, columns)
        tensors = {"lora_up.weight": up[..., None, None, None], "lora_down.weight": down[..., None, None, None],
                   "lora_mid.weight": core}
        return tensors | alpha, weight + strength * 6 / 3 * tucker(core, up.T, down)
    if kind == "LoHa, Tucker":
        other = random(3, 3, *kernel)
        made = tucker(core, *hada[:2]) * tucker(other, *hada[2:])
        tensors = dict(zip(LOHA, hada)) | {"hada_t1": core, "hada_t2": other}
        return tensors | alpha, weight + strength * 6 / 3 * made
    if kind == "LoKr, Tucker":
        outer, first, second = random(4, 2), random(3, rows // 4), random(3, columns // 2)
        made = torch.kron(outer[..., None, None, None], tucker(core, first, second))
        tensors = {"lokr_w1": outer, "lokr_w2_a": first, "lokr_w2_b": second, "lokr_t2": core}
        return tensors | alpha, weight + strength * 6 / 3 * made
    blocks = random(*((3, rows // 8, 8, 8) if kind == "BOFT" else (rows // 8, 8, 8)))
    limit, turn = 0.02 if "limited" in kind else 0.0, boft if kind == "BOFT" else oft
    made, tensors = turn(weight, blocks, limit, strength), {"oft_blocks": blocks, "alpha": torch.tensor(limit)}
    if "rescaled" in kind:
        factors = 1 + random(rows, 1)
        made, tensors = factors * made, tensors | {"rescale": factors}
    return tensors, made
