"""Goal: drafts are counted at every place that a row reached. Method: two steps written out."""

import numpy as np

from serving.core.draft_counts import DraftCounts


def test_drafts_are_counted_by_place() -> None:
    counts = DraftCounts(3)
    assert counts.verified == counts.accepted == (0, 0, 0)
    counts.add(np.array([3, 1, 0]), np.array([2, 0, 0]))
    counts.add(np.array([3]), np.array([3]))
    assert counts.verified == (3, 2, 2)
    assert counts.accepted == (2, 2, 1)


def test_an_engine_without_drafts_counts_none() -> None:
    counts = DraftCounts(0)
    counts.add(np.zeros(4, np.int64), np.zeros(4, np.int64))
    assert counts.verified == counts.accepted == ()
