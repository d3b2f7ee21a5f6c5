"""Goal: chunks fill a step's time in the order of the queue, and the slowest worker sets the pace.
Method: a unit of two workers with a cost of one millisecond a token.
"""

from serving.core.cost import PrefillCost
from serving.sim.prefill_unit import CHUNK_GRAIN, Job, PrefillUnit


def unit(step_ms: float = 1010.0) -> PrefillUnit:
    return PrefillUnit(4, 2, PrefillCost(10.0, 1.0, 0.0), step_ms)


def job(index: int, num_left: int, ready_ns: int = 0) -> Job:
    made = Job(index, num_left, 5, (), 0, 1.0)
    made.num_left, made.ready_ns = num_left, ready_ns
    return made


def test_a_step_lasts_as_long_as_its_slowest_worker() -> None:
    pool = unit()
    first, second = job(0, 300), job(1, 700)
    pool.add(4, first)
    pool.add(5, second)
    assert pool.start_step(0) == 710
    assert pool.is_busy and pool.used_ms == [300, 700]
    assert pool.end_step() == [first, second]
    assert not pool.is_busy
    assert pool.start_step(1) == 0


def test_prompts_share_a_step_and_the_last_one_is_cut_at_a_block() -> None:
    pool = unit()
    jobs = [job(0, 300), job(1, 2000), job(2, 1)]
    for one in jobs:
        pool.add(4, one)
    pool.start_step(0)
    assert [(chunk.job.index, chunk.num_tokens) for chunk in pool.chunks] == [(0, 300), (1, 640)]
    assert pool.end_step() == jobs[:1]
    assert (jobs[1].num_done, jobs[1].num_left) == (640, 1360)
    pool.start_step(0)
    # In the order of arrival: the short one does not pass.
    assert [(chunk.job.index, chunk.num_tokens) for chunk in pool.chunks] == [(1, 896)]


def test_a_step_makes_progress_however_short_it_is() -> None:
    pool = unit(step_ms=11.0)
    pool.add(4, job(0, 1000))
    assert pool.start_step(0) == 10 + CHUNK_GRAIN


def test_what_is_not_fetched_yet_waits() -> None:
    pool = unit()
    pool.add(4, job(0, 100, ready_ns=50))
    pool.add(4, job(1, 100))
    assert pool.start_step(0) == 0
    assert not pool.is_busy and pool.next_ready_ns() == 50
    assert pool.start_step(50) == 210


def test_a_dead_worker_computes_nothing_and_its_jobs_can_be_had() -> None:
    pool = unit()
    lost, kept = job(0, 300), job(1, 200)
    pool.add(4, lost)
    pool.add(5, kept)
    pool.start_step(0)
    pool.is_dead[0] = True
    assert pool.end_step() == [kept]
    assert lost.num_left == 300
    assert pool.start_step(0) == 0 and pool.next_ready_ns() is None
    assert pool.lose(4) == [lost]
    assert pool.lose(4) == []
