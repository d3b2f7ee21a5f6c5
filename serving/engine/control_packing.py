"""StepControls -> the arrays that a compiled step takes, padded to its bucket.

The settings of all rows share one int32 buffer, masks have another one, which is sent only when a
row has a grammar. `packing.py` does the same for what every step has.
"""

from collections.abc import Iterator
from functools import cache
from math import prod

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.controls import ANY_TOKEN, NO_BIAS, CountEdits, StepControls
from serving.core.request import LOGIT_BIASES_MAX
from serving.engine.packing import ArrayPlace, places_of


@cache
def layout(bucket: Bucket) -> dict[str, ArrayPlace]:
    """Where each setting stands in the buffer, in order."""
    rows, biases = (bucket.num_rows,), (bucket.num_rows, LOGIT_BIASES_MAX)
    arrays: dict[str, tuple[tuple[int, ...], type]] = {
        "adjusts": ((1,), np.int32),
        "reports": ((1,), np.int32),
        "min_ps": (rows, np.float32),
        "repetition_penalties": (rows, np.float32),
        "presence_penalties": (rows, np.float32),
        "frequency_penalties": (rows, np.float32),
        "next_tokens": (rows, np.int32),
        "bias_tokens": (biases, np.int32),
        "bias_values": (biases, np.float32),
    }
    return places_of(arrays)


def settings_size(bucket: Bucket) -> int:
    """Words of the settings of a bucket."""
    return sum(prod(place.shape) for place in layout(bucket).values())


_PADDING = {"repetition_penalties": 1, "next_tokens": -1, "bias_tokens": NO_BIAS}


def pack_settings(controls: StepControls | None, bucket: Bucket) -> np.ndarray:
    """[N] int32, the settings with neutral ones for padding rows; None asks for nothing."""
    buffer = np.zeros(settings_size(bucket), np.int32)
    for name, (offset, shape, dtype) in layout(bucket).items():
        view = buffer[offset : offset + prod(shape)].view(dtype).reshape(shape)
        view[...] = _PADDING.get(name, 0)
        if controls is not None:
            value = getattr(controls, name)
            if isinstance(value, np.ndarray):
                view[: len(value)] = value
            else:
                view[0] = value
    return buffer


def pack_masks(masks: np.ndarray | None, kind: StepKind, bucket: Bucket, words: int) -> np.ndarray:
    """[M, W] int32, W = `words`; any token may follow where there is no mask."""
    packed = np.full((num_samples(kind, bucket), words), ANY_TOKEN, np.int32)
    if masks is not None:
        packed[: len(masks)] = masks
    return packed


def num_samples(kind: StepKind, bucket: Bucket) -> int:
    """Tokens that a compiled step samples."""
    return bucket.num_tokens if kind is StepKind.DECODE else bucket.num_rows


def no_edits(size: int, num_slots: int) -> tuple[np.ndarray, ...]:
    """A call of `split_edits` that changes nothing."""
    cleared = np.full(num_slots, num_slots, np.int32)
    slots, tokens, values = np.zeros((3, size), np.int32)
    slots[:] = num_slots
    return cleared, slots, tokens, values


def split_edits(edits: CountEdits, size: int, num_slots: int) -> Iterator[tuple[np.ndarray, ...]]:
    """The edits in calls of (cleared [C], slots, tokens, values [size]), in order.

    C is the number of slots, for no more can be cleared. Padding names the slot past the last.
    """
    cleared = np.full(num_slots, num_slots, np.int32)
    cleared[: len(edits.cleared)] = edits.cleared
    for first in range(0, max(len(edits.slots), 1), size):
        some = slice(first, first + size)
        num_edits = len(edits.slots[some])
        _, slots, tokens, values = no_edits(size, num_slots)
        slots[:num_edits] = edits.slots[some]
        tokens[:num_edits] = edits.tokens[some]
        values[:num_edits] = edits.values[some]
        yield cleared, slots, tokens, values
        cleared = np.full(num_slots, num_slots, np.int32)
