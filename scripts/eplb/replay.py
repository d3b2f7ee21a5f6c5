"""Policies of expert placement, scored on a stream of step loads.

All policies see the first half of the steps and are scored on the second. One that plans once does
so at half time. The balancer plans after every step, and what it plans after step t is in use from
step t + 2 on: the weights travel during step t + 1.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scripts.eplb.greedy import evenly_shared, greedy_placement, num_moved
from sharding.placement import ExpertBalancer, Placement
from sharding.replica_choice import moe_lb, share_tokens, whole_tokens


class Sizes(NamedTuple):
    """Devices, redundant expert slots per layer, and copies that a step may move in all layers."""

    num_devices: int
    num_redundant: int
    copies_per_step: int


class Score(NamedTuple):
    """Figures of one load set.

    Attributes:
        moe_lb_none: every expert once, in order.
        moe_lb_deepseek, moved_deepseek: the greedy baseline, planned once; share of all copies
            that this moved.
        moe_lb_ours: the balancer, with tokens shared out in every step.
        copies_moved_per_step: mean over the scored steps; `_max` over all steps.
        plan_s: seconds of the longest plan.
    """

    moe_lb_none: float
    moe_lb_deepseek: float
    moved_deepseek: float
    moe_lb_ours: float
    copies_moved_per_step: float
    copies_moved_per_step_max: int
    plan_s: float


def score(loads: Iterable[np.ndarray], num_steps: int, sizes: Sizes) -> Score:
    """Runs all policies over `num_steps` steps of loads [L, E]."""
    steps = iter(loads)
    first = next(steps)
    num_layers, num_experts = first.shape
    plain = Placement.spread(num_layers, num_experts, sizes.num_devices, 0)
    start = Placement.spread(num_layers, num_experts, sizes.num_devices, sizes.num_redundant)
    balancer = ExpertBalancer(start, sizes.copies_per_step)
    in_use, arriving = start, start
    fresh: Placement | None = None
    seen, moved, plan_s = np.zeros(first.shape), [], []
    none, deepseek, ours = [], [], []
    for index, step in enumerate([first, *steps]):
        if index == num_steps // 2:
            fresh = greedy_placement(seen, sizes.num_devices, sizes.num_redundant)
        if fresh is not None:
            none.append(evenly_shared(step, plain))
            deepseek.append(evenly_shared(step, fresh))
            ours.append(_shared_in_whole_tokens(step, in_use))
        seen += step
        balancer.observe(step)
        begun = time.thread_time()
        moved.append(len(balancer.plan()))
        plan_s.append(time.thread_time() - begun)
        in_use, arriving = arriving, balancer.placement
    assert fresh is not None, num_steps
    return Score(
        moe_lb(np.stack(none)),
        moe_lb(np.stack(deepseek)),
        num_moved(start, fresh) / start.slots.size,
        moe_lb(np.stack(ours)),
        float(np.mean(moved[num_steps // 2 :])),
        max(moved),
        max(plan_s),
    )


def _shared_in_whole_tokens(loads: np.ndarray, placement: Placement) -> np.ndarray:
    shared = share_tokens(loads, placement.slots, placement.num_devices)
    whole = whole_tokens(shared.of_slot, placement.slots)
    return whole.reshape(len(loads), placement.num_devices, -1).sum(2)
