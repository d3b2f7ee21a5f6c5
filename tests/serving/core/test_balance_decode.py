"""Goal: requests and context are both even over the workers, and no request is counted late.
Method: pools worked out by hand; random requests against policies that see one dimension.
"""

import random

import numpy as np
import pytest

from serving.core.balance_baselines import LeastContextDecode, LeastRequestsDecode
from serving.core.balance_decode import DecodeBalancer, DecodeDispatch, DecodeLoads
from serving.core.balance_prefill import NoWorkerError


def test_a_request_counts_from_the_moment_it_is_given_away() -> None:
    pool = DecodeBalancer(4, 8, 10_000)
    assert sorted(pool.choose(100).worker for _ in range(4)) == [0, 1, 2, 3]


def test_short_ones_go_where_requests_are_few_and_long_ones_where_context_is() -> None:
    def pool() -> DecodeBalancer:
        # Worker 0 has one request with much context, worker 1 some with little.
        pool = DecodeBalancer(2, 100, 10**7)
        assert pool.choose(100_000).worker == 0
        for dispatch in [pool.choose(1_000) for _ in range(20)]:
            if dispatch.worker == 0:
                pool.finished(dispatch)
        assert pool.num_requests[0] == 1 < pool.num_requests[1]
        return pool

    assert pool().choose(10).worker == 0
    assert pool().choose(50_000).worker == 1


def test_expected_output_is_reserved() -> None:
    pool = DecodeBalancer(1, 8, 1_000)
    dispatch = pool.choose(400, num_expected=500)
    assert dispatch.num_tokens == 900
    with pytest.raises(NoWorkerError, match="no decode worker has room for 200 tokens"):
        pool.choose(100, num_expected=100)
    assert pool.choose(100).worker == 0


def test_a_full_worker_is_passed_over() -> None:
    pool = DecodeBalancer(2, 2, 1_000)
    long = pool.choose(900)
    assert [pool.choose(200).worker for _ in range(2)] == [1 - long.worker] * 2
    # The one has its two requests, the other not enough memory.
    with pytest.raises(NoWorkerError):
        pool.choose(200)
    pool.finished(long)
    assert pool.choose(200).worker == long.worker


def spread(pool: DecodeLoads) -> tuple[float, float]:
    """The mean over time of largest over mean, for requests and for context."""
    source = random.Random(11)
    running: list[DecodeDispatch] = []
    ratios: list[tuple[float, float]] = []
    for number in range(4000):
        running.append(pool.choose(int(2 ** source.uniform(7, 17))))
        if len(running) > 320:
            pool.finished(running.pop(source.randrange(len(running))))
        if number > 1000:
            requests, tokens = pool.num_requests, pool.num_tokens
            ratios.append((requests.max() / requests.mean(), tokens.max() / tokens.mean()))
    by_requests, by_tokens = np.mean(ratios, axis=0)
    return float(by_requests), float(by_tokens)


def test_both_dimensions_are_even_at_once() -> None:
    both = spread(DecodeBalancer(16, 64, 10**7))
    requests_only = spread(LeastRequestsDecode(16, 64, 10**7))
    context_only = spread(LeastContextDecode(16, 64, 10**7))
    assert both[0] < 1.2 < context_only[0]
    assert both[1] < 1.3 < requests_only[1]


def test_a_worker_that_is_gone_gets_nothing_and_owes_nothing() -> None:
    pool = DecodeBalancer(2, 4, 1_000)
    lost = pool.choose(100)
    pool.set_available(lost.worker, False)
    assert {pool.choose(100).worker for _ in range(3)} == {1 - lost.worker}
    pool.set_available(lost.worker, True)
    fresh = pool.choose(100)
    assert fresh.worker == lost.worker
    assert pool.is_current(fresh) and not pool.is_current(lost)
    pool.finished(lost)  # Late, from its earlier life.
    assert pool.num_requests[lost.worker] == 1
    assert pool.num_tokens[lost.worker] == 100


def test_everything_given_back_leaves_nothing() -> None:
    pool = DecodeBalancer(4, 16, 10_000)
    for dispatch in [pool.choose(50 + n) for n in range(40)]:
        pool.finished(dispatch)
    assert not pool.num_requests.any()
    assert not pool.num_tokens.any()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_wrong_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        DecodeBalancer(*sizes)
