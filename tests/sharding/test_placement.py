"""The balancer: copies stay within their bounds and leave every expert somewhere; loads that do not
change come to rest in balance; a new hot expert is met; sources stay near. Small meshes, fixed
seeds, and counts checked by hand."""

import re

import numpy as np
import pytest

from sharding.placement import ExpertBalancer, LoadForecast, Move, Placement
from sharding.plan import ShardingError
from sharding.replica_choice import moe_lb, share_tokens

_LAYERS, _EXPERTS, _DEVICES, _REDUNDANT = 2, 24, 8, 8


def _start() -> Placement:
    return Placement.spread(_LAYERS, _EXPERTS, _DEVICES, _REDUNDANT, devices_per_node=4)


def _skewed(rng: np.random.Generator) -> np.ndarray:
    popularity = (rng.permuted(np.tile(np.arange(_EXPERTS), (_LAYERS, 1)), axis=1) + 1.0) ** -0.9
    return popularity / popularity.sum(1, keepdims=True)


def _loads(popularity: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.stack([rng.multinomial(4000, row) for row in popularity])


def _imbalance(loads: np.ndarray, placement: Placement) -> float:
    return moe_lb(share_tokens(loads, placement.slots, _DEVICES).of_device)


def _num_received(moves: list[Move], placement: Placement) -> np.ndarray:
    devices = placement.device_of_slot[[move.target for move in moves]]
    return np.bincount(devices, minlength=_DEVICES)


def _num_doubles(placement: Placement) -> int:
    """Replicas that lie on a device that has the same expert in another slot."""
    by_device = placement.slots.reshape(_LAYERS * _DEVICES, -1)
    return sum(len(row) - len(set(row)) for row in by_device.tolist())


def test_spread_gives_every_device_as_many_replicas_of_others() -> None:
    placement = _start()
    assert placement.slots[0].tolist()[:8] == [0, 1, 2, 12, 3, 4, 5, 15]
    assert _num_doubles(placement) == 0
    assert Placement.spread(1, 8, 4, 0).slots.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_experts_need_not_divide_where_redundant_ones_fill_up() -> None:
    placement = Placement.spread(1, 10, 4, 2)
    assert len(placement.slots[0]) == 12
    assert set(placement.slots[0].tolist()) == set(range(10))


def test_sizes_that_cannot_be_placed_are_refused() -> None:
    with pytest.raises(ShardingError, match="24 experts and 3 redundant ones on 8 devices"):
        Placement.spread(1, 24, 8, 3)
    with pytest.raises(ShardingError, match="at most one replica of each"):
        Placement.spread(1, 4, 4, 8)
    with pytest.raises(ShardingError, match="5 expert slots do not divide among 2"):
        Placement(np.array([[0, 1, 2, 3, 0]]), 4, 2)
    with pytest.raises(ShardingError, match=re.escape("layer 1: expert 3 has no slot")):
        Placement(np.array([[0, 1, 2, 3], [0, 1, 2, 2]]), 4, 2)


def test_loads_that_do_not_change_come_to_rest_in_balance(rng: np.random.Generator) -> None:
    popularity = _skewed(rng)
    balancer = ExpertBalancer(_start(), copies_per_step=4)
    moved: list[int] = []
    for _ in range(60):
        balancer.observe(_loads(popularity, rng))
        moved.append(len(balancer.plan()))
    fresh = [_loads(popularity, rng) for _ in range(10)]
    before = np.mean([_imbalance(loads, _start()) for loads in fresh])
    after = np.mean([_imbalance(loads, balancer.placement) for loads in fresh])
    assert before > 1.2
    assert after < 1.06
    assert sum(moved[-10:]) <= 4 < sum(moved)
    assert _num_doubles(balancer.placement) == 0


def test_a_plan_moves_no_more_than_it_may(rng: np.random.Generator) -> None:
    balancer = ExpertBalancer(_start(), copies_per_step=3, copies_per_device=1)
    for _ in range(20):
        before = balancer.placement
        # Loads that differ in every step, so that there is always something to do.
        balancer.observe(_loads(_skewed(rng), rng))
        moves = balancer.plan()
        assert len(moves) <= 3
        assert _num_received(moves, before).max() <= 1
        for move in moves:
            assert before.slots[move.layer, move.source] == move.expert
            assert before.slots[move.layer, move.target] != move.expert
        # Its own check, made by every placement, is that each expert keeps a slot.
        assert np.array_equal(before.after(moves).slots, balancer.placement.slots)


def test_a_new_hot_expert_gets_replicas_within_a_few_steps(rng: np.random.Generator) -> None:
    even = np.full((_LAYERS, _EXPERTS), 1 / _EXPERTS)
    hot = even.copy()
    hot[:, 5] = 8 / _EXPERTS
    hot /= hot.sum(1, keepdims=True)
    balancer = ExpertBalancer(_start(), copies_per_step=8)
    for step in range(20):
        balancer.observe(_loads(even if step < 10 else hot, rng))
        balancer.plan()
    assert ((balancer.placement.slots == 5).sum(1) >= 2).all()
    loads = _loads(hot, rng)
    assert _imbalance(loads, balancer.placement) < 0.7 * _imbalance(loads, _start())


def test_nothing_is_moved_in_balance_or_before_any_load_is_known() -> None:
    balancer = ExpertBalancer(_start(), copies_per_step=8)
    assert balancer.plan() == []
    for _ in range(3):
        balancer.observe(np.full((_LAYERS, _EXPERTS), 100))
        assert balancer.plan() == []


def test_a_copy_comes_from_the_same_node_where_one_is_there(rng: np.random.Generator) -> None:
    balancer = ExpertBalancer(_start(), copies_per_step=8)
    num_near = 0
    for _ in range(30):
        before = balancer.placement
        balancer.observe(_loads(_skewed(rng), rng))
        node = before.device_of_slot // before.devices_per_node
        for move in balancer.plan():
            holders = np.flatnonzero(before.slots[move.layer] == move.expert)
            if node[move.target] in node[holders]:
                assert node[move.source] == node[move.target]
                num_near += 1
    assert num_near


def test_experts_that_are_hot_together_are_kept_apart() -> None:
    # Experts 0 and 1 share a device, and are hot in the same steps; 2 to 5 take turns.
    placement = Placement(np.array([[0, 1, 2, 3, 4, 5]]), 6, 3)
    quiet, busy = [10, 10, 70, 70, 70, 70], [100, 100, 25, 25, 25, 25]
    balancer = ExpertBalancer(placement, copies_per_step=4, copies_per_device=4)
    for step in range(12):
        balancer.observe(np.array([busy if step % 2 else quiet]))
        balancer.plan()
    device = dict(zip(balancer.placement.slots[0].tolist(), placement.device_of_slot, strict=True))
    assert device[0] != device[1]


def test_the_forecast_averages_noise_and_follows_jumps(rng: np.random.Generator) -> None:
    forecast = LoadForecast()
    for _ in range(50):
        forecast.observe(rng.poisson(400, (1, 200)))
    assert forecast.mean is not None
    # The mean of 50 counts scatters by 2.8; of single ones by 20.
    assert float(np.std(forecast.mean)) < 10
    forecast.observe(rng.poisson(800, (1, 200)))
    assert float(np.mean(forecast.mean)) > 780
