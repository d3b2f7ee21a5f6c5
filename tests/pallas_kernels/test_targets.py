"""Goal: the GPU that is compiled for is known by its name or by the devices of the mesh.
Method: look-ups by name and by what a driver may call a GPU, and a described device without one.
"""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import targets


def test_targets_are_found_by_name_and_by_the_names_of_drivers() -> None:
    assert targets.by_name("h200") is targets.H200
    assert targets.by_device_kind("NVIDIA H200") is targets.H200
    assert targets.by_device_kind("NVIDIA H100 PCIe") is targets.H100
    assert targets.by_device_kind("NVIDIA A100-SXM4-80GB") is None
    with pytest.raises(ValueError, match="target is 'v5e'; expected one of h100, h200, b200"):
        targets.by_name("v5e")


def test_the_current_target_is_that_of_the_mesh() -> None:
    assert targets.current_target() is None, "the tests run on a CPU"
    device = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert targets.current_target() is targets.B200
    assert targets.current_target() is None
