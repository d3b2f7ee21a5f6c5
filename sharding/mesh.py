"""DeviceMesh: a MeshPlan laid onto real devices; where each array lies.

The only place that makes a jax Mesh, a PartitionSpec or a NamedSharding. Axes are `Auto`: the
outer program lets XLA propagate shardings, and exchanges written by hand live in shard_map.
"""

# jax leaves devices and pytrees untyped; everything else here stays strict.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
# pyright: reportUnknownParameterType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.collectives import ONE_DEVICE, Group
from sharding.plan import MeshPlan, ShardingError

LogicalAxes = tuple[str | None, ...]
"""One logical name per dimension of an array; None for a dimension that is never cut."""


@dataclass(frozen=True)
class DeviceMesh:
    """A plan and the jax mesh made of it."""

    plan: MeshPlan
    mesh: Mesh

    @classmethod
    def of(cls, plan: MeshPlan, devices: Sequence[Any] | None = None) -> "DeviceMesh":
        """Lays `plan` onto the first devices of `devices` (all that jax has, if None).

        Devices are taken in their order, the last axis of the plan varying fastest.

        Raises:
            ShardingError: fewer devices than the plan needs.
        """
        present = jax.devices() if devices is None else list(devices)
        needed = plan.num_devices
        if len(present) < needed:
            sizes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
            raise ShardingError(
                f"the mesh {sizes} needs {needed} devices; {len(present)} are present. Use a "
                "smaller mesh, or more devices"
            )
        grid = np.array(present[:needed], dtype=object).reshape(tuple(plan.mesh.values()))
        types = (AxisType.Auto,) * grid.ndim
        return cls(plan, Mesh(grid, tuple(plan.mesh), axis_types=types))

    def spec(self, names: LogicalAxes) -> PartitionSpec:
        """The PartitionSpec of an array with these logical names.

        Raises:
            ShardingError: an unknown name, or one mesh axis used by two dimensions.
        """
        return PartitionSpec(*(axes or None for axes in self.plan.axes_of(names)))

    def sharding(self, names: LogicalAxes, shape: tuple[int, ...]) -> NamedSharding:
        """Where an array of `shape` lies.

        Raises:
            ShardingError: names and shape differ in length, or a size does not divide.
        """
        self.plan.check_shape(names, shape)
        return NamedSharding(self.mesh, self.spec(names))

    def tree_shardings(self, arrays: Any, names: Any) -> Any:
        """Shardings of a whole pytree, in the structure of `arrays`.

        `arrays` has leaves with a `shape`. `names` is a tree of the same structure whose leaves
        are tuples of logical names; one tuple may stand for a subtree whose arrays all share it,
        such as the codes and scales of block-scaled weights.

        Raises:
            ShardingError: as `sharding`.
        """

        def below(leaf_names: LogicalAxes, subtree: Any) -> Any:
            return jax.tree.map(lambda leaf: self.sharding(leaf_names, leaf.shape), subtree)

        return jax.tree.map(below, names, arrays, is_leaf=_is_names)

    def place_parts(self, array: np.ndarray, group: Group) -> jax.Array:
        """Puts an array onto the devices, divided along its first dimension among a group.

        Every process of the mesh has the whole array and keeps what its own devices need.
        """
        sharding = NamedSharding(self.mesh, split_first(group))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def place(self, array: np.ndarray | jax.Array, names: LogicalAxes) -> jax.Array:
        """Puts one array onto the devices, each of which receives only its own part.

        Raises:
            ShardingError: as `sharding`.
        """
        return jax.device_put(array, self.sharding(names, array.shape))


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple) and all(item is None or isinstance(item, str) for item in node)


def split_first(group: Group = ONE_DEVICE) -> PartitionSpec:
    """The spec of an array that is divided along its first dimension among a group."""
    return PartitionSpec(group.axes) if group.axes else PartitionSpec()


def specs_of(arrays: Any) -> Any:
    """The specs of a pytree of arrays, or of shapes with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, arrays)


def mesh_of(arrays: Any) -> Mesh:
    """The mesh on which the arrays of a pytree lie."""
    return jax.tree.leaves(arrays)[0].sharding.mesh


def per_device(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """`function` run on every device of a mesh, which sees only its own parts of the arguments.

    An output that no spec divides must be the same on all devices.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
