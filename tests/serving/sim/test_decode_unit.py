"""Goal: requests leave after their steps, and a step lasts as long as the slowest worker's load.
Method: a unit of two workers with round costs.
"""

import pytest

from serving.core.balance_decode import DecodeDispatch
from serving.sim.decode_unit import DecodeUnit
from serving.sim.options import DecodeOptions
from serving.sim.prefill_unit import Job


def unit() -> DecodeUnit:
    return DecodeUnit(4, 2, DecodeOptions(10.0, 1.0, 0.01))


def job(index: int, worker: int, num_context: int, num_steps: int, ready_ns: int = 0) -> Job:
    made = Job(index, num_context, num_steps * 2, (), 0, rate=2.0)
    made.num_steps, made.ready_ns = num_steps, ready_ns
    made.decode = DecodeDispatch(worker, num_context)
    return made


def test_a_step_lasts_as_long_as_its_slowest_worker() -> None:
    pool = unit()
    first, second = job(0, 4, 100, 2), job(1, 5, 300, 1)
    pool.add(first)
    pool.add(second)
    assert pool.start_step(0) == 10 + 1 + 3
    assert pool.end_step() == [second]
    # Two tokens more of context.
    assert pool.start_step(14) == pytest.approx(10 + 1 + 1.02)
    assert pool.end_step() == [first]
    assert pool.start_step(30) == 0 and not pool.is_busy
    assert pool.cost_ms.tolist() == [0, 0]


def test_imbalance_is_weighted_with_time() -> None:
    pool = unit()
    pool.add(job(0, 4, 100, 1))
    pool.start_step(0)
    assert (pool.most_ms, pool.mean_ms) == (2 * 12, 1 * 12)


def test_a_context_joins_when_it_has_arrived() -> None:
    pool = unit()
    pool.add(job(0, 4, 100, 1, ready_ns=500))
    assert pool.start_step(499) == 0 and pool.next_ready_ns() == 500
    assert pool.start_step(500) == 12
    assert pool.next_ready_ns() is None


def test_a_dead_worker_gives_its_requests_back_with_their_tokens() -> None:
    pool = unit()
    running, coming, late = job(0, 4, 100, 5), job(1, 4, 100, 5, 90), job(2, 4, 100, 5, 10**9)
    other = job(3, 5, 100, 2)
    for one in (running, coming, late, other):
        pool.add(one)
    for now in (0, 20):
        pool.start_step(now)
        finished = pool.end_step()
    assert finished == [other]
    pool.die(4)
    assert pool.num_running == 0
    assert (running.num_context, running.num_left_output, running.attempt) == (104, 6, 1)
    assert pool.start_step(100) == 0  # What arrives at a dead worker is stranded.
    assert pool.lose(4) == [running, coming, late]
    assert pool.next_ready_ns() is None
    # Its steps from before do not finish it.
    for now in range(5):
        pool.start_step(now)
        assert pool.end_step() == []
