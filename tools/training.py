"""What every stage of a training needs: how far it is, its optimizers, and its steps as CUDA graphs."""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf


def command_line(about: str, name: str, flag: str, **how) -> tuple[argparse.Namespace, DictConfig]:
    """A tool's arguments, of which `flag` is its own, and the config tools/conf/<name>.yaml with its overrides."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.add_argument(flag, **how)
    parser.add_argument("overrides", nargs="*", help=f"key=value, as in tools/conf/{name}.yaml")
    arguments = parser.parse_args()
    with initialize_config_dir(str(Path(__file__).parent.resolve() / "conf"), version_base="1.3"):
        return arguments, compose(f"{name}_smoke" if arguments.smoke else name, arguments.overrides)


def about(cfg: DictConfig, stages: dict) -> dict:
    """What metrics.json says of a training."""
    commit = cfg.commit
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
        said = ["git", "rev-parse", "HEAD"]
        commit = commit or subprocess.check_output(said, cwd=Path(__file__).parent, text=True).strip()
    return {
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "diffusers": diffusers.__version__, "transformers": transformers.__version__},
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "stages": stages,
        "settings": OmegaConf.to_container(cfg, resolve=True),
    }


def write_metrics(folder: Path, metrics: dict) -> None:
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


def teaching(about_it: str, name: str, run: Callable[[DictConfig, str | None], None]) -> None:
    """The command of a tool that teaches the demo model something."""
    flag = dict(metavar="FOLDER", help="teach nothing: judge the weights in this folder")
    arguments, cfg = command_line(about_it, name, "--judge", **flag)
    run(cfg, arguments.judge)


def teach_and_judge(cfg: DictConfig, judged: str | None, load: Callable, teach: Callable, judge: Callable) -> Path:
    """Teach into `output` and judge what was written; or judge the weights in a folder.

        load(cfg, device)                       the networks that stay as they are
        teach(cfg, networks, folder, device)    writes weights; gives its stages, for metrics.json
        judge(cfg, networks, folder)            gives rates, which join metrics.json
    """
    torch.manual_seed(cfg.seed)
    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(chosen if cfg.device == "auto" else cfg.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    networks, folder = load(cfg, device), Path(judged or cfg.output)
    if not judged:
        start = time.perf_counter()
        stages = teach(cfg, networks, folder, device)
        write_metrics(folder, about(cfg, stages) | {"seconds": round(time.perf_counter() - start, 1)})
    start = time.perf_counter()
    rates = judge(cfg, networks, folder)
    say(stage="judged", seconds=time.perf_counter() - start, **rates)
    path = folder / "metrics.json"
    write_metrics(folder, (json.loads(path.read_text()) if path.exists() else {}) | rates)
    return folder


class Clock:
    """How far a stage is: the larger share of its minutes or steps, counted over all resumed runs."""

    def __init__(self, minutes: float, steps: int, elapsed: float = 0.0, step: int = 0):
        self.minutes, self.steps, self.step = minutes, steps, step
        self.start = time.perf_counter() - elapsed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def progress(self) -> float:
        return min(1.0, max(self.elapsed / (60 * self.minutes), self.step / self.steps))

    def state(self) -> dict:
        return {"elapsed": self.elapsed, "step": self.step}


class Every:
    """True once every so many minutes."""

    def __init__(self, minutes: float):
        self.seconds, self.last = 60 * minutes, time.perf_counter()

    def __call__(self) -> bool:
        if time.perf_counter() - self.last < self.seconds:
            return False
        self.last = time.perf_counter()
        return True


def autocast(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def learning_rate(peak: float, clock: Clock, warmup_steps: int) -> float:
    """A linear start, then half a cosine down to a hundredth."""
    falling = 0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * clock.progress))
    return peak * min(1.0, (clock.step + 1) / warmup_steps) * falling


class Muon(torch.optim.Optimizer):
    """Orthogonal momentum, for weight matrices: a step moves in all directions alike, `size` times as far as AdamW's.

    Matrices of one shape are stepped together, a convolution's weight is the matrix of its outputs, and the learning
    rate is a tensor. torch.optim.Muon has none of these: a graph cannot record it.
    """

    def __init__(
        self, matrices: list[torch.Tensor], rate: torch.Tensor, size: float, weight_decay: float, momentum: float = 0.95
    ):
        shapes = sorted({matrix.shape for matrix in matrices})
        groups = [{"params": [matrix for matrix in matrices if matrix.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": rate, "size": size, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            matrices, rate = group["params"], group["lr"]
            # A single picture has no use for what convolves in time.
            found = [torch.zeros_like(matrix) if matrix.grad is None else matrix.grad for matrix in matrices]
            gradient = torch.stack(found).flatten(2)
            state = self.state[matrices[0]]
            average = state.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            scale = 0.2 * group["size"] * max(gradient.shape[1:]) ** 0.5
            change = orthogonal(gradient.lerp(average, group["momentum"])) * (-scale * rate)
            torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
            torch._foreach_add_(matrices, [part.view_as(matrices[0]) for part in change])


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [n, rows, columns] with all singular values brought near 1 (Newton-Schulz iteration)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(torch.bfloat16 if x.is_cuda else x.dtype)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def build_optimizers(module: torch.nn.Module, weight_decay: float, muon: float) -> list[torch.optim.Optimizer]:
    """AdamW, and for the blocks' matrices and convolutions Muon, with `muon` times its steps, unless that is 0.

    Rates are tensors: a recorded step sees them change.
    """
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    matrices = [name for name, value in parameters.items()
                if muon and "block" in name and value.ndim in (2, 4, 5) and value[0].numel() > 1
                and "relative_attention_bias" not in name]
    rest = [value for name, value in parameters.items() if name not in matrices]
    rate = torch.zeros((), device=rest[0].device)
    optimizers = [
        torch.optim.AdamW(
            rest, rate, (0.9, 0.98), weight_decay=weight_decay, fused=rate.is_cuda, capturable=rate.is_cuda
        )
    ]
    if matrices:
        optimizers.append(Muon([parameters[name] for name in matrices], rate.clone(), muon, weight_decay))
    return optimizers


def apply_gradients(optimizers: list[torch.optim.Optimizer], limit: float = 1.0) -> None:
    parameters = [value for one in optimizers for group in one.param_groups for value in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def load_optimizers(optimizers: list[torch.optim.Optimizer], saved: dict) -> None:
    for optimizer, content in zip(optimizers, saved["optimizers"]):
        optimizer.load_state_dict(content)


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)


class Recorded:
    """A training step as a CUDA graph: launching its thousands of small kernels takes longer than running them.

    `step` takes tensors that always have the examples' shapes, and returns tensors; without a GPU it is simply called.
    """

    def __init__(self, step, device: torch.device, *examples: torch.Tensor, pool=None):
        """Graphs with one pool of memory must be replayed in the order in which they are made."""
        self.step, self.inputs, self.graph = step, [example.clone() for example in examples], None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = step(*self.inputs)

    def __call__(self, *values: torch.Tensor):
        if self.graph is None:
            return self.step(*values)
        for buffer, value in zip(self.inputs, values):
            buffer.copy_(value)
        self.graph.replay()
        return self.output


def say(**values) -> None:
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}), flush=True)
