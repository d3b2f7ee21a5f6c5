"""Goal: arrays land on the devices that the plan says, each device holding its own part only.
Method: a 2 x 4 mesh of forced CPU devices; shards are compared with slices taken by numpy.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding.mesh import DeviceMesh
from sharding.plan import MeshPlan, ShardingError, load_plan

PLAN = MeshPlan(
    mesh={"data": 2, "expert": 4},
    rules={"batch": ("data", "expert"), "experts": ("expert",), "ffn": ("data",)},
)


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh.of(PLAN)


@pytest.mark.multi_device
def test_devices_fill_the_mesh_in_order(mesh: DeviceMesh) -> None:
    assert mesh.mesh.axis_names == ("data", "expert")
    assert mesh.mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    ids = [[device.id for device in row] for row in mesh.mesh.devices]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.multi_device
def test_specs_follow_the_rules(mesh: DeviceMesh) -> None:
    assert mesh.spec(("batch", "embed")) == PartitionSpec(("data", "expert"), None)
    assert mesh.spec(("experts", "ffn", None)) == PartitionSpec("expert", "data", None)
    assert mesh.spec(()) == PartitionSpec()


@pytest.mark.multi_device
def test_place_gives_each_device_its_part(mesh: DeviceMesh) -> None:
    array = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    placed = mesh.place(array, ("experts", "ffn"))
    np.testing.assert_array_equal(np.asarray(placed), array)
    for shard in placed.addressable_shards:
        row, column = shard.device.id % 4, shard.device.id // 4
        expected = array[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        np.testing.assert_array_equal(np.asarray(shard.data), expected)


@pytest.mark.multi_device
def test_a_tree_takes_names_per_leaf_or_per_subtree(mesh: DeviceMesh) -> None:
    arrays = {
        "weight": {"codes": np.zeros((8, 64, 32)), "scale": np.zeros((8, 2, 1))},
        "layers": (np.zeros((8,)), np.zeros(())),
    }
    names = {"weight": ("experts", "ffn", "embed"), "layers": (("batch",), ())}
    found = mesh.tree_shardings(arrays, names)
    assert found["weight"]["codes"].spec == PartitionSpec("expert", "data", None)
    assert found["weight"]["scale"].spec == PartitionSpec("expert", "data", None)
    assert found["layers"][0].spec == PartitionSpec(("data", "expert"))
    assert found["layers"][1].spec == PartitionSpec()
    placed = jax.device_put(arrays, found)
    assert placed["layers"][0].sharding == found["layers"][0]


@pytest.mark.multi_device
def test_a_size_that_does_not_divide_is_refused_with_numbers(mesh: DeviceMesh) -> None:
    with pytest.raises(ShardingError, match="experts of size 6 does not divide into 4 parts"):
        mesh.place(np.zeros((6, 2)), ("experts", "ffn"))
    with pytest.raises(ShardingError, match="has 1 names; expected 2"):
        mesh.sharding(("experts",), (8, 2))


@pytest.mark.multi_device
def test_too_few_devices_is_refused_with_both_counts() -> None:
    wide = MeshPlan(mesh={"data": 4, "expert": 4})
    with pytest.raises(ShardingError, match="data 4 x expert 4 needs 16 devices; 8 are present"):
        DeviceMesh.of(wide)
    with pytest.raises(ShardingError, match="needs 8 devices; 3 are present"):
        DeviceMesh.of(PLAN, jax.devices()[:3])


def test_the_single_plan_uses_one_device() -> None:
    mesh = DeviceMesh.of(load_plan("single"))
    placed = mesh.place(np.ones((4, 2)), ("vocab", "embed"))
    assert placed.devices() == {jax.devices()[0]}
