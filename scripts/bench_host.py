"""How long the host works on one decode step: plan, pack and commit, without a device.

Sequences decode with five drafts each. Steps are made up to take hardly longer for more tokens, so
that all drafts are verified and 256 sequences make steps of 1,536 tokens, with the whole choice of
verify lengths at work. The device is made up too and keeps one to six of a row's tokens at random.
Two steps are in flight, and prefixes of what is generated are kept, as in the server.

    python scripts/bench_host.py [--steps N] [--json FILE]
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path

import numpy as np

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.request import Request, SamplingParams
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.engine import Engine, EngineLimits
from serving.engine.packing import pack

NUM_SEQUENCES = (256, 1024)
NUM_DRAFTS = 5
NUM_BLOCKS = 32
PROMPT_TOKENS = 200
WARM_UP_STEPS = 20


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="decode steps that are timed")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    figures = host_figures(args.steps)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def host_figures(num_steps: int) -> dict[str, float]:
    """Prints a table; `host_ms_N` is the median over the steps of N sequences, in milliseconds.

    On a machine that does other work as well, the time of the processor says more than the clock.
    """
    figures: dict[str, float] = {}
    print(
        f"{'sequences':>9} {'tokens':>7} {'host ms':>8} {'fastest':>8} "
        f"{'processor':>9} {'fastest':>8}"
    )
    for num_sequences in NUM_SEQUENCES:
        times_ms, processor_ms = zip(*decode_host_ms(num_sequences, num_steps), strict=True)
        median = statistics.median(times_ms)
        figures[f"host_ms_{num_sequences}"] = median
        num_tokens = num_sequences * (NUM_DRAFTS + 1)
        print(
            f"{num_sequences:9d} {num_tokens:7d} {median:8.3f} {min(times_ms):8.3f} "
            f"{statistics.median(processor_ms):9.3f} {min(processor_ms):8.3f}"
        )
    return figures


class _Device:
    """Keeps one to six tokens of a decode row, and one of a prefill row."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        shape = (plan.num_rows, NUM_DRAFTS + 1)
        tokens = self._rng.integers(3, 1000, shape).astype(np.int32)
        num_kept = np.ones(plan.num_rows, np.int64)
        if plan.kind is StepKind.DECODE:
            num_kept = self._rng.integers(1, plan.num_tokens + 1)
        tokens[np.arange(NUM_DRAFTS + 1) >= num_kept[:, None]] = -1
        confidences = self._rng.random((plan.num_rows, NUM_DRAFTS)).astype(np.float32)
        return StepResult(plan.step_index, tokens, confidences=confidences)


def decode_host_ms(num_sequences: int, num_steps: int) -> list[tuple[float, float]]:
    """Milliseconds, by the clock and of the processor, of plan, pack and commit of each step."""
    # The longest generation that fits the block tables bounds how many steps can be timed.
    engine = _make_engine(num_sequences)
    sampling = SamplingParams(max_tokens=NUM_BLOCKS * 128 - PROMPT_TOKENS, ignore_eos=True)
    device = _Device()
    rng = np.random.default_rng(1)
    for index in range(num_sequences):
        prompt = tuple(rng.integers(3, 1000, PROMPT_TOKENS).tolist())
        engine.admit(Request(str(index), prompt, sampling))
    times_ms: list[tuple[float, float]] = []
    num_full = 0
    while len(times_ms) < num_steps:
        result = device.collect() if engine.status().num_steps_in_flight == 2 else None
        begun, begun_processor = time.perf_counter(), time.thread_time()
        if result is not None:
            engine.commit(result)
        plan = engine.plan()
        assert plan is not None, "the sequences ended before enough steps were timed"
        pack(plan)
        processor_ms = 1e3 * (time.thread_time() - begun_processor)
        elapsed_ms = 1e3 * (time.perf_counter() - begun)
        device.submit(plan)
        if plan.kind is StepKind.DECODE and plan.num_rows == num_sequences:
            num_full += 1
            if num_full > WARM_UP_STEPS:
                times_ms.append((elapsed_ms, processor_ms))
    return times_ms


def _make_engine(num_sequences: int) -> Engine:
    limits = EngineLimits(
        num_blocks=num_sequences * NUM_BLOCKS + 1,
        num_slots=num_sequences + 1,
        context_max=NUM_BLOCKS * 128,
        vocab_size=1000,
        eos_token_id=1,
        waiting_max=num_sequences,
        num_snapshots=64,
        num_drafts=NUM_DRAFTS,
        in_flight_max=2,
    )
    decode = [
        Bucket(num_sequences, num_sequences * count, NUM_BLOCKS) for count in (1, NUM_DRAFTS + 1)
    ]
    buckets = BucketTable(
        {StepKind.PREFILL: [Bucket(32, 8192, NUM_BLOCKS)], StepKind.DECODE: decode}
    )
    step_ms = {bucket: 1.0 + 1e-6 * bucket.num_tokens for bucket in decode}
    return Engine(limits, buckets, random.Random(0), step_ms)


if __name__ == "__main__":
    main()
