"""Which expert lies on which device, and how that changes while the model serves (pure numpy).

A device has the same number of *slots* in every layer. Each logical expert has a slot, and the
redundant slots hold further *replicas*, among which a step shares its tokens (`replica_choice`).
`ExpertBalancer` looks at the loads of every step and moves a few copies after each:

1. The next step is forecast per expert: a mean over recent steps that starts anew where a load
   jumps by more than its own noise explains.
2. Layers are judged on the forecast and on the last steps themselves, each with its tokens shared
   out as well as the replicas allow. So a placement is judged by what is hot *together* (vector
   packing), not by averages.
3. In the worst layers a slot of the hottest device is copied over a replica that is missed least,
   or exchanged with a slot elsewhere, whichever lowers the excess over the mean most per copy.
4. What is left of the allowance turns idle replicas into replicas of busy experts, so that every
   device has tokens that it may give away.

*Why small steps from where things are*: a plan made afresh differs from the last in nearly every
slot, so it can only be put in place by moving all weights.
"""

# numpy leaves the results of arange and of fancy indexing partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sharding.plan import ShardingError
from sharding.replica_choice import share_tokens

_RECENT_STEPS = 3
"""Steps on which layers are judged beside the forecast."""

_LAYERS_PER_ROUND = 16
_ROUNDS = 3
_SHARE_ITERATIONS = 8

_JUMP_SIGMA, _SHIFT_SIGMA = 3.5, 2.0
"""A load this many standard deviations off its forecast has jumped, or may be moving."""
_SHIFT_MEMORY, _MEMORY_MAX = 8, 100
"""Steps that the mean of a load that may be moving reaches back, and that of any other."""

_OTHER_NODE_BONUS = 1.02
"""How much more a replica on a node without one is worth: fewer of its tokens cross nodes."""

_IDLE_RATIO = 1.3
"""A replica is idle if its expert without it has this factor less per replica than another."""


class Move(NamedTuple):
    """One copy: the weights in `source` of a layer are to be copied into its slot `target`."""

    layer: int
    source: int
    target: int
    expert: int


@dataclass(frozen=True)
class Placement:
    """The logical expert in each physical slot.

    Attributes:
        slots: [L, P] int32; slot p lies on device p // (P / num_devices).
        num_experts: E, logical experts of a layer.
        num_devices: D.
        devices_per_node: how many neighbouring devices form a node.
    """

    slots: np.ndarray
    num_experts: int
    num_devices: int
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        """Raises ShardingError if slots do not divide or an expert has none."""
        num_slots = self.slots.shape[1]
        if num_slots % self.num_devices:
            raise ShardingError(
                f"{num_slots} expert slots do not divide among {self.num_devices} devices; "
                "change the number of redundant experts"
            )
        for layer, row in enumerate(self.slots):
            missing = np.setdiff1d(np.arange(self.num_experts), row)
            if len(missing):
                raise ShardingError(
                    f"layer {layer}: expert {missing[0]} has no slot; expected all "
                    f"{self.num_experts} experts among {num_slots} slots"
                )

    @classmethod
    def spread(
        cls,
        num_layers: int,
        num_experts: int,
        num_devices: int,
        num_redundant: int,
        devices_per_node: int = 8,
    ) -> "Placement":
        """Where nothing is known of loads: experts in order, every device with as many replicas.

        The replicas of a device are of experts half the mesh away.

        Raises:
            ShardingError: experts and redundant experts do not divide among the devices, or there
                are more redundant slots than experts.
        """
        num_slots = num_experts + num_redundant
        if num_slots % num_devices or num_redundant > num_experts:
            raise ShardingError(
                f"{num_experts} experts and {num_redundant} redundant ones on {num_devices} "
                "devices; expected a sum that divides, and at most one replica of each expert"
            )
        per_device = num_slots // num_devices
        flat = np.empty(num_slots, np.int32)
        own = np.array_split(np.arange(num_experts), num_devices)
        free: list[int] = []
        for device, experts in enumerate(own):
            kept = experts[:per_device]
            first = device * per_device
            flat[first : first + len(kept)] = kept
            free.extend(range(first + len(kept), first + per_device))
        # With half the mesh between them, an expert and its replica meet on no device.
        replicas = np.roll(np.arange(num_experts), -(num_experts // 2))
        stride = max(num_experts // max(num_redundant, 1), 1)
        flat[free] = replicas[::stride][: len(free)]
        slots = np.tile(flat, (num_layers, 1))
        return cls(slots, num_experts, num_devices, devices_per_node)

    @property
    def device_of_slot(self) -> np.ndarray:
        """[P] int, the device of each slot."""
        num_slots = self.slots.shape[1]
        return np.arange(num_slots) // (num_slots // self.num_devices)

    def after(self, moves: list[Move]) -> "Placement":
        """The placement once these copies are in use."""
        slots = self.slots.copy()
        for move in moves:
            slots[move.layer, move.target] = move.expert
        return Placement(slots, self.num_experts, self.num_devices, self.devices_per_node)


class LoadForecast:
    """Expected load of every expert in the next step, from the loads of past ones."""

    def __init__(self) -> None:
        self.mean: np.ndarray | None = None
        self._age = np.zeros(0)

    def observe(self, loads: np.ndarray) -> None:
        """Takes in the loads [L, E] of a step."""
        loads = loads.astype(np.float64)
        if self.mean is None:
            self.mean, self._age = loads, np.ones_like(loads)
            return
        # A count scatters by its root; the mean of `age` counts by that over the root of `age`.
        sigma = np.sqrt((np.maximum(loads, self.mean) + 1) * (1 + 1 / self._age))
        off = np.abs(loads - self.mean) / sigma
        age = np.minimum(self._age + 1, _MEMORY_MAX)
        age = np.where(off > _SHIFT_SIGMA, np.minimum(age, _SHIFT_MEMORY), age)
        self._age = np.where(off > _JUMP_SIGMA, 1, age)
        self.mean = self.mean + (loads - self.mean) / self._age


class ExpertBalancer:
    """Plans a bounded number of copies after every step.

    Args:
        placement: where experts lie at the start.
        copies_per_step: copies that one step may move in all layers together.
        copies_per_device: of them, how many one device may receive.
        balanced: a layer whose largest device load is at most this many times the mean is left
            alone.
        min_gain: the least drop of the squared relative excess that is worth one copy.
    """

    def __init__(
        self,
        placement: Placement,
        copies_per_step: int,
        copies_per_device: int = 1,
        balanced: float = 1.03,
        min_gain: float = 1e-3,
    ) -> None:
        self.placement = placement
        self.forecast = LoadForecast()
        self._copies_per_step = copies_per_step
        self._copies_per_device = copies_per_device
        self._balanced = balanced
        self._min_gain = min_gain
        self._recent: list[np.ndarray] = []

    def observe(self, loads: np.ndarray) -> None:
        """Takes in the loads of a step: [L, E], tokens of each logical expert."""
        self.forecast.observe(loads)
        self._recent = [*self._recent, loads.astype(np.float64)][-_RECENT_STEPS:]

    def plan(self) -> list[Move]:
        """The copies to make now; `placement` becomes the one after them.

        Copies of one plan do not depend on each other: a source is a slot as it is before any of
        them, so all may travel at once.
        """
        if self.forecast.mean is None:
            return []
        scenarios = np.stack([self.forecast.mean, *self._recent], axis=1)
        moves = _Moves(self.placement, self._copies_per_step, self._copies_per_device)
        layers = np.arange(len(scenarios))
        for _ in range(_ROUNDS):
            if not len(layers) or not moves.left:
                break
            judged = _Judged.of(scenarios[layers], moves.slots[layers], self.placement)
            worst = np.argsort(-judged.excess, kind="stable")[:_LAYERS_PER_ROUND]
            worst = worst[judged.excess[worst] > self._balanced]
            layers = self._relieve(layers[worst], judged.only(worst), moves)
        self._replace_idle(moves)
        self.placement = self.placement.after(moves.made)
        return moves.made

    def _relieve(self, layers: np.ndarray, judged: "_Judged", moves: "_Moves") -> np.ndarray:
        """One change in each layer that has a good one; returns those layers."""
        if not len(layers):
            return layers
        changes = judged.best_changes()
        changed = [
            layer
            for layer, gain, slot, other, is_exchange in zip(layers, *changes, strict=True)
            if gain >= self._min_gain
            and moves.make(layer, [(slot, other), (other, slot)][: 1 + is_exchange])
        ]
        return np.array(changed, np.int64)

    def _replace_idle(self, moves: "_Moves") -> None:
        """At most one per layer: the busiest expert is copied over the most idle replica."""
        assert self.forecast.mean is not None
        device = self.placement.device_of_slot
        for layer, (loads, slots) in enumerate(zip(self.forecast.mean, moves.slots, strict=True)):
            if not moves.left:
                return
            counts = np.bincount(slots, minlength=len(loads))
            per_replica = loads / counts
            busy = int(np.argmax(per_replica))
            without = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)[slots]
            held = np.flatnonzero(slots == busy)
            is_idle = without * _IDLE_RATIO < per_replica[busy]
            idle = np.flatnonzero(is_idle & ~np.isin(device, device[held]))
            for target in idle[np.argsort(without[idle], kind="stable")]:
                if moves.make(layer, [(int(held[0]), int(target))]):
                    break


class _Moves:
    """Copies collected within an allowance, and the slots [L, P] as they are with them."""

    def __init__(self, placement: Placement, copies_max: int, copies_per_device: int) -> None:
        self.made: list[Move] = []
        self.left = copies_max
        self.slots = placement.slots.copy()
        self._before = placement
        self._device = placement.device_of_slot
        self._free = np.full(placement.num_devices, copies_per_device)

    def make(self, layer: int, pairs: list[tuple[int, int]]) -> bool:
        """Copies slots onto others of a layer, all or none; False if it is not allowed.

        `pairs` are (slot, target). Each target changes once in a plan.
        """
        targets = [int(target) for _, target in pairs]
        before = self._before.slots[layer]
        is_untouched = all(self.slots[layer, t] == before[t] for t in targets)
        devices, needed = np.unique(self._device[targets], return_counts=True)
        if len(pairs) > self.left or not is_untouched or (self._free[devices] < needed).any():
            return False
        experts = [int(self.slots[layer, slot]) for slot, _ in pairs]
        after = self.slots[layer].copy()
        after[targets] = experts
        if not np.isin(before[targets], after).all():
            return False
        for expert, target in zip(experts, targets, strict=True):
            source = self._source(before, expert, target)
            self.made.append(Move(int(layer), source, target, expert))
            self.slots[layer, target] = expert
        self._free[devices] -= needed
        self.left -= len(pairs)
        return True

    def _source(self, before: np.ndarray, expert: int, target: int) -> int:
        """A slot that holds the expert already, on the node of `target` if one does."""
        holders = np.flatnonzero(before == expert)
        node = self._device // self._before.devices_per_node
        is_far = node[holders] != node[target]
        return int(holders[np.argmin(is_far)])


def _penalty(load: np.ndarray) -> np.ndarray:
    """What a device load, relative to the mean, adds to the imbalance."""
    return np.square(load - 1)


class _Changes(NamedTuple):
    """The best change of each layer: `slot` of its hottest device goes to slot `other`.

    `gain` [B] is per copy; `is_exchange` says whether `other` goes to `slot` in return.
    """

    gain: np.ndarray
    slot: np.ndarray
    other: np.ndarray
    is_exchange: np.ndarray


@dataclass(frozen=True)
class _Judged:
    """B layers under K scenarios, with loads relative to the mean device load.

    Attributes:
        placement: for its sizes only.
        slots: [B, P].
        slot_loads, device_loads: [B, K, P] and [B, K, D] float32.
    """

    placement: Placement
    slots: np.ndarray
    slot_loads: np.ndarray
    device_loads: np.ndarray

    @classmethod
    def of(cls, scenarios: np.ndarray, slots: np.ndarray, placement: Placement) -> "_Judged":
        """Shares out the tokens of `scenarios` [B, K, E]."""
        num_layers, num_scenarios, num_experts = scenarios.shape
        shared = share_tokens(
            scenarios.reshape(-1, num_experts),
            np.repeat(slots, num_scenarios, axis=0),
            placement.num_devices,
            iterations=_SHARE_ITERATIONS,
        )
        lead = (num_layers, num_scenarios, -1)
        devices = shared.of_device.reshape(lead)
        mean = np.maximum(devices.mean(2, keepdims=True), 1e-9)
        slot_loads = (shared.of_slot.reshape(lead) / mean).astype(np.float32)
        return cls(placement, slots, slot_loads, (devices / mean).astype(np.float32))

    def only(self, index: np.ndarray) -> "_Judged":
        """Some of the layers."""
        return _Judged(
            self.placement, self.slots[index], self.slot_loads[index], self.device_loads[index]
        )

    @property
    def excess(self) -> np.ndarray:
        """[B], largest device load over the mean, averaged over scenarios."""
        return self.device_loads.max(2).mean(1)

    def best_changes(self) -> _Changes:
        """For each layer, what lowers the imbalance most per copy.

        Considered are all pairs of a slot on the hottest device (the one with the largest penalty
        over all scenarios) and a slot elsewhere. Loads after a change are estimates: two devices
        settle what they share between them, and a replica's tokens go to the coldest other one.
        """
        num_layers, num_slots = self.slots.shape
        layer = np.arange(num_layers)
        device = self.placement.device_of_slot
        per_device = num_slots // self.placement.num_devices
        hot = _penalty(self.device_loads).sum(1).argmax(1)
        hot_slots = hot[:, None] * per_device + np.arange(per_device)
        hot_experts = np.take_along_axis(self.slots, hot_slots, axis=1)
        # All below are [B, K, C, P]: slots of the hottest device against all slots.
        given = np.take_along_axis(self.slot_loads, hot_slots[:, None], axis=2)[..., None]
        kept = self.slot_loads[:, :, None]
        top = self.device_loads[layer, :, hot][:, :, None, None]
        there = np.repeat(self.device_loads, per_device, axis=2)[:, :, None]
        now = _penalty(top) + _penalty(there)
        moved = np.clip((top - there + kept) / 2, 0, given)
        copy = now - _penalty(top - moved) - _penalty(there - kept + moved)
        moved = given - kept
        exchange = (now - _penalty(top - moved) - _penalty(there + moved)).mean(1) / 2
        # A device should not hold an expert twice.
        by_device = self.slots.reshape(num_layers, -1, per_device)
        has_given = (by_device[:, None, :, :] == hot_experts[:, :, None, None]).any(3)
        is_double = np.repeat(has_given, per_device, axis=2)
        is_held = (self.slots[:, :, None] == hot_experts[:, None]).any(2)[:, None]
        lost, is_only = self._loss_without()
        bonus = self._node_bonus(hot_experts)[..., device // self.placement.devices_per_node]
        copy = (copy.mean(1) - lost[:, None]) * bonus
        copy = np.where(is_double | is_only[:, None], -np.inf, copy).reshape(num_layers, -1)
        exchange = np.where(is_double | is_held, -np.inf, exchange).reshape(num_layers, -1)
        is_exchange = exchange.max(1) > copy.max(1)
        best = np.where(is_exchange, exchange.argmax(1), copy.argmax(1))
        gain = np.maximum(exchange.max(1), copy.max(1))
        slot = hot_slots[layer, best // num_slots]
        return _Changes(gain, slot, best % num_slots, is_exchange)

    def _loss_without(self) -> tuple[np.ndarray, np.ndarray]:
        """What the imbalance grows by if a slot is given up [B, P], and whether it is the only one
        of its expert."""
        num_layers, num_scenarios, num_slots = self.slot_loads.shape
        num_experts = self.placement.num_experts
        row = np.arange(num_layers * num_scenarios)[:, None]
        slots = np.repeat(self.slots, num_scenarios, axis=0)
        flat = slots + num_experts * row
        per_device = num_slots // self.placement.num_devices
        there = np.repeat(self.device_loads.reshape(len(row), -1), per_device, axis=1)
        coldest = np.full(len(row) * num_experts, np.inf, there.dtype)
        np.minimum.at(coldest, flat, there)
        is_coldest = there == coldest[flat]
        second = np.full_like(coldest, np.inf)
        np.minimum.at(second, flat[~is_coldest], there[~is_coldest])
        other = np.where(is_coldest, second[flat], coldest[flat])
        counts = np.bincount(flat.reshape(-1), minlength=len(coldest))[flat]
        # Equally loaded holders count as one above; any of them is as good.
        other = np.where(np.isinf(other), there, other)
        load = self.slot_loads.reshape(len(row), -1)
        loss = (_penalty(other + load) - _penalty(other)).reshape(self.slot_loads.shape)
        return loss.mean(1), counts.reshape(self.slot_loads.shape)[:, 0] < 2

    def _node_bonus(self, experts: np.ndarray) -> np.ndarray:
        """[B, C, nodes], factor of the gain of a replica of `experts` [B, C] on each node."""
        node_size = self.placement.devices_per_node
        per_node = node_size * self.slots.shape[1] // self.placement.num_devices
        num_nodes = -(-self.slots.shape[1] // per_node)
        has = np.zeros((*experts.shape, num_nodes), bool)
        for node in range(num_nodes):
            there = self.slots[:, node * per_node : (node + 1) * per_node]
            has[..., node] = (there[:, None] == experts[..., None]).any(2)
        return np.where(has, 1.0, _OTHER_NODE_BONUS)
