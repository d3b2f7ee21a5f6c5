"""Goal: policies keep what they are to keep, and a hit is a prefix. Method: caches of few blocks,
worked out by hand.
"""

import pytest

from scripts.kv_bench.policies import POLICIES, Lru, LruWithGhosts, hit_ratio


def test_a_hit_is_a_prefix() -> None:
    # Of the last prompt block 5 is there, but not what stands before it.
    assert hit_ratio([[1, 2, 3], [1, 2, 4, 5], [9, 5]], Lru(100)) == 2 / 9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_without_a_limit_keeps_everything(policy: str) -> None:
    assert hit_ratio([[1, 2], [3, 4], [1, 2], [3, 4, 5]], POLICIES[policy](100)) == 4 / 9


@pytest.mark.parametrize("policy", POLICIES)
def test_the_end_of_a_prefix_goes_first(policy: str) -> None:
    cache = POLICIES[policy](4)
    cache.use([1, 2, 3, 4, 5, 6])
    assert [block for block in range(1, 7) if block in cache] == [1, 2, 3, 4]


def test_what_comes_back_outlives_what_came_once() -> None:
    for make, is_kept in ((Lru, False), (LruWithGhosts, True), (POLICIES["s3_fifo"], True)):
        cache = make(4)
        # Pushed out before it is used again, so that only the list of what has left knows it.
        for block in (1, 10, 11, 12, 13, 1, 20, 21, 22, 23, 24):
            cache.use([block])
        assert (1 in cache) == is_kept, make
