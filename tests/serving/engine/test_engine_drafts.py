"""Goal: drafts make steps fewer and change no token, and what became of them is counted.

Method: the simulated device, whose drafts are right four times of five, and the counts of steps
and tokens beside those of an engine without drafts; random traces are in the tests of
asynchronous steps.
"""

import dataclasses
import random

import numpy as np
import pytest

from serving.core.request import FinishReason, SamplingParams
from serving.core.step_plan import StepResult
from serving.engine.engine import Engine
from tests.serving.engine.checked_engine import (
    CheckedEngine,
    make_buckets,
    make_limits,
)
from tests.serving.engine.prompts import prompt_of

BUCKETS = make_buckets(prefill=[(4, 16, 16)], decode=[(4, 4, 16), (4, 12, 16), (4, 24, 16)])
LONG = SamplingParams(max_tokens=40, temperature=0, seed=3, ignore_eos=True)


def run(num_drafts: int, in_flight_max: int = 1, num_snapshots: int = 0) -> CheckedEngine:
    limits = make_limits(
        num_drafts=num_drafts, in_flight_max=in_flight_max, num_snapshots=num_snapshots
    )
    checked = CheckedEngine(limits, BUCKETS)
    for salt in range(3):
        checked.admit(prompt_of(5, salt), LONG)
    checked.drain()
    return checked


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_steps_are_fewer_and_tokens_the_same(in_flight_max: int) -> None:
    plain, drafting = run(0), run(5, in_flight_max)
    assert drafting.outputs == plain.outputs
    assert drafting.engine.status().num_steps * 2 < plain.engine.status().num_steps


def test_acceptance_is_counted_by_place() -> None:
    status = run(5).engine.status()
    verified, accepted = np.array(status.num_verified), np.array(status.num_accepted)
    assert (accepted <= verified).all()
    assert (np.diff(verified) <= 0).all() and (np.diff(accepted) < 0).all()
    # Each is right four times of five, if all before it were.
    assert accepted[0] / verified[0] == pytest.approx(0.8, abs=0.1)
    assert accepted[4] / verified[4] == pytest.approx(0.8**5, abs=0.15)
    # Every decode step of a row gives one token more than it accepts.
    assert run(0).engine.status().num_verified == ()


def test_a_stop_token_ends_a_sequence_in_the_middle_of_a_step() -> None:
    free = run(0)
    tokens = free.outputs["request-0"]
    stop = next(token for token in tokens if tokens.index(token) > 3)
    ends = []
    for num_drafts in (0, 5):
        checked = CheckedEngine(make_limits(num_drafts=num_drafts), BUCKETS)
        sampling = SamplingParams(40, 0, seed=3, stop_token_ids=(stop,), ignore_eos=True)
        name = checked.admit(prompt_of(5), sampling)
        checked.drain()
        assert checked.reasons[name] is FinishReason.STOP
        assert checked.outputs[name][-1] == stop
        ends.append(checked.outputs[name])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_generated_prefixes_are_shared_although_steps_pass_their_ends(in_flight_max: int) -> None:
    limits = make_limits(num_drafts=5, in_flight_max=in_flight_max, num_snapshots=6)
    checked = CheckedEngine(limits, BUCKETS)
    prompt = prompt_of(6)
    first = checked.admit(prompt, SamplingParams(30, 0, seed=3, ignore_eos=True))
    checked.drain()
    again = checked.admit([*prompt, *checked.outputs[first], 1, 2, 3], LONG)
    checked.drain()
    # 36 tokens and eight whole blocks computed; the last boundary may lie behind an early end.
    assert checked.num_cached[again] in (28, 32)


def test_measured_times_decide_how_many_drafts_are_verified() -> None:
    num_verified = []
    for slow in (1.0, 100.0):
        limits = make_limits(num_drafts=5)
        checked = CheckedEngine(limits, BUCKETS)
        step_ms = {bucket: 1.0 for _, bucket in BUCKETS}
        for bucket in list(step_ms):
            if bucket.num_tokens > 4:
                step_ms[bucket] = slow
        checked.engine = Engine(limits, BUCKETS, random.Random(5), step_ms)
        checked.admit(prompt_of(5), LONG)
        checked.drain()
        num_verified.append(checked.engine.status().num_verified)
    assert num_verified[0][4] > 0
    # One row leaves room for three drafts in the step of four tokens, which costs the same.
    assert num_verified[1][2] > 0
    assert num_verified[1][3:] == (0, 0)


def test_times_of_running_steps_correct_the_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = make_limits(num_drafts=5)
    checked = CheckedEngine(limits, BUCKETS)
    step_ms = {bucket: 1.0 for _, bucket in BUCKETS}
    checked.engine = Engine(limits, BUCKETS, random.Random(5), step_ms)
    collect = checked.device.collect
    monkeypatch.setattr(
        checked.device, "collect", lambda: dataclasses.replace(collect(), elapsed_ms=1000.0)
    )
    for salt in range(9):
        checked.admit(prompt_of(5, salt), LONG)
        if salt % 3 == 2:
            checked.drain()
    first = checked.engine.status()
    assert first.num_verified[4] > 0 and first.slope_ms > 40
    checked.admit(prompt_of(5, 4), LONG)
    checked.drain()
    # Now a larger step costs as much more as it is larger, so only a full small one is worth it.
    last = checked.engine.status()
    assert last.num_verified[2] > first.num_verified[2]
    assert last.num_verified[3:] == first.num_verified[3:]


def test_results_must_have_room_for_drafts() -> None:
    checked = CheckedEngine(make_limits(num_drafts=5), BUCKETS)
    checked.admit(prompt_of(5), LONG)
    assert checked.engine.plan() is not None
    with pytest.raises(ValueError, match=r"shape \(1,\); expected \(1, 6\)"):
        checked.engine.commit(StepResult(0, np.ones(1, np.int32)))
