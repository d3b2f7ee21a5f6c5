"""Goal: steps planned before the results of earlier ones are known give the tokens that steps
planned one by one give, at the cost of at most one row per finished request.

Method: the same random requests, aborts included, through engines that differ only in the number
of steps in flight; rows whose result is dropped are counted.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.buckets import StepKind
from serving.core.request import FinishReason, SamplingParams
from serving.core.step_plan import LAST_SAMPLED
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_buckets,
    make_limits,
    step_on,
)
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import VOCAB_SIZE

DRAFT_BUCKETS = make_buckets(
    prefill=[(4, 8, 16), (4, 16, 16)], decode=[(1, 6, 16), (2, 2, 16), (2, 8, 16), (6, 9, 16)]
)
LONG = SamplingParams(max_tokens=20, temperature=0, seed=3, ignore_eos=True)


def play(
    seed: int, in_flight_max: int, num_drafts: int = 0, num_requests: int = 12
) -> CheckedEngine:
    """Requests of all kinds arrive at steps that depend on the seed alone; some are aborted."""
    source = random.Random(seed)
    limits = make_limits(
        num_blocks=source.randint(6, 20),
        num_slots=source.randint(2, 6),
        context_max=source.choice([12, 24]),
        num_snapshots=source.choice([0, 3, 9]),
        in_flight_max=in_flight_max,
        num_drafts=num_drafts,
    )
    checked = CheckedEngine(limits, DRAFT_BUCKETS if num_drafts else BUCKETS)
    for _ in range(num_requests):
        length = source.randint(1, min(14, checked.length_max - 1))
        sampling = SamplingParams(
            max_tokens=source.randint(1, 12),
            temperature=source.choice([0.0, 0.7]),
            seed=source.choice([None, 5]),
            stop_token_ids=tuple(source.sample(range(VOCAB_SIZE), source.randint(0, 3))),
            ignore_eos=source.random() < 0.5,
        )
        prompt, priority = prompt_of(length, source.randint(0, 2)), source.choice([0, 0, 3, -3])
        owner = source.choice(["", "", "a", "b"])
        name = checked.admit(prompt, sampling, priority=priority, owner=owner)
        step_on(checked, source, name, 4, abort_share=0.15)
    checked.drain()
    return checked


traces = given(
    seed=st.integers(0, 2**32),
    in_flight_max=st.sampled_from([1, 2, 2, 3]),
    num_drafts=st.sampled_from([0, 1, 5]),
)


@settings(max_examples=200)
@traces
def test_tokens_are_those_of_the_synchronous_engine(
    seed: int, in_flight_max: int, num_drafts: int
) -> None:
    check_equal(seed, in_flight_max, num_drafts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4000)
@traces
def test_tokens_are_those_of_the_synchronous_engine_in_thousands_of_traces(
    seed: int, in_flight_max: int, num_drafts: int
) -> None:
    check_equal(seed, in_flight_max, num_drafts)


def check_equal(seed: int, in_flight_max: int, num_drafts: int) -> None:
    """The same requests through both engines end alike."""
    together, alone = play(seed, in_flight_max, num_drafts), play(seed, 1)
    assert together.outputs.keys() == alone.outputs.keys()
    for name, tokens in alone.outputs.items():
        reasons = (alone.reasons[name], together.reasons[name])
        if FinishReason.ABORT not in reasons:
            assert together.outputs[name] == tokens
            assert reasons[0] is reasons[1]


def test_tokens_are_fed_before_they_are_known() -> None:
    checked = CheckedEngine(make_limits(in_flight_max=2), BUCKETS)
    checked.admit(prompt_of(3), LONG)
    kinds = []
    for _ in range(2):
        plan = checked.plan()
        assert plan is not None
        kinds.append(plan.kind)
    # The prompt has not come back, and its first token is fed already.
    assert kinds == [StepKind.PREFILL, StepKind.DECODE]
    assert plan.token_ids.tolist() == [LAST_SAMPLED]
    assert plan.starts.tolist() == [3]
    assert checked.plan() is None, "two steps are in flight"
    checked.drain()
    assert checked.device.num_references == 19


def test_with_one_step_in_flight_every_token_is_known() -> None:
    checked = CheckedEngine(make_limits(in_flight_max=1), BUCKETS)
    checked.admit(prompt_of(3), LONG)
    checked.drain()
    assert checked.device.num_references == 0


@pytest.mark.parametrize(("in_flight_max", "num_wasted"), [(1, 0), (2, 1), (3, 2)])
def test_a_request_ended_by_a_token_wastes_a_row_for_each_further_step_in_flight(
    in_flight_max: int, num_wasted: int
) -> None:
    free = CheckedEngine(make_limits(), BUCKETS)
    name = free.admit(prompt_of(9), LONG)
    free.drain()
    tokens = free.outputs[name]
    stop = next(token for token in tokens[5:] if tokens.index(token) >= 5)
    sampling = SamplingParams(20, 0, seed=3, stop_token_ids=(stop,), ignore_eos=True)
    checked = CheckedEngine(make_limits(in_flight_max=in_flight_max), BUCKETS)
    name = checked.admit(prompt_of(9), sampling)
    checked.drain()
    assert checked.reasons[name] is FinishReason.STOP
    num_output = len(checked.outputs[name])
    assert checked.num_computed_tokens == 9 + num_output - 1 + num_wasted


@pytest.mark.parametrize("in_flight_max", [1, 2, 3])
def test_a_request_ended_by_its_length_wastes_nothing(in_flight_max: int) -> None:
    checked = CheckedEngine(make_limits(context_max=32, in_flight_max=in_flight_max), BUCKETS)
    checked.admit(prompt_of(9), LONG)
    checked.admit(prompt_of(30), SamplingParams(50, 0, ignore_eos=True))
    checked.admit(prompt_of(5), SamplingParams(1, 0, ignore_eos=True))
    checked.drain()
    assert checked.num_computed_tokens == (9 + 19) + (30 + 1) + 5


def test_memory_of_a_finished_request_is_kept_until_its_wasted_row_is_over() -> None:
    free = CheckedEngine(make_limits(), BUCKETS)
    name = free.admit(prompt_of(4), LONG)
    free.drain()
    stop = free.outputs[name][0]
    checked = CheckedEngine(make_limits(in_flight_max=2), BUCKETS)
    sampling = SamplingParams(20, 0, seed=3, stop_token_ids=(stop,), ignore_eos=True)
    name = checked.admit(prompt_of(4), sampling)
    while checked.plan() is not None:
        pass
    checked.commit()
    assert checked.reasons[name] is FinishReason.STOP
    status = checked.engine.status()
    assert status.num_running == 0
    assert (status.num_free_slots, status.num_free_blocks) == (3, 62)
    checked.commit()
    assert checked.engine.status().num_free_blocks == 64


def test_steps_follow_each_other_without_a_gap_in_a_steady_state() -> None:
    """After each commit one more step can be planned, so that two are always in flight."""
    checked = CheckedEngine(make_limits(in_flight_max=2), BUCKETS)
    for salt in range(3):
        checked.admit(prompt_of(4, salt), LONG)
    while checked.plan() is not None:
        pass
    for _ in range(17):
        assert checked.engine.status().num_steps_in_flight == 2
        checked.commit()
        plan = checked.plan()
        assert plan is not None
        assert plan.num_rows == 3
        np.testing.assert_array_equal(plan.token_ids, [LAST_SAMPLED] * 3)
    checked.drain()
