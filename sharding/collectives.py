"""What devices of a mesh tell each other inside a step, where every device runs its own part.

A step is one `shard_map` over the whole mesh: each device sees only its own rows or tokens, and
what it needs of others it asks for by the functions here. Each speaks for a *group*: all devices
along some axes of the mesh.

*Why one shard_map and not one for each exchange*: XLA's partitioner would otherwise have to find a
layout for everything between the exchanges, for which a step of many layers took it minutes.
"""

# jax leaves arrays of unknown type; everything else here stays strict.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sharding.plan import MeshPlan, ShardingError


@dataclass(frozen=True)
class Group:
    """Devices along `axes` of the mesh, `size` of them; one device if there is no axis.

    All methods are for use inside a `shard_map` over the mesh. Devices count along the axes with
    the last axis varying fastest.
    """

    axes: tuple[str, ...] = ()
    size: int = 1

    @classmethod
    def along(cls, plan: MeshPlan, axes: Iterable[str]) -> "Group":
        """The devices along those of `axes` that have more than one."""
        wide = tuple(axis for axis in axes if plan.mesh[axis] > 1)
        return cls(wide, math.prod(plan.mesh[axis] for axis in wide))

    @property
    def index(self) -> jax.Array:
        """[] int32, this device's number in its group."""
        return jax.lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def gather(self, x: jax.Array) -> jax.Array:
        """[size * N, ...] from the [N, ...] of every device, in their order."""
        return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over all devices."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def swap(self, x: jax.Array) -> jax.Array:
        """[size, ...] whose part `d` comes from device `d`, which had it as this one's part."""
        return jax.lax.all_to_all(x, self.axes, 0, 0) if self.axes else x

    def exchange(
        self, rows: jax.Array, counts: jax.Array, num_received_max: int, pair_max: int
    ) -> jax.Array:
        """Send runs of rows to all devices, each as long as it happens to be.

        Args:
            rows: [N, ...], those for device 0 first, then those for device 1, and so on.
            counts: [size, size] int32, the same on every device: rows from one device to another.
            num_received_max: M, at least as many rows as any device receives.
            pair_max: at least as many rows as any device sends to a single one.

        Returns:
            [M, ...]: the rows of device 0, then those of device 1, and so on, then zeros.

        XLA for CPUs has no ragged exchange; there every run travels in a box of `pair_max` rows.
        """
        if not self.axes:
            return _resized(rows, num_received_max)
        me = self.index
        sent, received = counts[me], counts[:, me]
        starts = jnp.cumsum(sent) - sent
        # Where this device's rows begin at each of the others.
        places = (jnp.cumsum(counts, axis=0) - counts)[me]

        def ragged(rows: jax.Array) -> jax.Array:
            empty = jnp.zeros((num_received_max, *rows.shape[1:]), rows.dtype)
            sizes = (starts, sent, places, received)
            return jax.lax.ragged_all_to_all(rows, empty, *sizes, axis_name=self.axes)

        def boxed(rows: jax.Array) -> jax.Array:
            offset = jnp.arange(pair_max)
            index = starts[:, None] + offset
            boxes = self.swap(rows.at[index].get(mode="fill", fill_value=0))
            first = jnp.cumsum(received) - received
            is_sent = offset < received[:, None]
            place = jnp.where(is_sent, first[:, None] + offset, num_received_max)
            empty = jnp.zeros((num_received_max, *rows.shape[1:]), rows.dtype)
            return empty.at[place].set(boxes, mode="drop")

        return jax.lax.platform_dependent(rows, cpu=boxed, default=ragged)


def _resized(rows: jax.Array, length: int) -> jax.Array:
    missing = max(length - rows.shape[0], 0)
    return jnp.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1)))[:length]


_RUN_NAMES = ("batch", "blocks", "slots", "tokens", "experts", "engram_dim")
"""Logical names by which a running step may be cut."""


ONE_DEVICE = Group()
"""Nobody but this device."""


@dataclass(frozen=True)
class StepGroups:
    """Between which devices the parts of a step are divided.

    Attributes:
        rows: each has rows of its own, with their cache.
        tokens: each has a share of the tokens of every row, and the same cache as the others.
        experts: each has a share of the routed experts.
        spread: those that have the same tokens and different experts; each sends a part of them.
        engram: each has some channels of every Engram row.
    """

    rows: Group = ONE_DEVICE
    tokens: Group = ONE_DEVICE
    experts: Group = ONE_DEVICE
    spread: Group = ONE_DEVICE
    engram: Group = ONE_DEVICE

    @property
    def is_one_device(self) -> bool:
        """Whether nothing is divided."""
        return self == UNDIVIDED

    @classmethod
    def of(cls, plan: MeshPlan) -> "StepGroups":
        """The groups of a plan.

        Raises:
            ShardingError: a rule that no step follows, or rules that contradict each other.
        """

        def group(name: str) -> Group:
            return Group.along(plan, plan.rules.get(name, ()))

        for name in plan.rules:
            if name not in _RUN_NAMES and group(name).size > 1:
                raise ShardingError(
                    f"rule {name} divides arrays that every device of a running step holds whole; "
                    f"expected rules for {', '.join(_RUN_NAMES)} only"
                )
        rows, tokens, experts = group("batch"), group("tokens"), group("experts")
        for name in ("blocks", "slots"):
            if group(name) != rows:
                raise ShardingError(
                    f"rule {name} is {_shown(group(name))} and rule batch {_shown(rows)}; expected "
                    "the same axes, because a row and its cache lie on one device"
                )
        shared = set(rows.axes) & set(tokens.axes)
        if shared:
            raise ShardingError(
                f"rules batch and tokens both use mesh axis {min(shared)}; expected it in one of "
                "them"
            )
        own = (*rows.axes, *tokens.axes)
        spread = Group.along(plan, (axis for axis in experts.axes if axis not in own))
        return cls(rows, tokens, experts, spread, group("engram_dim"))


def _shown(group: Group) -> str:
    return f"[{', '.join(group.axes)}]"


UNDIVIDED = StepGroups()
"""Every step whole, on one device."""
