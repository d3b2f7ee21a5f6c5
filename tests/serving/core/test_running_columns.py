"""Goal: of several tenants each keeps its first sequences longest, whatever the others call urgent.

Method: owners and ranks by hand, and sequences that come to rows and leave them.
"""

import numpy as np

from serving.core.request import Request, SamplingParams
from serving.core.running_columns import RunningColumns, fair_ranks
from serving.core.sequence import Sequence


def test_owners_take_turns() -> None:
    owners = np.array(["a", "a", "a", "b", "c", "b"], object)
    own_ranks, ids = np.array([5, 3, 9, 8, 7, 2]), np.array([0, 1, 2, 3, 4, 5])
    # First turn: 1 of a, 4 of c, 5 of b; then 0 of a, 3 of b; then 2 of a.
    assert fair_ranks(owners, own_ranks, ids).tolist() == [3, 0, 5, 4, 1, 2]


def test_one_owner_is_in_its_own_order() -> None:
    own_ranks = np.array([4, 1, 6])
    assert fair_ranks(np.array(["a"] * 3, object), own_ranks, own_ranks).tolist() == [1, 0, 2]


def test_ranks_follow_who_comes_and_leaves() -> None:
    columns = RunningColumns(6, 1, 0)

    def enter(row: int, sequence_id: int, owner: str, priority: int = 0) -> None:
        request = Request("r", (1,), SamplingParams(), priority=priority, cache_owner=owner)
        columns.rank(row, Sequence(sequence_id, request, np.ones(1, np.int32), 0, (), 9))

    def rows_in_order() -> list[int]:
        rows = np.flatnonzero(columns.sequence_ids >= 0)
        return rows[np.argsort(columns.ranks[rows])].tolist()

    for sequence_id, row in enumerate((1, 2, 3)):
        enter(row, sequence_id, "a")
    assert rows_in_order() == [1, 2, 3]
    enter(4, 3, "b", priority=9)
    assert rows_in_order() == [1, 4, 2, 3]
    enter(5, 4, "a", priority=-9)
    assert rows_in_order() == [4, 5, 1, 2, 3], "urgency is of use against one's own only"
    columns.unrank(4)
    assert rows_in_order() == [5, 1, 2, 3]
    enter(4, 5, "a", priority=-20)
    assert rows_in_order() == [4, 5, 1, 2, 3]
    for row in (4, 5, 1, 2, 3):
        columns.unrank(row)
    assert not columns._num_owned and (columns.ranks == -1).all()
