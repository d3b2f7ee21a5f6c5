"""Goal: depths say how much of a chain each worker has, whatever was announced before.
Method: small chains by hand; random adds and removes against a set per worker.
"""

import random

import numpy as np
import pytest

from serving.core.prefix_holders import PrefixHolders


def test_depths_stop_at_the_first_block_that_is_missing() -> None:
    holders = PrefixHolders(4)
    holders.add(0, ["a", "b", "c"])
    holders.add(1, ["a"])
    holders.add(2, ["a", "c"])
    np.testing.assert_array_equal(holders.depths(["a", "b", "c"]), [3, 1, 1, 0])
    np.testing.assert_array_equal(holders.depths(["x", "a"]), [0, 0, 0, 0])
    np.testing.assert_array_equal(holders.depths([]), [0, 0, 0, 0])
    assert len(holders) == 3


def test_what_is_removed_is_forgotten_of_that_worker_only() -> None:
    holders = PrefixHolders(100)
    holders.add(99, ["a", "b"])
    holders.add(3, ["a", "b"])
    holders.remove(3, ["b", "never held"])
    depths = holders.depths(["a", "b"])
    assert (depths[99], depths[3], depths.sum()) == (2, 1, 3)
    holders.remove_worker(99)
    assert holders.depths(["a", "b"])[99] == 0
    assert len(holders) == 1


def test_random_announcements_equal_a_set_per_worker() -> None:
    source = random.Random(5)
    holders, truth = PrefixHolders(7), [set[int]() for _ in range(7)]
    for _ in range(2000):
        worker, key = source.randrange(7), source.randrange(12)
        if source.random() < 0.6:
            holders.add(worker, [key])
            truth[worker].add(key)
        else:
            holders.remove(worker, [key])
            truth[worker].discard(key)
        chain = [source.randrange(12) for _ in range(4)]
        expected = [
            next((n for n, key in enumerate(chain) if key not in held), 4) for held in truth
        ]
        np.testing.assert_array_equal(holders.depths(chain), expected)
    assert len(holders) == len(set.union(*truth))


def test_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0; expected at least 1"):
        PrefixHolders(0)
