"""Goal: a packed step holds the plan's values where the compiled step looks, and padding elsewhere.

Method: a small plan with distinct values in every column, compared array by array with what is
written out by hand, and read a second time from the shared buffer by the layout.
"""

from dataclasses import replace

import numpy as np
import pytest

from serving.core.buckets import Bucket, StepKind
from serving.core.replay import StepTail
from serving.core.step_plan import StepPlan
from serving.engine.packing import layout, pack

BUCKET = Bucket(num_rows=4, num_tokens=6, num_blocks=3)
SEED = (5 << 32) + 2**32 - 7


def make_plan(bucket: Bucket = BUCKET, num_blocks: int = 3) -> StepPlan:
    return StepPlan(
        step_index=3,
        kind=StepKind.PREFILL,
        bucket=bucket,
        sequence_ids=np.array([8, 9], np.int64),
        slots=np.array([2, 1], np.int32),
        starts=np.array([128, 0], np.int32),
        num_tokens=np.array([1, 3], np.int32),
        token_ids=np.array([11, 12, 13, 14], np.int32),
        block_tables=np.arange(1, 1 + 2 * num_blocks, dtype=np.int32).reshape(2, num_blocks),
        temperatures=np.array([0.5, 0.0], np.float32),
        top_ks=np.array([7, 0], np.int32),
        top_ps=np.array([0.25, 1.0], np.float32),
        seeds=np.array([SEED, 2**63 - 1], np.int64),
    )


EXPECTED = {
    "token_ids": ([11, 12, 13, 14, 0, 0], np.int32),
    "row_index": ([0, 1, 1, 1, 4, 4], np.int32),
    "starts": ([128, 0, 0, 0], np.int32),
    "num_tokens": ([1, 3, 0, 0], np.int32),
    "slots": ([2, 1, 0, 0], np.int32),
    "temperatures": ([0.5, 0, 0, 0], np.float32),
    "top_ks": ([7, 0, 0, 0], np.int32),
    "top_ps": ([0.25, 1, 1, 1], np.float32),
    "seed_low": ([2**32 - 7, 2**32 - 1, 0, 0], np.uint32),
    "seed_high": ([5, 2**31 - 1, 0, 0], np.uint32),
    "block_tables": ([[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]], np.int32),
}


def test_every_array_is_padded_to_the_bucket() -> None:
    step = pack(make_plan())
    assert (step.kind, step.bucket) == (StepKind.PREFILL, BUCKET)
    assert (step.num_rows, step.num_tokens_total) == (2, 4)
    assert set(layout(BUCKET)) == set(EXPECTED)
    for name, (values, dtype) in EXPECTED.items():
        array = getattr(step, name)
        assert array.dtype == dtype, name
        np.testing.assert_array_equal(array, values, err_msg=name)


def test_the_buffer_holds_every_array_where_the_layout_says() -> None:
    buffer = pack(make_plan()).buffer
    stop = 0
    for name, (offset, shape, dtype) in layout(BUCKET).items():
        assert offset == stop, name
        stop = offset + int(np.prod(shape))
        values = buffer[offset:stop].view(dtype).reshape(shape)
        np.testing.assert_array_equal(values, EXPECTED[name][0], err_msg=name)
    assert stop == len(buffer)


def test_a_tail_adds_its_columns_before_the_block_tables() -> None:
    starts = [np.array(pair, np.int32) for pair in ((130, 1), (40, 0), (128, 0))]
    tail = StepTail(3, *starts)
    step = pack(replace(make_plan(), tail=tail))
    assert (step.num_tail_tokens, pack(make_plan()).num_tail_tokens) == (3, None)
    np.testing.assert_array_equal(step.tail_starts, [130, 1, 0, 0])
    np.testing.assert_array_equal(step.visible_starts, [40, 0, 0, 0])
    np.testing.assert_array_equal(step.entry_starts, [128, 0, 0, 0])
    places = layout(BUCKET, has_tail=True)
    assert list(places)[-4:-1] == ["visible_starts", "entry_starts", "tail_starts"]
    offset, shape, dtype = places["tail_starts"]
    np.testing.assert_array_equal(step.buffer[offset : offset + 4].view(dtype), [130, 1, 0, 0])
    for name, (values, _) in EXPECTED.items():
        offset, shape, dtype = places[name]
        array = step.buffer[offset : offset + int(np.prod(shape))].view(dtype).reshape(shape)
        np.testing.assert_array_equal(array, values, err_msg=name)


def test_packed_steps_share_no_memory() -> None:
    first, second = pack(make_plan()), pack(make_plan())
    first.buffer[:] = -1
    np.testing.assert_array_equal(second.row_index, EXPECTED["row_index"][0])
    np.testing.assert_array_equal(pack(make_plan()).top_ps, EXPECTED["top_ps"][0])


@pytest.mark.parametrize(
    ("bucket", "num_blocks"),
    [(Bucket(1, 6, 3), 3), (Bucket(4, 3, 3), 3), (Bucket(4, 6, 4), 3), (Bucket(4, 6, 3), 4)],
)
def test_a_plan_outside_its_bucket_is_refused(bucket: Bucket, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="2 rows, 4 tokens and block tables"):
        pack(make_plan(bucket, num_blocks))
