"""Goal: work is spread by predicted time, classes keep to their groups, nothing is counted late.
Method: small pools worked out by hand, then properties over random prompts.
"""

import random

import numpy as np
import pytest

from serving.core.balance_prefill import (
    CLASS_BOUNDS,
    NoWorkerError,
    PrefillBalancer,
    PrefillDispatch,
    Prompt,
    length_class,
)
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders

MS_A_TOKEN = PrefillCost(0.0, 1.0, 0.0)
QUADRATIC = PrefillCost(5.0, 0.02, 2e-8)
FOREVER = 1e18


def balancer(num_workers: int, spill_ms: float = 100.0) -> PrefillBalancer:
    return PrefillBalancer(num_workers, MS_A_TOKEN, FOREVER, spill_ms)


def test_classes_begin_at_their_bounds() -> None:
    assert [length_class(bound - 1) for bound in CLASS_BOUNDS] == [0, 1, 2]
    assert [length_class(bound) for bound in CLASS_BOUNDS] == [1, 2, 3]


def test_a_prompt_counts_from_the_moment_it_is_given_away() -> None:
    # Nobody has answered yet, and still no two of them go to one worker.
    pool = balancer(4)
    workers = [pool.choose(Prompt(100)).worker for _ in range(4)]
    assert sorted(workers) == [0, 1, 2, 3]


def test_work_counts_and_not_prompts() -> None:
    pool = balancer(2)
    long = pool.choose(Prompt(1000))
    for _ in range(9):
        assert pool.choose(Prompt(100)).worker != long.worker
    pool.finished(long)
    assert pool.choose(Prompt(100)).worker == long.worker


def test_only_what_is_not_cached_is_work() -> None:
    pool = PrefillBalancer(1, QUADRATIC)
    dispatch = pool.choose(Prompt(20_000, num_cached=18_000))
    assert dispatch.length_class == 1  # By the whole context.
    assert dispatch.work_ms == pytest.approx(2000 * 0.02 + 2e-8 * (2000 * 18_000 + 2000**2 / 2))


def test_groups_follow_the_work_of_the_last_round() -> None:
    pool = balancer(8)
    for _ in range(30):
        pool.choose(Prompt(1000))
    pool.choose(Prompt(300_000, num_cached=290_000))
    pool.end_round()
    # 30,000 of short prompts and 10,000 of one that is very long: six workers and two.
    np.testing.assert_allclose(pool.quotas.sum(axis=1), [6, 0, 0, 2])
    np.testing.assert_allclose(pool.quotas.sum(axis=0), np.ones(8))
    np.testing.assert_array_equal(pool.quotas[0], [1, 1, 1, 1, 1, 1, 0, 0])


def test_a_border_runs_through_a_worker() -> None:
    pool = balancer(2)
    for _ in range(3):
        pool.choose(Prompt(1000))
    pool.choose(Prompt(17_000, num_cached=16_000))
    pool.end_round()
    np.testing.assert_allclose(pool.quotas[:2], [[1, 0.5], [0, 0.5]])


def test_a_round_ends_by_the_work_in_it() -> None:
    pool = PrefillBalancer(2, MS_A_TOKEN, round_ms=500)
    pool.choose(Prompt(900))
    assert (pool.quotas == 1).all()
    pool.choose(Prompt(100))
    np.testing.assert_allclose(pool.quotas.sum(axis=1), [2, 0, 0, 0])


def grouped_pool(spill_ms: float) -> tuple[PrefillBalancer, list[PrefillDispatch]]:
    """Two workers, the first for short prompts and the second for long ones, both idle."""
    pool = balancer(2, spill_ms=spill_ms)
    dispatches = [pool.choose(Prompt(10_000)), pool.choose(Prompt(20_000, num_cached=10_000))]
    pool.end_round()
    for dispatch in dispatches:
        pool.finished(dispatch)
    np.testing.assert_allclose(pool.quotas[:2], [[1, 0], [0, 1]])
    return pool, dispatches


def test_a_class_keeps_to_its_group_until_another_would_be_sooner_by_the_margin() -> None:
    apart, _ = grouped_pool(float("inf"))
    assert [apart.choose(Prompt(100)).worker for _ in range(5)] == [0] * 5
    spilling, _ = grouped_pool(250)
    assert [spilling.choose(Prompt(100)).worker for _ in range(5)] == [0, 0, 0, 1, 0]


def test_a_class_without_a_group_takes_any_worker() -> None:
    pool, _ = grouped_pool(100)
    pool.choose(Prompt(500))
    assert pool.choose(Prompt(70_000, num_cached=69_900)).worker == 1


def test_of_equal_workers_the_one_with_copies_is_taken() -> None:
    holders = PrefixHolders(3)
    holders.add(1, ["a"])
    holders.add(2, ["a", "b"])
    pool = PrefillBalancer(3, MS_A_TOKEN, FOREVER, holders=holders, tie_ms=10)
    prompt = Prompt(256, num_cached=248, keys=["a", "b"])
    assert pool.choose(prompt).worker == 2
    assert pool.choose(prompt).worker == 2  # 8 ms behind the others, within the tie.
    assert pool.choose(prompt).worker == 1
    assert pool.choose(Prompt(256, num_cached=248)).worker == 0


def test_a_worker_that_is_gone_gets_nothing_and_owes_nothing() -> None:
    pool = balancer(2)
    lost = pool.choose(Prompt(100))
    pool.set_available(lost.worker, False)
    assert {pool.choose(Prompt(100)).worker for _ in range(3)} == {1 - lost.worker}
    pool.set_available(lost.worker, True)
    assert pool.load_ms[lost.worker] == 0
    fresh = pool.choose(Prompt(100))
    assert fresh.worker == lost.worker
    pool.finished(lost)  # Late, from its earlier life.
    assert pool.load_ms[lost.worker] == 100
    for worker in range(2):
        pool.set_available(worker, False)
    with pytest.raises(NoWorkerError, match="no prefill worker is available"):
        pool.choose(Prompt(1))


def test_load_is_what_was_given_and_not_finished() -> None:
    source = random.Random(3)
    pool = PrefillBalancer(16, QUADRATIC, round_ms=100)
    running: list[PrefillDispatch] = []
    for _ in range(2000):
        tokens = int(2 ** source.uniform(4, 19))
        running.append(pool.choose(Prompt(tokens, source.randrange(tokens))))
        if len(running) > 50:
            pool.finished(running.pop(source.randrange(len(running))))
        shares = pool.quotas.sum(axis=0)
        assert shares == pytest.approx(1) or (pool.quotas == 1).all()  # Before the first round.
    expected = np.zeros(16)
    for dispatch in running:
        expected[dispatch.worker] += dispatch.work_ms
    np.testing.assert_allclose(pool.load_ms, expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(
    ("num_workers", "round_ms", "spill_ms", "tie_ms"),
    [(0, 1.0, 1.0, 1.0), (2, 0.0, 1.0, 1.0), (2, 1.0, -1.0, 1.0), (2, 1.0, 1.0, -1.0)],
)
def test_wrong_options_are_refused(
    num_workers: int, round_ms: float, spill_ms: float, tie_ms: float
) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrefillBalancer(num_workers, MS_A_TOKEN, round_ms, spill_ms, None, tie_ms)
