"""The GPUs that kernels are written for: what bounds a kernel on each, as published.

A figure here is a ceiling from a data sheet. A measured ceiling belongs to a device and a run and
is never written down here.
"""

from dataclasses import dataclass
from typing import Literal

import jax

Architecture = Literal["sm90", "sm100"]


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
        name: short name used in tables and files.
        device_kind: how JAX names it.
        architecture: which kernel bodies it runs.
        num_cores: streaming multiprocessors.
        shared_bytes: shared memory that one block may use.
        bytes_per_s: device memory.
        bf16_flops_per_s, fp8_flops_per_s: dense, multiply and add counted as two.
    """

    name: str
    device_kind: str
    architecture: Architecture
    num_cores: int
    shared_bytes: int
    bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float


H100 = Target("h100", "NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 3.35e12, 989e12, 1979e12)
H200 = Target("h200", "NVIDIA H200", "sm90", 132, 232448, 4.8e12, 989e12, 1979e12)
B200 = Target("b200", "NVIDIA B200", "sm100", 148, 232448, 7.7e12, 2250e12, 4500e12)
TARGETS = (H100, H200, B200)


def by_name(name: str) -> Target:
    """The target with this short name.

    Raises:
        ValueError: there is none.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise ValueError(f"target is {name!r}; expected one of {', '.join(t.name for t in TARGETS)}")


def by_device_kind(device_kind: str) -> Target | None:
    """The target that JAX names so; its nearest relative for another GPU of the same names."""
    for target in TARGETS:
        if device_kind == target.device_kind:
            return target
    for target in TARGETS:
        if target.name.upper() in device_kind:
            return target
    return None


def current_target() -> Target | None:
    """The target that is being compiled for; None where there is no such GPU.

    The devices of `jax.set_mesh` decide, as they do for Pallas, so a program can be compiled
    for a GPU that is not there; without a mesh, the default device does.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return by_device_kind(described.device_kind)
    if jax.default_backend() != "gpu":
        return None
    return by_device_kind(jax.devices()[0].device_kind)
