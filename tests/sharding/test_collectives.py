"""Goal: devices find the others of their group, and every row arrives whatever the runs' lengths.
Method: exchanges on eight CPU devices against the same done in numpy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.collectives import Group, StepGroups
from sharding.mesh import DeviceMesh, per_device, split_first
from sharding.plan import MeshPlan, ShardingError, load_plan

pytestmark = pytest.mark.multi_device

LINE = MeshPlan({"expert": 8})
GRID = MeshPlan({"data": 2, "expert": 4})


def _on_all(plan: MeshPlan, function: Any, *arrays: np.ndarray) -> np.ndarray:
    """`function` of every device's part of the arrays [devices, ...]."""
    mesh = DeviceMesh.of(plan).mesh
    spec = split_first(Group.along(plan, plan.mesh))
    run = per_device(
        lambda *parts: function(*(part[0] for part in parts))[None],
        mesh,
        (spec,) * len(arrays),
        spec,
    )
    return np.asarray(jax.jit(run)(*arrays))


def _exchanged(rows: np.ndarray, counts: np.ndarray, length: int) -> np.ndarray:
    """What every device of one group should receive."""
    out = np.zeros((len(rows), length, *rows.shape[2:]), rows.dtype)
    for target in range(len(rows)):
        at = 0
        for source in range(len(rows)):
            first, n = counts[source, :target].sum(), counts[source, target]
            out[target, at : at + n] = rows[source, first : first + n]
            at += n
    return out


@pytest.mark.parametrize("case", ("random", "one receives all", "nothing"))
def test_runs_of_any_length_arrive(rng: np.random.Generator, case: str) -> None:
    counts = rng.integers(0, 6, (8, 8)).astype(np.int32)
    if case != "random":
        counts[:] = 0
    if case == "one receives all":
        counts[:, 3] = 5
    rows = rng.integers(0, 256, (8, 48, 3)).astype(np.uint8)
    group = Group.along(LINE, ["expert"])
    received = _on_all(LINE, lambda r: group.exchange(r, jnp.asarray(counts), 40, 5), rows)
    np.testing.assert_array_equal(received, _exchanged(rows, counts, 40))
    returned = _on_all(LINE, lambda r: group.exchange(r, jnp.asarray(counts.T), 48, 5), received)
    for device in range(8):
        n = counts[device].sum()
        np.testing.assert_array_equal(returned[device, :n], rows[device, :n])
        assert not returned[device, n:].any()


def test_groups_along_some_axes_and_along_two(rng: np.random.Generator) -> None:
    numbers = np.arange(8, dtype=np.int32)[:, None]
    inner, outer = Group.along(GRID, ["expert"]), Group.along(GRID, ["data"])
    both = Group.along(GRID, ["data", "expert"])
    assert (inner.size, outer.size, both.size) == (4, 2, 8)
    index = _on_all(
        GRID, lambda n: jnp.stack([inner.index, outer.index, both.index]) + 0 * n, numbers
    )
    np.testing.assert_array_equal(index, [[d % 4, d // 4, d] for d in range(8)])
    gathered = _on_all(GRID, inner.gather, numbers)
    np.testing.assert_array_equal(gathered, np.repeat(numbers.reshape(2, 4), 4, axis=0))
    total = _on_all(GRID, outer.total, numbers)
    np.testing.assert_array_equal(total[:, 0], [4, 6, 8, 10] * 2)
    counts = rng.integers(0, 4, (8, 8)).astype(np.int32)
    rows = rng.normal(size=(8, 32, 2)).astype(np.float32)
    received = _on_all(GRID, lambda r: both.exchange(r, jnp.asarray(counts), 32, 4), rows)
    np.testing.assert_array_equal(received, _exchanged(rows, counts, 32))
    boxes = rng.normal(size=(8, 8, 2)).astype(np.float32)
    np.testing.assert_array_equal(_on_all(GRID, both.swap, boxes), boxes.swapaxes(0, 1))


def test_gpus_exchange_runs_as_long_as_they_are() -> None:
    """What runs on CPUs is a stand-in, so the program for GPUs is looked at as far as it goes."""
    both = Group.along(GRID, ["data", "expert"])
    spec = split_first(both)
    run = per_device(
        lambda rows, counts: both.exchange(rows[0], counts, 32, 4)[None],
        DeviceMesh.of(GRID).mesh,
        (spec, split_first()),
        spec,
    )
    shapes = jax.ShapeDtypeStruct((8, 32, 16), np.uint8), jax.ShapeDtypeStruct((8, 8), np.int32)
    texts = {
        platform: jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "cpu")
    }
    assert "@ragged_all_to_all" in texts["cuda"]
    assert "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]>" in texts["cuda"], "all devices exchange at once"
    assert "stablehlo.all_to_all" not in texts["cuda"]
    assert "ragged_all_to_all" not in texts["cpu"]


def test_one_device_needs_nobody() -> None:
    group = Group.along(MeshPlan({"data": 1, "expert": 1}), ["data", "expert"])
    assert group == Group()
    rows = jnp.arange(6.0).reshape(3, 2)
    for same in (group.gather(rows), group.total(rows), group.swap(rows)):
        np.testing.assert_array_equal(same, rows)
    longer = group.exchange(rows, jnp.array([[3]]), 5, 3)
    np.testing.assert_array_equal(longer, np.pad(rows, ((0, 2), (0, 0))))
    assert int(group.index) == 0


def test_groups_of_the_shipped_plans() -> None:
    assert StepGroups.of(load_plan("single")).is_one_device
    eight = Group(("expert",), 8)
    assert StepGroups.of(load_plan("cpu8")) == StepGroups(rows=eight, experts=eight)
    both = Group(("data", "expert"), 64)
    expected = StepGroups(rows=both, experts=both, engram=eight)
    assert StepGroups.of(load_plan("decode_ep64")) == expected
    line = Group(("context",), 8)
    expected = StepGroups(tokens=line, experts=line, engram=line)
    assert StepGroups.of(load_plan("prefill_h200x8")) == expected
    # Experts along an axis that gives nobody rows of his own.
    plan = MeshPlan({"expert": 4}, {"experts": ("expert",)})
    assert StepGroups.of(plan) == StepGroups(
        experts=Group(("expert",), 4), spread=Group(("expert",), 4)
    )


def test_rules_that_no_step_follows_are_refused() -> None:
    with pytest.raises(ShardingError, match="rule heads .*expected rules for batch, blocks"):
        StepGroups.of(MeshPlan({"tensor": 2}, {"heads": ("tensor",)}))
    with pytest.raises(ShardingError, match=r"rule slots is \[\] and rule batch \[data\]"):
        StepGroups.of(MeshPlan({"data": 2}, {"batch": ("data",), "blocks": ("data",)}))
    rules = {name: ("data",) for name in ("batch", "blocks", "slots", "tokens")}
    with pytest.raises(ShardingError, match="batch and tokens both use mesh axis data"):
        StepGroups.of(MeshPlan({"data": 2}, rules))
    # An axis of one device divides nothing.
    assert StepGroups.of(MeshPlan({"tensor": 1}, {"heads": ("tensor",)})).is_one_device
