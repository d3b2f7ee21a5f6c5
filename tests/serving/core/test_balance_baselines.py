"""Goal: every baseline follows its own rule, and all of them keep the books alike.
Method: one pool by hand per rule; the same bookkeeping checks for all.
"""

import random

import numpy as np
import pytest

from serving.core import balance_baselines as baselines
from serving.core.balance_decode import DecodeLoads
from serving.core.balance_prefill import NoWorkerError, PrefillPolicy, Prompt
from serving.core.prefix_holders import PrefixHolders

PREFILL = ("round_robin", "random", "two_choices", "least_requests", "credit", "affinity")


def prefill(name: str, num_workers: int, holders: PrefixHolders | None = None) -> PrefillPolicy:
    holders = holders or PrefixHolders(num_workers)
    source = random.Random(1)
    match name:
        case "round_robin":
            return baselines.RoundRobinPrefill(num_workers)
        case "random":
            return baselines.RandomPrefill(num_workers, source)
        case "two_choices":
            return baselines.TwoChoicesPrefill(num_workers, source)
        case "least_requests":
            return baselines.LeastRequestsPrefill(num_workers)
        case "credit":
            return baselines.CreditPrefill(num_workers, holders, 100)
        case _:
            return baselines.AffinityPrefill(num_workers, holders, 100)


def decode(name: str) -> DecodeLoads:
    source, sizes = random.Random(1), (3, 4, 1_000)
    match name:
        case "round_robin":
            return baselines.RoundRobinDecode(*sizes)
        case "random":
            return baselines.RandomDecode(*sizes, source)
        case "two_choices":
            return baselines.TwoChoicesDecode(*sizes, source)
        case "least_requests":
            return baselines.LeastRequestsDecode(*sizes)
        case _:
            return baselines.LeastContextDecode(*sizes)


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_uses_available_workers_only(name: str) -> None:
    pool = prefill(name, 3)
    pool.set_available(1, False)
    assert {pool.choose(Prompt(100)).worker for _ in range(30)} == {0, 2}
    pool.set_available(0, False)
    pool.set_available(2, False)
    with pytest.raises(NoWorkerError, match="no prefill worker is available"):
        pool.choose(Prompt(100))


@pytest.mark.parametrize(
    "name", ["round_robin", "random", "two_choices", "least_requests", "context"]
)
def test_decode_uses_workers_with_room_only(name: str) -> None:
    pool = decode(name)
    pool.set_available(1, False)
    dispatches = [pool.choose(100) for _ in range(8)]
    np.testing.assert_array_equal(pool.num_requests, [4, 0, 4])
    with pytest.raises(NoWorkerError):
        pool.choose(100)
    for dispatch in dispatches:
        pool.finished(dispatch)
    assert not pool.num_tokens.any()


def test_round_robin_takes_turns() -> None:
    pool = prefill("round_robin", 3)
    assert [pool.choose(Prompt(1)).worker for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [decode("round_robin").choose(1).worker for _ in range(2)] == [0, 0]


def test_random_is_the_same_for_the_same_seed_and_reaches_all() -> None:
    first, second = prefill("random", 8), prefill("random", 8)
    chosen = [first.choose(Prompt(1)).worker for _ in range(100)]
    assert chosen == [second.choose(Prompt(1)).worker for _ in range(100)]
    assert set(chosen) == set(range(8))


def test_two_choices_never_takes_the_fullest() -> None:
    pool = prefill("two_choices", 3)
    full = pool.choose(Prompt(1))
    for _ in range(20):
        dispatch = pool.choose(Prompt(1))
        assert dispatch.worker != full.worker
        pool.finished(dispatch)


def test_least_requests_counts_prompts_and_not_work() -> None:
    pool = prefill("least_requests", 2)
    pool.choose(Prompt(100_000))
    pool.choose(Prompt(1))
    pool.choose(Prompt(1))
    assert pool.choose(Prompt(1)).worker == 1


def test_least_context_counts_tokens_and_not_requests() -> None:
    pool = decode("context")
    assert pool.choose(300).worker == 0
    assert [pool.choose(100).worker for _ in range(4)] == [1, 2, 1, 2]


def test_credit_weighs_copies_against_work() -> None:
    holders = PrefixHolders(2)
    holders.add(1, range(4))
    pool = prefill("credit", 2, holders)
    prompt = Prompt(1_000, num_cached=400, keys=range(10))
    # Worker 1 spares 400 tokens, worker 0 three quarters of that: 600 against 700.
    assert pool.choose(prompt).worker == 1
    # Now worker 1 has 600 to do, which is more than the copies spare.
    assert pool.choose(prompt).worker == 0


def test_affinity_follows_copies_until_queues_are_uneven() -> None:
    holders = PrefixHolders(2)
    holders.add(1, range(4))
    pool = baselines.AffinityPrefill(2, holders, 100, match_min=0.3, queue_gap=3, queue_ratio=1.5)
    prompt = Prompt(1_000, num_cached=400, keys=range(10))
    assert [pool.choose(prompt).worker for _ in range(6)] == [1, 1, 1, 1, 0, 1]
    # 400 of 2,000 tokens are too few to count, and worker 0 has got fewer tokens so far.
    assert pool.choose(Prompt(2_000, 400, range(20))).worker == 0


def test_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0"):
        prefill("round_robin", 0)
