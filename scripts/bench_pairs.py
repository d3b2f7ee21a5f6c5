"""Two ways to serve the same prompts, in turn on the same machine: how much faster is one?

Used by `bench_engine.py`. Prompts are questions that the small model was trained for, answered
greedily, since what drafts are worth depends on the text. As many requests as a batch holds run at
any time: one that ends is replaced by the next. Rounds of the two ways alternate, and a figure is
the median over rounds of the quotient of their speeds, so a machine whose speed drifts shifts both.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.cluster import make_engine
from serving.config import ServingConfig
from serving.core.request import Request, SamplingParams
from serving.engine.engine import run_step
from serving.engine.step_times import TimedExecutor
from serving.loading import LoadedModel

ANSWER_TOKENS_MAX = 64


@dataclass(frozen=True, slots=True)
class Way:
    """A loaded model and the configuration that it was loaded with."""

    config: ServingConfig
    model: LoadedModel

    def without_costs(self) -> "Way":
        """The same, verifying every draft, because it knows no times of steps."""
        return Way(self.config, replace(self.model, facts=replace(self.model.facts, step_ms={})))


def speed_ratio(
    one: Way, other: Way, num_running: int, prompts: Sequence[Sequence[int]], num_rounds: int
) -> float:
    """Tokens per second of `one` over those of `other`, both having answered once before."""
    for way in (one, other):
        tokens_per_s(way, num_running, prompts)
    quotients = [
        tokens_per_s(one, num_running, prompts) / tokens_per_s(other, num_running, prompts)
        for _ in range(num_rounds)
    ]
    return statistics.median(quotients)


def tokens_per_s(way: Way, num_running: int, prompts: Sequence[Sequence[int]]) -> float:
    """Generated tokens per second, prompts included in the time."""
    # A fresh engine knows no prefix of an earlier round.
    engine = make_engine(way.config.engine, way.model.facts, random.Random(0))
    executor = TimedExecutor(way.model.executor, time.perf_counter_ns)
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS_MAX, temperature=0.0)
    waiting = [
        Request(str(index), tuple(prompt), sampling) for index, prompt in enumerate(prompts)
    ][::-1]
    num_unfinished = num_tokens = 0
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and num_unfinished < num_running:
            engine.admit(waiting.pop())
            num_unfinished += 1
        for delta in run_step(engine, executor):
            num_tokens += len(delta.token_ids)
            num_unfinished -= delta.finish_reason is not None
    return num_tokens / (time.perf_counter() - started)
