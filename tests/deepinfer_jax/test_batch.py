"""Goal: what the host packs is what the device sees, and every token knows its place. Method: a
small ragged step by hand.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import (
    LAST_SAMPLED,
    StepBatch,
    StepShape,
    TokenView,
    buffer_size,
    feed_sampled,
    keep_sampled,
    last_tokens,
    pack,
    start_at_lengths,
)
from tests.deepinfer_jax.golden_model import batch_arrays, to_batch

SHAPE = StepShape(num_rows=4, num_tokens=8, num_blocks=2, samples_every_token=False)
ROWS = [(np.array([5, 6, 7]), 10, 3, [1, 2]), (np.array([8]), 0, 1, [4])]


def test_packing_keeps_every_bit() -> None:
    arrays = batch_arrays(SHAPE, ROWS)
    arrays["seed_high"][:] = 2**32 - 1
    arrays["temperatures"][:] = [0.1, 0.2, 0.3, np.nan]
    buffer = pack(arrays, SHAPE)
    assert buffer.dtype == np.int32 and len(buffer) == buffer_size(SHAPE)
    batch = StepBatch.unpack(jnp.asarray(buffer), SHAPE)
    for name, array in arrays.items():
        received = np.asarray(getattr(batch, name))
        assert received.dtype == array.dtype
        np.testing.assert_array_equal(received, array, err_msg=name)


def test_token_view() -> None:
    view = TokenView.of(to_batch(SHAPE, batch_arrays(SHAPE, ROWS)))
    np.testing.assert_array_equal(view.is_real, [True] * 4 + [False] * 4)
    np.testing.assert_array_equal(view.row[:4], [0, 0, 0, 1])
    np.testing.assert_array_equal(view.history.position, [10, 11, 12, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(view.history.row_start, [10, 10, 10, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(view.history.slot, [3, 3, 3, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(view.row_end, [13, 13, 13, 1, 0, 0, 0, 0])


def test_last_tokens() -> None:
    batch = to_batch(SHAPE, batch_arrays(SHAPE, ROWS))
    np.testing.assert_array_equal(last_tokens(batch)[:2], [2, 3])
    empty = to_batch(SHAPE, batch_arrays(SHAPE, []))
    np.testing.assert_array_equal(last_tokens(empty), [0] * 4)


def test_references_are_replaced_by_what_the_slot_sampled() -> None:
    arrays = batch_arrays(SHAPE, [(np.array([LAST_SAMPLED, 6]), 10, 3, [1]), *ROWS[1:]])
    arrays["token_ids"][2] = LAST_SAMPLED
    sampled = jnp.array([90, 91, 92, 93, 94])
    batch = feed_sampled(to_batch(SHAPE, arrays), sampled)
    np.testing.assert_array_equal(batch.token_ids, [93, 6, 91, 0, 0, 0, 0, 0])
    kept = keep_sampled(batch, jnp.array([7, 8, 9, 9]), sampled)
    np.testing.assert_array_equal(kept, [90, 8, 92, 7, 94])


def test_rows_that_feed_references_start_where_the_device_says() -> None:
    arrays = batch_arrays(SHAPE, [(np.array([LAST_SAMPLED, 0]), 16, 3, [1]), *ROWS[1:]])
    batch = start_at_lengths(to_batch(SHAPE, arrays), jnp.array([50, 51, 52, 12, 54]))
    np.testing.assert_array_equal(batch.starts[:2], [12, 0])


def test_samples() -> None:
    assert SHAPE.num_samples == 4
    assert StepShape(4, 8, 2, samples_every_token=True).num_samples == 8


def test_a_wrong_field_is_refused() -> None:
    arrays = batch_arrays(SHAPE, ROWS)
    with pytest.raises(ValueError, match=r"starts has shape \(3,\); expected \(4,\)"):
        pack({**arrays, "starts": np.zeros(3, np.int32)}, SHAPE)
    arrays.pop("slots")
    with pytest.raises(ValueError, match="batch fields are"):
        pack(arrays, SHAPE)
