"""Measures how long compiled steps take, before the first request and while they run.

Before it, steps are full, and their rows lie in the padding slot and the padding block, where every
step may write, so nothing that matters is touched.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.cost import DecodeSample, PrefillSample, num_pairs
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.engine import Executor
from serving.engine.kv_moves import TransferPassage

_TIMED_STEPS = 5


def decode_step_ms(
    executor: Executor, buckets: Iterable[Bucket], now_ns: Callable[[], int]
) -> dict[Bucket, float]:
    """Milliseconds of a full decode step of each bucket, dispatch and transfers included."""
    return {
        bucket: _step_ms(executor, _full_step(StepKind.DECODE, bucket, bucket.num_rows, 0), now_ns)
        for bucket in buckets
    }


def prefill_places(
    buckets: Iterable[Bucket], block_size: int
) -> Iterator[tuple[Bucket, int, tuple[int, float]]]:
    """Where prefill steps are measured: at the beginning and at the end of the longest context.

    Yields:
        the bucket, the tokens before its only chunk, and what `PrefillSample` counts: all tokens
        of the step and their pairs.
    """
    for bucket in buckets:
        longest = max(bucket.num_blocks * block_size - bucket.num_tokens, 0)
        for num_before in sorted({0, longest}):
            yield bucket, num_before, (bucket.num_tokens, num_pairs(bucket.num_tokens, num_before))


def prefill_samples(
    executor: Executor, buckets: Iterable[Bucket], block_size: int, now_ns: Callable[[], int]
) -> list[PrefillSample]:
    """Full prefill steps of one chunk, as `prefill_places` has them."""
    return [
        PrefillSample(
            *counts, _step_ms(executor, _full_step(StepKind.PREFILL, bucket, 1, before), now_ns)
        )
        for bucket, before, counts in prefill_places(buckets, block_size)
    ]


def decode_samples(
    executor: Executor, buckets: Iterable[Bucket], block_size: int, now_ns: Callable[[], int]
) -> list[DecodeSample]:
    """Full decode steps, with contexts of no tokens before them and with the longest ones."""
    samples: list[DecodeSample] = []
    for bucket in buckets:
        longest = max(bucket.num_blocks * block_size - bucket.num_tokens, 0)
        for num_before in sorted({0, longest}):
            plan = _full_step(StepKind.DECODE, bucket, bucket.num_rows, num_before)
            context = float(bucket.num_rows * num_before + bucket.num_tokens)
            samples.append(DecodeSample(bucket.num_rows, context, _step_ms(executor, plan, now_ns)))
    return samples


def _step_ms(executor: Executor, plan: StepPlan, now_ns: Callable[[], int]) -> float:
    taken: list[int] = []
    for _ in range(1 + _TIMED_STEPS):
        begun = now_ns()
        executor.submit(plan)
        executor.collect()
        taken.append(now_ns() - begun)
    # The first one warms up; the middle ones are undisturbed.
    return float(np.mean(sorted(taken[1:])[1:-1])) / 1e6


def _full_step(kind: StepKind, bucket: Bucket, num_rows: int, num_before: int) -> StepPlan:
    """A step that uses all tokens of its bucket, in rows of equal length behind `num_before`."""
    rows = np.zeros(num_rows, np.int32)
    num_tokens = rows + bucket.num_tokens // num_rows
    num_tokens[: bucket.num_tokens % num_rows] += 1
    return StepPlan(
        step_index=-1,
        kind=kind,
        bucket=bucket,
        sequence_ids=rows.astype(np.int64),
        slots=rows,
        starts=rows + num_before,
        num_tokens=num_tokens,
        token_ids=np.zeros(bucket.num_tokens, np.int32),
        block_tables=np.zeros((num_rows, bucket.num_blocks), np.int32),
        temperatures=rows.astype(np.float32),
        top_ks=rows,
        top_ps=np.ones(num_rows, np.float32),
        seeds=rows.astype(np.int64),
    )


class TimedExecutor(TransferPassage):
    """An executor around another one, whose results say how long their steps took.

    Steps run one after another, so a step has the device for itself from its dispatch, or from
    the end of the step before if that is later. Submitting and collecting may be on two threads.
    """

    def __init__(self, executor: Executor, now_ns: Callable[[], int]) -> None:
        self._executor = executor
        self._now_ns = now_ns
        self._begun_ns: deque[int] = deque()
        self._ended_ns = 0

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step."""
        begun_ns = self._now_ns()
        self._executor.submit(plan)
        self._begun_ns.append(begun_ns)

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""
        result = self._executor.collect()
        now_ns = self._now_ns()
        elapsed_ns = now_ns - max(self._begun_ns.popleft(), self._ended_ns)
        self._ended_ns = now_ns
        return replace(result, elapsed_ms=elapsed_ns / 1e6)
