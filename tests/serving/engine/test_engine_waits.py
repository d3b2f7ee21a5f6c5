"""Goal: how long a prompt waits for its first token and a sequence for its next one is bounded,
whatever else the engine has to do.

Method: virtual time. A device without a memory takes for each step what the cost model says; the
waits of prompts behind a very long one are counted in chunk times.
"""

import random
from collections import deque

import numpy as np

from serving.core.buckets import StepKind
from serving.core.cost import PrefillCost
from serving.core.prefill_scheduler import PrefillBudget
from serving.core.request import Request, SamplingParams
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.engine import Engine, EngineLimits, run_step
from tests.serving.engine.checked_engine import make_buckets

COST = PrefillCost(base_ms=5.0, token_ms=0.05, pair_ms=1e-6)
CHUNK_MS = 60.0
DECODE_MS = 3.0
WIDTH = 1600
BUCKETS = make_buckets(
    prefill=[(8, size, WIDTH) for size in (64, 256, 512, 1024)],
    decode=[(1, 1, WIDTH), (16, 16, WIDTH)],
)
LIMITS = EngineLimits(
    num_blocks=2 * WIDTH,
    num_slots=17,
    context_max=WIDTH * 128,
    vocab_size=10,
    eos_token_id=None,
)


class TimedDevice:
    """Takes virtual time, and samples token 1 for every row."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        taken_ms = DECODE_MS
        if plan.kind is StepKind.PREFILL:
            chunks = zip(plan.num_tokens.tolist(), plan.starts.tolist(), strict=True)
            taken_ms = COST.step_ms(list(chunks))
            taken_ms += COST.token_ms * (plan.bucket.num_tokens - len(plan.token_ids))
        self.now_ms += taken_ms
        return StepResult(plan.step_index, np.ones(plan.num_rows, np.int32))


class TimedEngine:
    """An engine on virtual time; `times` are those at which each request got tokens."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        budget = PrefillBudget(CHUNK_MS, COST)
        self.engine = Engine(limits, BUCKETS, random.Random(0), prefill_budget=budget)
        self.device = TimedDevice()
        self.times: dict[str, list[float]] = {}

    def admit(self, name: str, num_tokens: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.engine.admit(Request(name, (2,) * num_tokens, sampling))
        self.times[name] = []

    def step(self) -> None:
        for delta in run_step(self.engine, self.device):
            self.times[delta.request_id].append(self.device.now_ms)


def test_short_prompts_behind_a_very_long_one_get_their_first_token_within_five_chunks() -> None:
    timed = TimedEngine()
    timed.admit("long", 200_000, 8)
    for _ in range(3):
        timed.step()
    begun = timed.device.now_ms
    names = [f"short {number}" for number in range(10)]
    for name in names:
        timed.admit(name, 100, 40)
    while not all(timed.times[name] for name in names):
        timed.step()
    waits = [timed.times[name][0] - begun for name in names]
    assert max(waits) <= 5 * CHUNK_MS
    assert not timed.times["long"]
    # And the long one was not stopped by them.
    while timed.engine.has_work:
        timed.step()
    assert timed.times["long"]


def test_tokens_wait_for_one_chunk_however_long_the_context_of_the_prompt() -> None:
    timed = TimedEngine()
    timed.admit("talker", 50, 2000)
    timed.step()
    timed.admit("long", 200_000, 2)
    while not timed.times["long"]:
        timed.step()
    gaps = np.diff(timed.times["talker"])
    assert gaps.max() <= CHUNK_MS + DECODE_MS
    # The bound is used: chunks are as long as the time allows.
    assert gaps.max() > 0.7 * CHUNK_MS
    # A token comes between any two chunks.
    assert np.median(gaps) > DECODE_MS


def test_a_prompt_that_finds_no_room_does_not_stop_those_behind_it() -> None:
    limits = EngineLimits(
        num_blocks=WIDTH + 1,
        num_slots=17,
        context_max=WIDTH * 128,
        vocab_size=10,
        eos_token_id=None,
    )
    timed = TimedEngine(limits)
    timed.admit("first", 150_000, 400)
    timed.step()
    timed.admit("head", 190_000, 2)
    timed.admit("behind", 100, 2)
    begun = timed.device.now_ms
    while not timed.times["behind"]:
        timed.step()
    assert timed.times["behind"][0] - begun <= 2 * CHUNK_MS
    assert not timed.times["first"] and not timed.times["head"]
