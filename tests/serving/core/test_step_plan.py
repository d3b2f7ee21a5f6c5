"""Goal: a plan counts its rows, and neither plan nor result can be changed field by field.

Method: a plan built by hand.
"""

import dataclasses

import numpy as np
import pytest

from serving.core.buckets import Bucket, StepKind
from serving.core.step_plan import StepPlan, StepResult, join_plans, join_results


def test_num_rows_counts_rows_in_use() -> None:
    column = np.zeros(3, np.int32)
    plan = StepPlan(
        step_index=0,
        kind=StepKind.DECODE,
        bucket=Bucket(4, 4, 1),
        sequence_ids=column,
        slots=column,
        starts=column,
        num_tokens=column,
        token_ids=column,
        block_tables=np.zeros((3, 1), np.int32),
        temperatures=column,
        top_ks=column,
        top_ps=column,
        seeds=column,
    )
    assert plan.num_rows == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_index = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_results_are_frozen() -> None:
    result = StepResult(1, np.zeros(1, np.int32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.step_index = 2  # pyright: ignore[reportAttributeAccessIssue]


def _part(num_rows: int, bucket: Bucket, first: int) -> StepPlan:
    column = np.arange(first, first + num_rows, dtype=np.int32)
    return StepPlan(
        step_index=first,
        kind=StepKind.DECODE,
        bucket=bucket,
        sequence_ids=column,
        slots=column,
        starts=column,
        num_tokens=np.ones_like(column),
        token_ids=column,
        block_tables=np.full((num_rows, bucket.num_blocks), first, np.int32),
        temperatures=column,
        top_ks=column,
        top_ps=column,
        seeds=column,
    )


def test_parts_of_a_mesh_make_one_step() -> None:
    """A rank may have nothing to do, and a part may be planned for a smaller bucket."""
    parts = (_part(2, Bucket(2, 2, 1), 4), None, _part(1, Bucket(4, 4, 3), 8))
    plan = join_plans(parts, Bucket(4, 4, 3), 11)
    assert (plan.step_index, plan.num_rows, plan.bucket) == (11, 3, Bucket(4, 4, 3))
    np.testing.assert_array_equal(plan.dp_ranks, [0, 0, 2])
    np.testing.assert_array_equal(plan.slots, [4, 5, 8])
    np.testing.assert_array_equal(plan.block_tables, [[4, 0, 0], [4, 0, 0], [8, 8, 8]])
    first, nothing, last = plan.parts
    assert nothing is None
    assert first is not None and (first.step_index, first.bucket) == (4, plan.bucket)
    assert last is not None and last.step_index == 8
    np.testing.assert_array_equal(parts[0].dp_ranks if parts[0] else [], [0, 0])


def test_results_of_parts_make_one_result() -> None:
    parts = (StepResult(4, np.array([1, 2])), None, StepResult(8, np.array([3])))
    result = join_results(11, parts)
    assert (result.step_index, result.parts) == (11, parts)
    np.testing.assert_array_equal(result.token_ids, [1, 2, 3])
