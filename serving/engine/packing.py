"""StepPlan -> the arrays a compiled step takes, padded to its bucket.

All arrays of a step are views into one int32 buffer, so that a step can be sent to the device in
a single copy; `layout` says where each array stands in it.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.step_plan import StepPlan

IMAGE_FEATURE = -1
"""Stands among the token ids where a computed image feature takes the place of an embedding."""


class ArrayPlace(NamedTuple):
    """An array of a packed step: `shape` values of the 4-byte `dtype` from `offset` (in values)."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """The arrays of one step, padded to a bucket of `R` rows, `T` tokens and `B` blocks.

    Attributes:
        kind, bucket: the compiled step to run.
        num_rows, num_tokens_total: what is in use; the rest is padding.
        token_ids: [T] int32, padded with 0; `IMAGE_FEATURE` for the tokens of the step's images.
        row_index: [T] int32, the row of each token, padded with R.
        starts: [R] int32, absolute position of each row's first token, padded with 0.
        num_tokens: [R] int32, padded with 0.
        slots: [R] int32, padded with 0.
        block_tables: [R, B] int32, padded with 0.
        num_tail_tokens: what `StepTail` calls `num_tokens`; None for a step without a tail.
        visible_starts, entry_starts, tail_starts: [R] int32, padded with 0, of `StepTail`; None
            for a step without a tail.
        temperatures: [R] float32, padded with 0.   top_ks: [R] int32, padded with 0.
        top_ps: [R] float32, padded with 1.
        seed_low, seed_high: [R] uint32, the two halves of the seed, padded with 0.
        buffer: [N] int32, the memory that all arrays above share.
    """

    kind: StepKind
    bucket: Bucket
    num_rows: int
    num_tokens_total: int
    token_ids: np.ndarray
    row_index: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    seed_low: np.ndarray
    seed_high: np.ndarray
    buffer: np.ndarray
    num_tail_tokens: int | None = None
    visible_starts: np.ndarray | None = None
    entry_starts: np.ndarray | None = None
    tail_starts: np.ndarray | None = None


@cache
def layout(bucket: Bucket, has_tail: bool = False) -> dict[str, ArrayPlace]:
    """Where each array of `PackedStep` stands in its buffer, in order; block tables come last."""
    rows, tokens = (bucket.num_rows,), (bucket.num_tokens,)
    tail = {f"{name}_starts": (rows, np.int32) for name in ("visible", "entry", "tail")}
    arrays = {
        "token_ids": (tokens, np.int32),
        "row_index": (tokens, np.int32),
        "starts": (rows, np.int32),
        "num_tokens": (rows, np.int32),
        "slots": (rows, np.int32),
        "temperatures": (rows, np.float32),
        "top_ks": (rows, np.int32),
        "top_ps": (rows, np.float32),
        "seed_low": (rows, np.uint32),
        "seed_high": (rows, np.uint32),
        **(tail if has_tail else {}),
        "block_tables": ((bucket.num_rows, bucket.num_blocks), np.int32),
    }
    return places_of(arrays)


def places_of(arrays: dict[str, tuple[tuple[int, ...], type]]) -> dict[str, ArrayPlace]:
    """Places of arrays, given as shape and 4-byte type, one after another in a buffer."""
    places: dict[str, ArrayPlace] = {}
    offset = 0
    for name, (shape, dtype) in arrays.items():
        places[name] = ArrayPlace(offset, shape, np.dtype(dtype))
        offset += prod(shape)
    return places


@cache
def _padding(bucket: Bucket, has_tail: bool) -> np.ndarray:
    """A buffer of nothing but padding, without the block tables, which are most of it."""
    places = layout(bucket, has_tail)
    buffer = np.zeros(places["block_tables"].offset, np.int32)
    for name, value in (("row_index", bucket.num_rows), ("top_ps", 1.0)):
        offset, (length,), dtype = places[name]
        buffer[offset : offset + length].view(dtype)[:] = value
    buffer.flags.writeable = False
    return buffer


def empty_buffer(bucket: Bucket) -> np.ndarray:
    """The buffer of a step without a row."""
    tables = np.zeros(bucket.num_rows * bucket.num_blocks, np.int32)
    return np.concatenate([_padding(bucket, False), tables])


def _views(buffer: np.ndarray, bucket: Bucket, has_tail: bool) -> dict[str, np.ndarray]:
    return {
        name: buffer[offset : offset + prod(shape)].view(dtype).reshape(shape)
        for name, (offset, shape, dtype) in layout(bucket, has_tail).items()
    }


def pack(plan: StepPlan) -> PackedStep:
    """Pad a plan to its bucket.

    Raises:
        ValueError: the plan does not fit its bucket.
    """
    bucket, num_rows, num_tokens = plan.bucket, plan.num_rows, len(plan.token_ids)
    num_blocks = plan.block_tables.shape[1]
    if (
        num_rows > bucket.num_rows
        or num_tokens > bucket.num_tokens
        or num_blocks != bucket.num_blocks
    ):
        raise ValueError(
            f"step {plan.step_index} has {num_rows} rows, {num_tokens} tokens and block tables "
            f"{num_blocks} wide; its bucket is {bucket}; plan it with a larger bucket"
        )
    tail = plan.tail
    padding = _padding(bucket, tail is not None)
    buffer = np.empty(len(padding) + bucket.num_rows * bucket.num_blocks, np.int32)
    buffer[: len(padding)] = padding
    views = _views(buffer, bucket, tail is not None)
    views["token_ids"][:num_tokens] = plan.token_ids
    for place in plan.images:
        end = place.token_index + place.image.num_tokens
        views["token_ids"][place.token_index : end] = IMAGE_FEATURE
    views["row_index"][:num_tokens] = np.repeat(np.arange(num_rows), plan.num_tokens)
    views["starts"][:num_rows] = plan.starts
    views["num_tokens"][:num_rows] = plan.num_tokens
    views["slots"][:num_rows] = plan.slots
    views["block_tables"][:num_rows] = plan.block_tables
    views["block_tables"][num_rows:] = 0
    views["temperatures"][:num_rows] = plan.temperatures
    views["top_ks"][:num_rows] = plan.top_ks
    views["top_ps"][:num_rows] = plan.top_ps
    seeds = np.ascontiguousarray(plan.seeds, dtype="<i8").view("<u4").reshape(num_rows, 2)
    views["seed_low"][:num_rows] = seeds[:, 0]
    views["seed_high"][:num_rows] = seeds[:, 1]
    num_tail_tokens = None
    if tail is not None:
        views["visible_starts"][:num_rows] = tail.visible_starts
        views["entry_starts"][:num_rows] = tail.entry_starts
        views["tail_starts"][:num_rows] = tail.starts
        num_tail_tokens = tail.num_tokens
    return PackedStep(
        plan.kind,
        bucket,
        num_rows,
        num_tokens,
        buffer=buffer,
        num_tail_tokens=num_tail_tokens,
        **views,
    )
