"""tools/convert.py: pickles of trainers become safetensors, and run nothing."""
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT

TOOL = ROOT / "tools" / "convert.py"


def convert(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_what_trainers_save(tmp_path):
    torch.manual_seed(0)
    wide = torch.randint(-127, 128, (200, 130), dtype=torch.int8)
    scale = torch.rand(2, 2)
    content = {  # Self-Forcing's, with FSDP's names, and TurboDiffusion's eight bits
        "critic": {"x": torch.zeros(1)},
        "generator_ema": {
            "model._fsdp_wrapped_module.blocks.0.self_attn.q.weight": torch.randn(4, 3).to(torch.bfloat16),
            "model.blocks.0.ffn.0.int8_weight": wide, "model.blocks.0.ffn.0.scale": scale,
            "model.head.modulation": torch.randn(3, 4).T,
        },
    }
    torch.save(content, tmp_path / "a.pt")
    answer = convert(tmp_path / "a.pt")
    assert answer.returncode == 0 and "tensors of generator_ema" in answer.stdout, answer.stderr
    found, state = load_file(tmp_path / "a.safetensors"), content["generator_ema"]
    assert found.keys() == {"blocks.0.self_attn.q.weight", "blocks.0.ffn.0.weight", "head.modulation"}
    assert torch.equal(found["head.modulation"], state["model.head.modulation"])
    assert found["blocks.0.self_attn.q.weight"].dtype == torch.bfloat16
    expected = wide.float()
    expected[:128, :128] *= scale[0, 0]
    expected[:128, 128:] *= scale[0, 1]
    expected[128:, :128] *= scale[1, 0]
    expected[128:, 128:] *= scale[1, 1]
    assert torch.equal(found["blocks.0.ffn.0.weight"], expected.to(torch.bfloat16))
    assert "exists already" in convert(tmp_path / "a.pt").stderr


def test_turbowans_patches_are_a_convolution(tmp_path):
    """The linear layer over patches and the convolution give the same tokens."""
    torch.manual_seed(0)
    linear, video = torch.nn.Linear(3 * 4, 8), torch.randn(1, 3, 2, 4, 6)
    state = {f"net.patch_embedding.{name}": value for name, value in linear.state_dict().items()}
    torch.save(state, tmp_path / "a.pth")
    answer = convert(tmp_path / "a.pth")
    assert answer.returncode == 0, answer.stderr
    convolution = torch.nn.Conv3d(3, 8, (1, 2, 2), (1, 2, 2))
    found = load_file(tmp_path / "a.safetensors")
    convolution.load_state_dict({name.removeprefix("patch_embedding."): value for name, value in found.items()})
    patches = video.unfold(3, 2, 2).unfold(4, 2, 2).permute(0, 2, 3, 4, 1, 5, 6).flatten(4).flatten(1, 3)
    torch.testing.assert_close(convolution(video).flatten(2).transpose(1, 2), linear(patches))


@pytest.mark.system
def test_what_is_not_tensors_alone_is_refused_and_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'evil'}",)

    (tmp_path / "a.bin").write_bytes(pickle.dumps({"model": Evil()}))
    torch.save({"optimizer": {"x": torch.zeros(2)}}, tmp_path / "b.pt")
    answer = convert(tmp_path / "a.bin")
    assert answer.returncode == 1 and "not read as tensors alone" in answer.stderr
    assert not (tmp_path / "evil").exists() and not list(tmp_path.glob("*.safetensors"))
    assert "no table of tensors under generator_ema" in convert(tmp_path / "b.pt").stderr
    assert convert(tmp_path / "b.pt", tmp_path / "c.safetensors", "--key", "optimizer").returncode == 0


def test_it_reaches_no_network_and_starts_nothing():
    """With the system's help where it is allowed, by Python's audit hook everywhere."""
    program = f"""
import sys; sys.path.insert(0, {str(TOOL.parent)!r})
import convert, socket, subprocess
convert.leave_network()
sys.addaudithook(convert.refuse)
for attempt in (lambda: socket.create_connection(("127.0.0.1", 9)), lambda: subprocess.run(["true"])):
    try:
        attempt()
    except PermissionError as error:
        print(error)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.count("while weights are read") == 2
