"""Goal: images go where the fewest image tokens wait for the worker's speed.
Method: pools worked out by hand.
"""

import numpy as np
import pytest

from serving.core.balance_prefill import NoWorkerError
from serving.core.balance_vision import VisionBalancer


def test_tokens_in_flight_decide_and_not_images() -> None:
    pool = VisionBalancer([1.0, 1.0])
    large = pool.choose(1000)
    assert [pool.choose(100).worker for _ in range(5)] == [1 - large.worker] * 5
    pool.finished(large)
    assert pool.choose(100).worker == large.worker


def test_a_faster_worker_gets_more() -> None:
    pool = VisionBalancer([3.0, 1.0])
    for _ in range(40):
        pool.choose(10)
    np.testing.assert_array_equal(pool.num_tokens, [300, 100])


def test_a_worker_that_is_gone_gets_nothing_and_owes_nothing() -> None:
    pool = VisionBalancer([1.0, 1.0])
    lost = pool.choose(10)
    pool.set_available(lost.worker, False)
    assert {pool.choose(10).worker for _ in range(3)} == {1 - lost.worker}
    pool.set_available(lost.worker, True)
    fresh = pool.choose(10)
    pool.finished(lost)  # Late, from its earlier life.
    assert pool.num_tokens[fresh.worker] == 10
    for worker in range(2):
        pool.set_available(worker, False)
    with pytest.raises(NoWorkerError, match="no vision worker is available"):
        pool.choose(10)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0]])
def test_wrong_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected one above 0 for each worker"):
        VisionBalancer(weights)


def test_an_image_goes_to_who_had_it_if_that_one_is_there() -> None:
    pool = VisionBalancer([1.0, 1.0])
    pool.choose(100, 1)
    assert pool.choose(100, 1).worker == 1
    pool.set_available(1, False)
    assert pool.choose(100, 1).worker == 0


def test_a_worker_that_comes_back_may_be_faster() -> None:
    pool = VisionBalancer([1.0, 1.0])
    pool.set_available(0, True, 3.0)
    for _ in range(40):
        pool.choose(10)
    np.testing.assert_array_equal(pool.num_tokens, [300, 100])
    with pytest.raises(ValueError, match="weight of worker 0 is -1.0"):
        pool.set_available(0, True, -1.0)
