"""Goal: what is measured are full steps of every shape, at both ends of the context, that touch
nothing but padding.

Later, what is measured of a step is its own time and not that of the one before.

Method: a recorder of plans with a clock that moves as it is told. The steps of the real model are
timed in the tests of its executor.
"""

from collections import deque

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.cost import DecodeSample, PrefillSample
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.packing import pack
from serving.engine.step_times import (
    TimedExecutor,
    decode_samples,
    decode_step_ms,
    prefill_places,
    prefill_samples,
)
from tests.serving.scripted import ScriptedExecutor


class Recorder:
    """Each step takes a millisecond for each of its tokens; some take ten times as long."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.plans: list[StepPlan] = []
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        is_disturbed = len(self.plans) % 6 in (1, 3)
        self.now_ns += 1_000_000 * len(plan.token_ids) * (10 if is_disturbed else 1)
        return StepResult(plan.step_index, np.zeros(plan.num_rows, np.int32))


def test_decode_steps_are_full_and_disturbances_left_out() -> None:
    recorder = Recorder()
    buckets = [Bucket(3, 3, 2), Bucket(3, 8, 2)]
    times = decode_step_ms(recorder, buckets, lambda: recorder.now_ns)
    assert times == {buckets[0]: 3.0, buckets[1]: 8.0}
    plan = recorder.plans[-1]
    assert (plan.kind, plan.bucket) == (StepKind.DECODE, buckets[1])
    assert plan.num_tokens.tolist() == [3, 3, 2]


def test_decode_steps_are_measured_with_short_and_long_contexts() -> None:
    recorder = Recorder()
    samples = decode_samples(recorder, [Bucket(3, 3, 4)], 8, lambda: recorder.now_ns)
    assert samples == [DecodeSample(3, 3.0, 3.0), DecodeSample(3, 3.0 + 3 * 29, 3.0)]
    assert recorder.plans[-1].starts.tolist() == [29, 29, 29]


def test_prefill_steps_are_measured_at_both_ends_of_the_context() -> None:
    recorder = Recorder()
    buckets = [Bucket(2, 16, 2), Bucket(2, 8, 4)]
    samples = prefill_samples(recorder, buckets, 8, lambda: recorder.now_ns)
    assert samples == [
        PrefillSample(16, 128.0, 16.0),
        PrefillSample(8, 32.0, 8.0),
        PrefillSample(8, 8 * 24 + 32.0, 8.0),
    ]
    assert [counts for *_, counts in prefill_places(buckets, 8)] == [
        (sample.num_tokens, sample.num_pairs) for sample in samples
    ]
    assert {(int(p.starts[0]), p.num_rows) for p in recorder.plans} == {(0, 1), (24, 1)}


def test_only_padding_is_written() -> None:
    recorder = Recorder()
    decode_step_ms(recorder, [Bucket(3, 8, 2)], lambda: recorder.now_ns)
    prefill_samples(recorder, [Bucket(2, 8, 4)], 8, lambda: recorder.now_ns)
    for plan in recorder.plans:
        packed = pack(plan)
        assert packed.num_tokens_total == plan.bucket.num_tokens
        assert not packed.slots.any() and not packed.block_tables.any()


def test_a_step_counts_from_its_dispatch_or_from_the_end_of_the_one_before() -> None:
    times = iter([0, 1_000_000, 5_000_000, 8_000_000, 20_000_000, 21_500_000])
    timed = TimedExecutor(ScriptedExecutor(lambda position: position), lambda: next(times))
    recorder = Recorder()
    decode_step_ms(recorder, [Bucket(1, 1, 1)], lambda: 0)
    plan = recorder.plans[0]
    # Two in flight: dispatched at 0 and 1 ms, over at 5 and 8 ms. Then one alone.
    timed.submit(plan)
    timed.submit(plan)
    assert [timed.collect().elapsed_ms for _ in range(2)] == [5.0, 3.0]
    timed.submit(plan)
    assert timed.collect().elapsed_ms == 1.5
