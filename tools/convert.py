"""Writes the weights in a .pth, .pt, .ckpt or .bin file as safetensors, which run.py reads.

    python tools/convert.py self_forcing_dmd.pt                     # self_forcing_dmd.safetensors beside it
    python tools/convert.py longlive_base.pt out.safetensors --key generator

Such files are pickles, which can run code. Torch reads them with weights_only=True, which allows tensors alone; this
process reaches no network and starts no others all the same. A large file is mapped, not read into memory.
"""
import argparse
import ctypes
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # Linux' CLONE_NEWUSER, CLONE_NEWNET
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pty.spawn")
# Where trainers keep the weights, the best first: Self-Forcing, LongLive, CausVid and others.
KEYS = ("generator_ema", "generator", "generator_lora", "model_ema", "ema", "state_dict", "model", "module", "params")
WRAPPERS = ("module.", "net.", "model.")  # before all names of some files
INSIDE = re.compile(r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\.")
BLOCK = 128  # rows and columns that share a scale in TurboDiffusion's eight bits
PATCH = 1, 2, 2  # frames, height and width of Wan's patches
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", help="by default the source's name with .safetensors")
    parser.add_argument("--key", help=f"which entry of the file; by default the first of {', '.join(KEYS)}")
    options = parser.parse_args()
    target = options.target or options.source.with_suffix(".safetensors")
    if target.exists():
        sys.exit(f"{target}: exists already; give another name")
    alone = leave_network()
    import torch  # after leaving: a process with threads cannot leave

    sys.addaudithook(refuse)
    try:
        content = torch.load(options.source, "cpu", weights_only=True, mmap=zipfile.is_zipfile(options.source))
    except Exception as error:
        sys.exit(f"{options.source}: not read as tensors alone ({str(error).splitlines()[0]})")
    name, tensors = state_in(content, options.key)
    write(target, dict(weights(tensors)))
    print(f"{target}: {len(tensors)} tensors{f' of {name}' if name else ''}{'' if alone else '; sockets were refused'}")


def leave_network() -> bool:
    """Move this process to a network of its own, without connections, where the system allows it."""
    try:
        return ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK) == 0
    except (AttributeError, OSError):
        return False


def refuse(event: str, arguments) -> None:
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} while weights are read")


def state_in(content, key: str | None) -> tuple[str, dict]:
    """The table of tensors in a file, and the key it was found under."""
    import torch

    if isinstance(content, Mapping) and key is None:
        tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if tensors and not any(isinstance(content.get(name), Mapping) for name in KEYS):
            return "", tensors
    keys, entries = [key] if key else KEYS, content if isinstance(content, Mapping) else {}
    chosen = next((name for name in keys if isinstance(entries.get(name), Mapping)), None)
    if chosen is None:
        present = ", ".join(map(str, list(entries)[:10])) or type(content).__name__
        sys.exit(f"no table of tensors under {' or '.join(keys)}; there are: {present}; choose one with --key")
    inner, tensors = state_in(content[chosen], None)
    return f"{chosen}.{inner}".rstrip("."), tensors


def weights(tensors: Mapping) -> Iterator[tuple[str, object]]:
    """Tensors by the names of their modules; eight bits with scales of blocks widened. A linear layer over patches, as
    TurboWan has it, becomes the convolution that it is: its inputs are in the order of channels, then of PATCH."""
    named = {INSIDE.sub("", name): tensor for name, tensor in tensors.items()}
    while wrapper := next((one for one in WRAPPERS if all(name.startswith(one) for name in named)), None):
        named = {name.removeprefix(wrapper): tensor for name, tensor in named.items()}
    for name, tensor in named.items():
        module, _, end = name.rpartition(".")
        if name == "patch_embedding.weight" and tensor.ndim == 2:
            yield name, tensor.reshape(len(tensor), -1, *PATCH)
        elif end == "int8_weight":
            yield f"{module}.weight", widened(tensor, named[f"{module}.scale"])
        elif not (end == "scale" and f"{module}.int8_weight" in named):
            yield name, tensor


def widened(values, scale):
    import torch

    rows, columns = values.shape
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (values.float() * whole).to(torch.bfloat16)


def write(target: Path, tensors: Mapping) -> None:
    """A safetensors file, written tensor by tensor."""
    import torch

    layout, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        layout[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **layout}).encode()
    header += b" " * (-len(header) % 8)
    partial = target.with_name(f".{target.name}.part")
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in tensors.values():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
