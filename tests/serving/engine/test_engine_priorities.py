"""Goal: urgent requests are served first and take memory from others, which lose no token by it
and are served after a bounded number of more urgent ones.

Method: the simulated device, small pools, and a stream of urgent requests that never ends.
"""

import dataclasses

import pytest

from serving.core.request import PRIORITY_MAX, Request, RequestError, SamplingParams
from serving.core.waiting_queue import OUTRANKED_MAX
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_limits,
)
from tests.serving.engine.prompts import prompt_of

LONG = SamplingParams(max_tokens=30, temperature=0, seed=3, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0, seed=3, ignore_eos=True)


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_waiting_requests_start_by_priority(in_flight_max: int) -> None:
    limits = make_limits(num_slots=2, in_flight_max=in_flight_max)
    checked = CheckedEngine(limits, BUCKETS)
    for salt, priority in enumerate((0, 5, -2, 0, -2)):
        checked.admit(prompt_of(4, salt), SHORT, priority=priority)
    checked.drain()
    order = [f"request-{number}" for number in (2, 4, 0, 3, 1)]
    assert list(checked.reasons) == order


@pytest.mark.parametrize("priority", [0, -PRIORITY_MAX])
def test_a_tenant_with_many_requests_keeps_no_other_waiting_for_all_of_them(priority: int) -> None:
    checked = CheckedEngine(make_limits(num_slots=3, in_flight_max=2), BUCKETS)
    for salt in range(8):
        # Rows become free one at a time.
        sampling = dataclasses.replace(SHORT, max_tokens=4 + salt % 2 * 2)
        checked.admit(prompt_of(4, salt), sampling, priority=priority, owner="many")
    for _ in range(2):
        checked.step()
    few = [checked.admit(prompt_of(4, 8 + salt), SHORT, owner="few") for salt in range(2)]
    checked.drain()
    order = list(checked.reasons)
    # Two run already; then each tenant has one of the two rows.
    assert order.index(few[0]) <= 2 and order.index(few[1]) <= 4


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_an_urgent_request_takes_the_place_of_another_which_goes_on_later(
    in_flight_max: int,
) -> None:
    limits = make_limits(num_slots=3, in_flight_max=in_flight_max)
    checked = CheckedEngine(limits, BUCKETS)
    lows = [checked.admit(prompt_of(4, salt), LONG, priority=1) for salt in range(2)]
    for _ in range(12):
        checked.step()
    equal = checked.admit(prompt_of(4, 2), SHORT, priority=1)
    urgent = checked.admit(prompt_of(4, 3), SHORT)
    while urgent not in checked.reasons:
        checked.step()
    assert checked.engine.status().num_preemptions == 1
    num_before = len(checked.outputs[lows[1]])
    assert num_before > 3
    # The preempted one goes on before its equal, which had come before it was preempted.
    while not checked.outputs[equal]:
        checked.step()
    assert len(checked.outputs[lows[1]]) > num_before
    checked.drain()


def test_growth_takes_memory_from_lower_priorities_although_they_are_older() -> None:
    checked = CheckedEngine(make_limits(num_blocks=13, num_slots=4), BUCKETS)
    low = checked.admit(prompt_of(4), LONG, priority=7)
    urgent = [checked.admit(prompt_of(4, salt), LONG, priority=-7) for salt in (1, 2)]
    checked.drain()
    assert checked.engine.status().num_preemptions > 0
    assert list(checked.reasons) == [*urgent, low]


def test_a_low_priority_is_served_after_a_bounded_number_of_urgent_ones() -> None:
    checked = CheckedEngine(make_limits(num_slots=2), BUCKETS)
    lows = [checked.admit(prompt_of(4, salt), SHORT, priority=9) for salt in range(2)]
    num_urgent: dict[str, int] = {}
    names: list[str] = []
    while len(num_urgent) < len(lows):
        # Two always wait, so nothing else would ever start.
        while len(checked.engine._waiting) < len(lows) - len(num_urgent) + 2:
            names.append(checked.admit(prompt_of(5, len(names)), SHORT))
        checked.step()
        for low in lows:
            if low in checked.reasons and low not in num_urgent:
                num_urgent[low] = sum(name in checked.reasons for name in names)
    assert list(num_urgent) == lows
    for place, count in enumerate(num_urgent.values(), 1):
        assert count <= place * OUTRANKED_MAX
    checked.drain()


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_a_tenant_cannot_take_the_memory_of_another(in_flight_max: int) -> None:
    """Neither by many requests nor by urgent ones; alone, the first tenant would keep all of it."""
    limits = make_limits(num_blocks=13, num_slots=5, in_flight_max=in_flight_max)
    checked = CheckedEngine(limits, BUCKETS)
    for salt in range(3):
        checked.admit(prompt_of(4, salt), LONG, owner="greedy")
    modest = checked.admit(prompt_of(4, 3), LONG, priority=5, owner="modest")
    while not checked.outputs[modest]:
        checked.step()
    checked.admit(prompt_of(4, 4), LONG, priority=-9, owner="greedy")
    preempted: set[str] = set()
    while modest not in checked.reasons:
        checked.step()
        waiting = checked.engine._waiting
        preempted |= {one.request.request_id for one in waiting if one.num_preemptions}
    assert preempted and modest not in preempted
    checked.drain()


def test_priorities_have_a_range() -> None:
    for priority in (-PRIORITY_MAX - 1, PRIORITY_MAX + 1):
        with pytest.raises(RequestError, match=f"priority is {priority}; expected") as caught:
            Request("r", (1,), SHORT, priority=priority)
        assert caught.value.param == "priority"
