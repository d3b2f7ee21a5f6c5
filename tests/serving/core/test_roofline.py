"""Step times worked out by hand for round numbers: which part bounds a step, what micro-batches and
imbalance change, how much a device sends, and costs between two known contexts."""

from dataclasses import replace

import pytest

from serving.core.roofline import ContextCost, Layout, ModelCosts, PhaseCosts, StepRoofline
from sharding.hardware import Hardware

_PHASE = PhaseCosts(
    fp8_flops=1e9,
    bf16_flops=0.0,
    expert_flops=1e9,
    num_moe_layers=10,
    attention=(ContextCost(0, 0, 0), ContextCost(1000, 1e8, 1000), ContextCost(3000, 1e8, 2000)),
)
_COSTS = ModelCosts(
    decode=_PHASE,
    prefill=_PHASE,
    num_experts=8,
    num_experts_per_token=2,
    expert_bytes=1e6,
    dense_bytes=1e9,
    dispatch_bytes=100.0,
    combine_bytes=200.0,
    engram_bytes=1000.0,
    cache_bytes_per_token=10.0,
)
_HARDWARE = Hardware("round", 1e11, 1e12, 1e15, 5e14, 1e11, 1e10, 1e9, devices_per_node=2)
_ALONE = StepRoofline(_COSTS, Layout(num_expert_devices=1, expert_slots=8), _HARDWARE)


def test_a_small_step_is_bound_by_reading_weights() -> None:
    step = _ALONE.decode(1, 0)
    # A quarter of eight experts in ten layers, beside the dense weights.
    assert step.memory_s == pytest.approx((1e9 + 10 * 8 * 0.25 * 1e6) / 1e12)
    assert step.compute_s == pytest.approx(2e9 / 1e15)
    assert (step.total_s, step.bound_by) == (step.memory_s, "memory")
    assert step.sent_bytes == step.communication_s == 0


def test_a_large_step_is_bound_by_computing() -> None:
    step = _ALONE.decode(10_000, 1000)
    assert step.compute_s == pytest.approx(10_000 * (2e9 / 1e15 + 1e8 / 5e14))
    assert step.memory_s == pytest.approx((1e9 + 80e6 + 10_000 * 1000) / 1e12)
    assert (step.total_s, step.bound_by) == (step.compute_s, "compute")


def test_costs_between_known_contexts_are_linear_and_end_at_the_last() -> None:
    assert _PHASE.at(2000).read_bytes == 1500
    assert _PHASE.at(1000).read_bytes == 1000
    assert _PHASE.at(9000) == _PHASE.attention[-1]


def test_a_token_reaches_each_device_once_and_the_slower_link_counts() -> None:
    layout = Layout(num_expert_devices=4, expert_slots=2, num_engram_devices=4)
    step = StepRoofline(_COSTS, layout, _HARDWARE).decode(8, 0)
    # Two experts lie on 4 (1 - 9/16) devices on average: a quarter of them is the own one.
    per_device = 8 * 10 * (4 * 7 / 16) * 300 / 4 + 8 * 1000 / 4
    assert step.sent_bytes == pytest.approx(3 * per_device)
    # One of the others is in the node of two, and two are reached by the network.
    assert step.communication_s == pytest.approx(2 * per_device / 1e10)


def test_micro_batches_hide_the_exchange_and_read_weights_twice() -> None:
    layout = Layout(num_expert_devices=4, expert_slots=2)
    one = StepRoofline(_COSTS, layout, _HARDWARE).decode(1e6, 0)
    two = StepRoofline(_COSTS, replace(layout, micro_batches=2), _HARDWARE).decode(1e6, 0)
    assert one.total_s == pytest.approx(max(one.compute_s, one.memory_s) + one.communication_s)
    assert two.total_s == pytest.approx(max(two.compute_s, two.communication_s))
    assert two.memory_s == pytest.approx(2 * one.memory_s)


def test_imbalance_slows_experts_only() -> None:
    layout = replace(_ALONE.layout, moe_lb=1.5)
    assert StepRoofline(_COSTS, layout, _HARDWARE).decode(1, 0).compute_s == pytest.approx(
        (1e9 + 1.5e9) / 1e15
    )


def test_rows_from_the_host_pass_its_link() -> None:
    layout = replace(_ALONE.layout, is_engram_on_host=True)
    step = StepRoofline(_COSTS, layout, _HARDWARE).decode(100, 0)
    assert step.communication_s == pytest.approx(100 * 1000 / 1e9)


def test_devices_that_share_a_prompt_see_all_of_it_and_exchange_what_they_make() -> None:
    layout = replace(_ALONE.layout, num_context_devices=2)
    shared = StepRoofline(_COSTS, layout, _HARDWARE).prefill(500, 1500)
    assert shared.sent_bytes == pytest.approx(500 * 10)
    # The mean token of the chunk of 1,000 stands at position 2,000.
    alone = _ALONE.prefill(500, 1750)
    assert shared.compute_s == pytest.approx(alone.compute_s)
    assert shared.memory_s == pytest.approx((1e9 + 80e6 + 500 * 1500 / 64) / 1e12)
