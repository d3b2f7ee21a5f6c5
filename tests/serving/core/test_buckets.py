"""Goal: a step gets the smallest compiled shape that holds it, or none.

Method: random tables and needs against a search over all buckets; wrong tables beside right ones.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.buckets import Bucket, BucketTable, StepKind

ONE = [Bucket(1, 1, 1)]
rows = st.integers(1, 6)
shapes = st.builds(
    lambda num_rows, extra, num_blocks: Bucket(num_rows, num_rows + extra, num_blocks),
    rows,
    st.integers(0, 6),
    rows,
)


@given(some=st.lists(shapes, min_size=1, max_size=8), need=st.tuples(rows, rows, rows))
def test_smallest_is_the_least_that_fits(some: list[Bucket], need: tuple[int, int, int]) -> None:
    table = BucketTable({StepKind.PREFILL: some, StepKind.DECODE: ONE})
    fitting = [
        bucket
        for bucket in some
        if bucket.num_rows >= need[0]
        and bucket.num_tokens >= need[1]
        and bucket.num_blocks >= need[2]
    ]
    best = min(fitting, default=None, key=lambda b: (b.num_tokens, b.num_blocks, b.num_rows))
    assert table.smallest(StepKind.PREFILL, *need) == best
    assert set(table.of(StepKind.PREFILL)) == set(some)
    assert table.of(StepKind.DECODE) == tuple(ONE)


def test_largest_is_the_maximum_of_each_size() -> None:
    table = BucketTable(
        {StepKind.PREFILL: [Bucket(1, 9, 2), Bucket(4, 5, 8)], StepKind.DECODE: ONE}
    )
    assert table.largest(StepKind.PREFILL) == Bucket(4, 9, 8)


def test_a_table_lists_each_bucket_once_with_its_kind() -> None:
    table = BucketTable(
        {StepKind.DECODE: ONE * 2, StepKind.PREFILL: [Bucket(1, 9, 2), Bucket(1, 4, 2)]}
    )
    assert list(table) == [
        (StepKind.PREFILL, Bucket(1, 4, 2)),
        (StepKind.PREFILL, Bucket(1, 9, 2)),
        (StepKind.DECODE, Bucket(1, 1, 1)),
    ]


@pytest.mark.parametrize("missing", list(StepKind))
def test_each_kind_needs_a_bucket(missing: StepKind) -> None:
    with pytest.raises(ValueError, match=f"no {missing.value} bucket"):
        BucketTable({kind: ONE for kind in StepKind if kind is not missing})


@pytest.mark.parametrize("bad", [Bucket(2, 1, 1), Bucket(0, 1, 1), Bucket(1, 1, 0)])
def test_impossible_buckets_are_refused(bad: Bucket) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        BucketTable({StepKind.PREFILL: ONE, StepKind.DECODE: [bad]})
