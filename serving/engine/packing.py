"""StepPlan -> the arrays a compiled step takes, padded to its bucket.

All arrays of a step are views into one int32 buffer, so that a step can be sent to the device in
a single copy; `layout` says where each array stands in it.
"""

from dataclasses import dataclass
from functools import cache, cached_property
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


_COLUMNS = (
    "starts",
    "num_tokens",
    "slots",
    "temperatures",
    "top_ks",
    "top_ps",
    "seed_low",
    "seed_high",
)
"""The arrays with a value for each row, in the order in which they stand in a buffer."""

_STARTS, _NUM_TOKENS, _SLOTS, _TEMPERATURES, _TOP_KS, _TOP_PS, _SEED_LOW, _SEED_HIGH = range(
    len(_COLUMNS)
)

_TAIL_COLUMNS = ("visible_starts", "entry_starts", "tail_starts")
"""Those that follow them in a step with a tail."""


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The arrays of one step, padded to a bucket of `R` rows, `T` tokens and `B` blocks.

    Attributes:
        kind, bucket: the compiled step to run.
        num_rows, num_tokens_total: what is in use; the rest is padding.
        buffer: [N] int32, the memory of all arrays, which are made when they are asked for: most
            steps are only sent.
        num_tail_tokens: what `StepTail` calls `num_tokens`; None for a step without a tail.
    """

    kind: StepKind
    bucket: Bucket
    num_rows: int
    num_tokens_total: int
    buffer: np.ndarray
    num_tail_tokens: int | None = None

    @cached_property
    def token_ids(self) -> np.ndarray:
        """[T] int32, padded with 0; `IMAGE_FEATURE` for the tokens of the step's images."""
        return self._array("token_ids")

    @cached_property
    def row_index(self) -> np.ndarray:
        """[T] int32, the row of each token, padded with R."""
        return self._array("row_index")

    @cached_property
    def starts(self) -> np.ndarray:
        """[R] int32, absolute position of each row's first token, padded with 0."""
        return self._array("starts")

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """[R] int32, padded with 0."""
        return self._array("num_tokens")

    @cached_property
    def slots(self) -> np.ndarray:
        """[R] int32, padded with 0."""
        return self._array("slots")

    @cached_property
    def block_tables(self) -> np.ndarray:
        """[R, B] int32, padded with 0."""
        return self._array("block_tables")

    @cached_property
    def temperatures(self) -> np.ndarray:
        """[R] float32, padded with 0."""
        return self._array("temperatures")

    @cached_property
    def top_ks(self) -> np.ndarray:
        """[R] int32, padded with 0."""
        return self._array("top_ks")

    @cached_property
    def top_ps(self) -> np.ndarray:
        """[R] float32, padded with 1."""
        return self._array("top_ps")

    @cached_property
    def seed_low(self) -> np.ndarray:
        """[R] uint32, the lower half of each seed, padded with 0."""
        return self._array("seed_low")

    @cached_property
    def seed_high(self) -> np.ndarray:
        """[R] uint32, the upper half."""
        return self._array("seed_high")

    @cached_property
    def visible_starts(self) -> np.ndarray | None:
        """[R] int32, padded with 0, of `StepTail`; None for a step without a tail."""
        return None if self.num_tail_tokens is None else self._array("visible_starts")

    @cached_property
    def entry_starts(self) -> np.ndarray | None:
        """[R] int32, padded with 0, of `StepTail`; None for a step without a tail."""
        return None if self.num_tail_tokens is None else self._array("entry_starts")

    @cached_property
    def tail_starts(self) -> np.ndarray | None:
        """[R] int32, padded with 0, of `StepTail`; None for a step without a tail."""
        return None if self.num_tail_tokens is None else self._array("tail_starts")

    def _array(self, name: str) -> np.ndarray:
        offset, shape, dtype = layout(self.bucket, self.num_tail_tokens is not None)[name]
        return self.buffer[offset : offset + prod(shape)].view(dtype).reshape(shape)


@cache
def layout(bucket: Bucket, has_tail: bool = False) -> dict[str, ArrayPlace]:
    """Where each array of `PackedStep` stands in its buffer, in order; block tables come last."""
    rows, tokens = (bucket.num_rows,), (bucket.num_tokens,)
    types = {"temperatures": np.float32, "top_ps": np.float32}
    types |= {"seed_low": np.uint32, "seed_high": np.uint32}
    columns = _COLUMNS + (_TAIL_COLUMNS if has_tail else ())
    arrays = {
        "token_ids": (tokens, np.int32),
        "row_index": (tokens, np.int32),
        **{name: (rows, types.get(name, np.int32)) for name in columns},
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
    token_ids, row_index = buffer[: 2 * bucket.num_tokens].reshape(2, -1)
    token_ids[:num_tokens] = plan.token_ids
    for place in plan.images:
        token_ids[place.token_index : place.token_index + place.image.num_tokens] = IMAGE_FEATURE
    row_index[:num_tokens] = np.repeat(np.arange(num_rows, dtype=np.int32), plan.num_tokens)
    columns = buffer[2 * bucket.num_tokens : len(padding)].reshape(-1, bucket.num_rows)
    floats = columns.view(np.float32)
    columns[_STARTS, :num_rows] = plan.starts
    columns[_NUM_TOKENS, :num_rows] = plan.num_tokens
    columns[_SLOTS, :num_rows] = plan.slots
    floats[_TEMPERATURES, :num_rows] = plan.temperatures
    columns[_TOP_KS, :num_rows] = plan.top_ks
    floats[_TOP_PS, :num_rows] = plan.top_ps
    seeds = np.ascontiguousarray(plan.seeds, dtype="<i8").view("<i4").reshape(num_rows, 2)
    columns[_SEED_LOW : _SEED_HIGH + 1, :num_rows] = seeds.T
    if tail is not None:
        columns[len(_COLUMNS) :, :num_rows] = tail.visible_starts, tail.entry_starts, tail.starts
    tables = buffer[len(padding) :].reshape(bucket.num_rows, bucket.num_blocks)
    tables[:num_rows] = plan.block_tables
    tables[num_rows:] = 0
    return PackedStep(
        plan.kind,
        bucket,
        num_rows,
        num_tokens,
        buffer,
        None if tail is None else tail.num_tokens,
    )
