"""Devices, attached or described by a config, and their meshes."""
import math
from dataclasses import dataclass

import jax

from wan_torchax.config.geometry import device_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.devices import distributed


def memory_bytes(mesh, chip) -> int | None:
    """Memory of one device: as it reports, else from the chip's config; None if unknown."""
    device = mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else None
    limit = (device.memory_stats() or {}).get("bytes_limit") if device is not None else None
    return limit or (chip.hbm_gib and int(chip.hbm_gib * 2**30))


@dataclass(frozen=True)
class Here:
    """The attached devices, of all hosts of a run."""

    devices: list

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def kind(self) -> str:
        return self.devices[0].device_kind

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def hosts(self) -> int:
        return jax.process_count()

    def arrange(self, axes: dict[str, int]) -> jax.sharding.Mesh:
        names, sizes = tuple(axes), tuple(axes.values())
        if self.hosts > 1:
            return jax.sharding.Mesh(distributed.arrange(self.devices, sizes), names, axis_types=auto(axes))
        return jax.make_mesh(sizes, names, axis_types=auto(axes), devices=self.devices[: math.prod(sizes)])


@dataclass(frozen=True)
class Described:
    """Devices that a config's mesh and chip describe; they need not be attached for tracing and lowering."""

    platform: str
    kind: str
    count: int
    hosts: int = 1

    @classmethod
    def by(cls, mesh) -> "Described":
        return cls(mesh.platform, mesh.chip.kind, device_count(mesh))

    def arrange(self, axes: dict[str, int]) -> jax.sharding.AbstractMesh:
        device = jax.sharding.AbstractDevice(device_kind=self.kind, num_cores=1, platform=self.platform)
        return jax.sharding.AbstractMesh(
            tuple(axes.values()), tuple(axes), axis_types=auto(axes), abstract_device=device
        )


def auto(axes) -> tuple:
    return (jax.sharding.AxisType.Auto,) * len(axes)


def find(mesh) -> Here:
    """The devices for a config's mesh."""
    try:
        devices = jax.devices(mesh.platform)
    except RuntimeError as error:
        name = mesh.platform or "device"
        remedy = "use mesh=auto for what this machine has"
        raise ConfigError(f"mesh={mesh.name}: no {name} to be had here ({error}); {remedy}") from error
    hosts = jax.process_count()
    if hosts != distributed.processes() or hosts != (mesh.hosts or hosts):
        raise ConfigError(
            f"mesh={mesh.name}: {hosts} hosts, {distributed.processes()} processes have joined, "
            f"mesh.hosts={mesh.hosts}; run the same command with distributed=auto on every host of the slice, "
            "once on each"
        )
    if mesh.platform is None and devices[0].platform == "cpu" and hosts == 1:
        devices = devices[:1]  # fake CPU devices are only for meshes that request them
    return Here(devices)


def describe(mesh: jax.sharding.Mesh) -> str:
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{mesh.devices.size} {mesh.devices.flat[0].device_kind} ({axes})"
