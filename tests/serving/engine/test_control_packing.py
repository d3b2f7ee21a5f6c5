"""Goal: the controls of a step stand where the compiled step looks for them, with neutral values
for padding rows, and changes of counts are cut into calls without loss.

Method: distinct values in every column, read back through the layout; cuts of every size compared
with the whole.
"""

import dataclasses
from math import prod

import numpy as np
import pytest

from serving.core.buckets import Bucket, StepKind
from serving.core.controls import NO_BIAS, CountEdits, StepControls
from serving.core.request import LOGIT_BIASES_MAX
from serving.engine.control_packing import (
    layout,
    num_samples,
    pack_masks,
    pack_settings,
    settings_size,
    split_edits,
)

BUCKET = Bucket(num_rows=3, num_tokens=5, num_blocks=1)


def make_controls() -> StepControls:
    bias_tokens = np.full((2, LOGIT_BIASES_MAX), NO_BIAS, np.int32)
    bias_tokens[1, 0] = 7
    bias_values = np.zeros((2, LOGIT_BIASES_MAX), np.float32)
    bias_values[1, 0] = -2.5
    return StepControls(
        adjusts=True,
        reports=True,
        min_ps=np.array([0.25, 0], np.float32),
        repetition_penalties=np.array([1, 1.5], np.float32),
        presence_penalties=np.array([-1, 0.5], np.float32),
        frequency_penalties=np.array([2, 0], np.float32),
        next_tokens=np.array([-1, 9], np.int32),
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        masks=None,
        count_edits=None,
    )


def read(buffer: np.ndarray) -> dict[str, np.ndarray]:
    return {
        name: buffer[offset : offset + prod(shape)].view(dtype).reshape(shape)
        for name, (offset, shape, dtype) in layout(BUCKET).items()
    }


def test_every_setting_is_padded_to_the_bucket() -> None:
    found = read(pack_settings(make_controls(), BUCKET))
    assert found["adjusts"].tolist() == found["reports"].tolist() == [1]
    assert found["min_ps"].tolist() == [0.25, 0, 0]
    assert found["repetition_penalties"].tolist() == [1, 1.5, 1]
    assert found["presence_penalties"].tolist() == [-1, 0.5, 0]
    assert found["frequency_penalties"].tolist() == [2, 0, 0]
    assert found["next_tokens"].tolist() == [-1, 9, -1]
    assert found["bias_tokens"][:, :2].tolist() == [[NO_BIAS] * 2, [7, NO_BIAS], [NO_BIAS] * 2]
    assert found["bias_values"][:, 0].tolist() == [0, -2.5, 0]
    quiet = dataclasses.replace(make_controls(), adjusts=False, reports=False)
    assert read(pack_settings(quiet, BUCKET))["adjusts"][0] == 0
    assert read(pack_settings(quiet, BUCKET))["reports"][0] == 0


def test_the_layout_fills_the_buffer() -> None:
    stop = 0
    for offset, shape, dtype in layout(BUCKET).values():
        assert offset == stop and dtype.itemsize == 4
        stop += prod(shape)
    assert stop == settings_size(BUCKET) == len(pack_settings(None, BUCKET))


def test_no_controls_ask_for_nothing() -> None:
    found = read(pack_settings(None, BUCKET))
    assert found["adjusts"][0] == found["reports"][0] == 0
    assert (found["next_tokens"] == -1).all() and (found["repetition_penalties"] == 1).all()


@pytest.mark.parametrize(("kind", "rows"), [(StepKind.PREFILL, 3), (StepKind.DECODE, 5)])
def test_masks_cover_every_sampled_token(kind: StepKind, rows: int) -> None:
    assert num_samples(kind, BUCKET) == rows
    masks = np.array([[1, 2], [3, 4]], np.int32)
    packed = pack_masks(masks, kind, BUCKET, 2)
    assert packed.tolist() == [[1, 2], [3, 4]] + [[-1, -1]] * (rows - 2)
    assert (pack_masks(None, kind, BUCKET, 2) == -1).all()


@pytest.mark.parametrize("num_edits", [0, 1, 3, 4, 9])
def test_edits_are_cut_without_loss(num_edits: int) -> None:
    slots, tokens, values = np.arange(3 * num_edits, dtype=np.int32).reshape(3, num_edits) % 5
    edits = CountEdits(np.array([2, 0], np.int32), slots, tokens, values)
    calls = list(split_edits(edits, 4, 6))
    assert len(calls) == max(-(-num_edits // 4), 1)
    cleared = [call[0].tolist() for call in calls]
    assert cleared == [[2, 0, 6, 6, 6, 6]] + [[6] * 6] * (len(calls) - 1)
    for index, expected in enumerate((slots, tokens, values), 1):
        found = np.concatenate([call[index] for call in calls])
        assert found[:num_edits].tolist() == expected.tolist()
        assert all(call[index].shape == (4,) for call in calls)
    # Padding must not reach a slot.
    assert (np.concatenate([call[1] for call in calls])[num_edits:] == 6).all()
