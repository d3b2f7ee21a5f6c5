"""Goal: stores have what was written, drop the least recently used, and announce host copies.
Method: a few blocks by hand.
"""

import numpy as np
import pytest

from serving.core.prefix_holders import PrefixHolders
from serving.sim.stores import BoundedStore, EndlessStore, HostCopies
from serving.sim.workload import make_workload
from tests.serving.sim.small_fleet import small_trace


def test_an_endless_store_begins_with_what_came_before() -> None:
    trace = small_trace()
    workload = make_workload(trace, np.random.default_rng(3), 40.0, 60.0)
    store = EndlessStore(workload)
    group = int(workload.first_rows.argmax())
    early, late = trace.rows[0].blocks, trace.rows[-1].blocks
    assert store.depth(group, early) == len(early)
    assert store.depth(group, late) < len(late)
    store.write(group, late)
    assert store.depth(group, late) == len(late)
    # Others share nothing with this group.
    assert store.depth(workload.num_groups - 1, early) == 0


def test_a_bounded_store_drops_ends_first_and_the_oldest() -> None:
    store = BoundedStore(num_blocks=100, blocks_max=4)
    store.write(0, [1, 2, 3])
    store.write(1, [1])
    assert (store.depth(0, [1, 2, 3]), store.depth(1, [1, 2])) == (3, 1)
    store.write(1, [7])
    # The end of the longest unused prefix had to go; its beginning is still of use.
    assert store.depth(0, [1, 2, 3]) == 2
    with pytest.raises(ValueError, match="blocks_max is 0"):
        BoundedStore(1, 0)


def test_host_copies_are_announced_and_withdrawn() -> None:
    holders = PrefixHolders(2)
    copies = HostCopies(holders, blocks_max=3)
    copies.add(1, [10, 11])
    assert holders.depths([10, 11, 12]).tolist() == [0, 2]
    assert copies.depth(1, [10, 11, 12]) == 2
    copies.add(1, [20, 21])
    assert holders.depths([10, 11]).tolist() == [0, 1]
    copies.lose(1)
    assert holders.depths([20, 21]).tolist() == [0, 0]
    assert len(holders) == 0
    assert copies.depth(1, [20]) == 0
