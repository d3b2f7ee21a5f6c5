"""Goal: a plan counts its rows, and neither plan nor result can be changed field by field.

Method: a plan built by hand.
"""

import dataclasses

import numpy as np
import pytest

from serving.core.buckets import Bucket, StepKind
from serving.core.step_plan import StepPlan, StepResult


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
