"""The arrays that one step consumes, and their single trip to the device.

A step is a run of tokens, several sequences (*rows*) one after another. Prefill and decode have
the same form: a prefill row brings a chunk of its prompt, a decode row one to six tokens. What
differs is only which tokens are sampled from.

All host values of a step travel as one int32 buffer (`pack`), since every separate transfer costs
as much as a small one; `StepBatch.unpack` cuts it apart again inside the compiled step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.history import TokenHistory

IMAGE_FEATURE = -1
"""Stands in `token_ids` for an image token whose embedding is computed from the image."""

LAST_SAMPLED = -2
"""Stands in `token_ids` for the token that the row's slot sampled last, which need not be known on
the host yet."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Bounded replay: a step whose sequences may lack parts of their recent past.

    Attributes:
        num_tail_tokens: 0 runs every token through every layer and only narrows what may be
            seen. Otherwise the layers from the last KV source up run that many tokens, those at
            or after `StepBatch.tail_starts`; the host sees to it that no more are there.
    """

    num_tail_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """Static shape of a step: `R` rows, `T` tokens over all rows, `B` columns of block tables.

    `samples_every_token` is true for decode (T results) and false for prefill (R results, one
    after each row's last token). `replay` None is the exact model: all of a sequence's past exists.
    """

    num_rows: int
    num_tokens: int
    num_blocks: int
    samples_every_token: bool
    replay: Replay | None = None

    @property
    def name(self) -> str:
        """What the compiled step of this shape is called in traces."""
        kind = "decode" if self.samples_every_token else "prefill"
        replay = "" if self.replay is None else f"_replay{self.replay.num_tail_tokens}"
        return f"{kind}_r{self.num_rows}_t{self.num_tokens}_b{self.num_blocks}{replay}"

    @property
    def num_samples(self) -> int:
        """Tokens that the step samples."""
        return self.num_tokens if self.samples_every_token else self.num_rows

    def num_sampled(self, batch: "StepBatch") -> jax.Array:
        """[] int32, how many of those belong to real tokens or rows; they are the first ones."""
        counts = batch.num_tokens
        return jnp.sum(counts if self.samples_every_token else counts > 0, dtype=jnp.int32)


class StepBatch(NamedTuple):
    """One step. Padding tokens have `row_index` R; padding rows have `num_tokens` 0.

    Attributes:
        token_ids: [T] int32; `IMAGE_FEATURE` where an image feature takes an embedding's place,
            `LAST_SAMPLED` where the token is on the device only.
        row_index: [T] int32, row of each token; the tokens of a row are adjacent and in order.
        starts: [R] int32, position of each row's first token.
        num_tokens: [R] int32.
        slots: [R] int32, state slot of each row.
        block_tables: [R, B] int32.
        temperatures: [R] float32.
        top_ks: [R] int32.
        top_ps: [R] float32.
        seed_low, seed_high: [R] uint32, the halves of the seed.
        visible_starts: [R] int32, only with `StepShape.replay`: window entries and compressed
            entries of earlier positions are neither made nor, for windows, seen. A row begins up
            to three tokens before it, so that the n-grams of its first tokens are whole.
        entry_starts: [R] int32, only with `StepShape.replay`: compressed entries of earlier
            positions are there already and stay as they are, however much was visible here.
        tail_starts: [R] int32, only with `StepShape.replay`: the first position that the layers
            from the last KV source up compute; 0 for all.
    """

    token_ids: jax.Array
    row_index: jax.Array
    starts: jax.Array
    num_tokens: jax.Array
    slots: jax.Array
    block_tables: jax.Array
    temperatures: jax.Array
    top_ks: jax.Array
    top_ps: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    visible_starts: jax.Array | None = None
    entry_starts: jax.Array | None = None
    tail_starts: jax.Array | None = None

    @property
    def seeds(self) -> jax.Array:
        """[R, 2] uint32, high half first."""
        return jnp.stack([self.seed_high, self.seed_low], axis=1)

    @classmethod
    def unpack(cls, buffer: jax.Array, shape: StepShape) -> "StepBatch":
        """The batch whose `pack` gave `buffer`, inside or outside a compiled function."""
        parts, offset = {}, 0
        for name, (dims, dtype) in fields(shape).items():
            size = int(np.prod(dims))
            words = buffer[offset : offset + size].reshape(dims)
            parts[name] = jax.lax.bitcast_convert_type(words, dtype)
            offset += size
        return cls(**parts)


def buffer_size(shape: StepShape) -> int:
    """Words in the buffer of a step of this shape."""
    return sum(int(np.prod(dims)) for dims, _ in fields(shape).values())


def pack(arrays: dict[str, np.ndarray], shape: StepShape) -> np.ndarray:
    """One int32 buffer of the fields of a `StepBatch`, given by name as numpy arrays.

    Raises:
        ValueError: a field is missing, unknown or has another shape than `shape` says.
    """
    expected = fields(shape)
    if arrays.keys() != expected.keys():
        raise ValueError(f"batch fields are {sorted(arrays)}; expected {sorted(expected)}")
    words = []
    for name, (dims, dtype) in expected.items():
        if arrays[name].shape != dims:
            raise ValueError(f"{name} has shape {arrays[name].shape}; expected {dims}")
        words.append(np.ascontiguousarray(arrays[name], dtype).reshape(-1).view(np.int32))
    return np.concatenate(words)


def fields(shape: StepShape) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and 4-byte type of each field of a `StepBatch`, in the order they lie in a buffer."""
    rows, tokens = (shape.num_rows,), (shape.num_tokens,)
    names = ("visible_starts", "entry_starts", "tail_starts")
    replay = {name: (rows, np.int32) for name in names}
    return {
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
        **(replay if shape.replay is not None else {}),
        "block_tables": ((shape.num_rows, shape.num_blocks), np.int32),
    }


def feed_sampled(batch: StepBatch, sampled: jax.Array) -> StepBatch:
    """The batch with `sampled[slot]` in the places of `LAST_SAMPLED`; `sampled` [S] int32."""
    row = jnp.minimum(batch.row_index, batch.starts.shape[0] - 1)
    is_reference = batch.token_ids == LAST_SAMPLED
    token_ids = jnp.where(is_reference, sampled[batch.slots[row]], batch.token_ids)
    return batch._replace(token_ids=token_ids)


def keep_sampled(batch: StepBatch, tokens: jax.Array, sampled: jax.Array) -> jax.Array:
    """`sampled` [S] int32 with the `tokens` [R] in the slots of the real rows."""
    # One past the end is dropped.
    place = jnp.where(batch.num_tokens > 0, batch.slots, sampled.shape[0])
    return sampled.at[place].set(tokens, mode="drop")


def start_at_lengths(batch: StepBatch, lengths: jax.Array) -> StepBatch:
    """The batch whose rows that feed `LAST_SAMPLED` start at `lengths[slot]`; [S] int32.

    Where the step before such a row ended is not known on the host if it verified drafts.
    """
    first = jnp.cumsum(batch.num_tokens) - batch.num_tokens
    is_reference = batch.token_ids[first] == LAST_SAMPLED
    return batch._replace(starts=jnp.where(is_reference, lengths[batch.slots], batch.starts))


class TokenView(NamedTuple):
    """What each token needs to know of its row, [T] each.

    Attributes:
        row: row of the token; a padding token names the last row, harmlessly.
        is_real: false for padding.
        history: position, first position of the row in this step, state slot.
        row_end: position after the row's last token of this step.
        first_entry: position before which compressed entries are not written; None is that before
            which nothing is visible.
    """

    row: jax.Array
    is_real: jax.Array
    history: TokenHistory
    row_end: jax.Array
    first_entry: jax.Array | None = None

    @classmethod
    def of(cls, batch: StepBatch) -> "TokenView":
        """Works the view out of a batch. Padding tokens stand at position 0 of slot 0."""
        num_rows = batch.starts.shape[0]
        is_real = batch.row_index < num_rows
        row = jnp.minimum(batch.row_index, num_rows - 1)
        first = (jnp.cumsum(batch.num_tokens) - batch.num_tokens)[row]
        offset = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32) - first
        start = batch.starts[row]
        position = jnp.where(is_real, start + offset, 0)
        history = TokenHistory(
            position=position,
            row_start=jnp.where(is_real, start, 0),
            slot=jnp.where(is_real, batch.slots[row], 0),
            first_visible=_row_value(batch.visible_starts, row),
        )
        row_end = jnp.where(is_real, start + batch.num_tokens[row], 0)
        first_entry = None
        if batch.entry_starts is not None:
            first_entry = jnp.maximum(history.first_visible, batch.entry_starts[row])
        return cls(row, is_real, history, row_end, first_entry)


def tail_view(batch: StepBatch) -> TokenView:
    """The view of layers that know no position before `tail_starts`.

    Tokens before it are still there and see nothing of their window, nor does anyone see them.
    """
    view = TokenView.of(batch)
    tail = _row_value(batch.tail_starts, view.row)
    history = view.history._replace(first_visible=jnp.maximum(view.history.first_visible, tail))
    return view._replace(history=history, is_real=view.is_real & (view.history.position >= tail))


def tail_tokens(batch: StepBatch, num_tokens: int) -> tuple[jax.Array, StepBatch]:
    """Index [`num_tokens`] int32 of the tokens at or after `tail_starts`, and their batch.

    The index is ascending and then T, past the end; a row may have no token left.
    """
    tail = tail_view(batch)
    total = batch.token_ids.shape[0]
    (index,) = jnp.nonzero(tail.is_real, size=num_tokens, fill_value=total)
    ends = batch.starts + batch.num_tokens
    assert batch.tail_starts is not None
    starts = jnp.clip(batch.tail_starts, batch.starts, ends)
    num_rows = batch.starts.shape[0]
    return index, batch._replace(
        token_ids=batch.token_ids.at[index].get(mode="fill", fill_value=0),
        row_index=batch.row_index.at[index].get(mode="fill", fill_value=num_rows),
        starts=starts,
        num_tokens=ends - starts,
    )


def _row_value(values: jax.Array | None, row: jax.Array) -> jax.Array:
    return jnp.zeros_like(row) if values is None else values[row]


def last_tokens(batch: StepBatch) -> jax.Array:
    """[R] int32, index of each row's last token; 0 for a padding row."""
    return jnp.maximum(jnp.cumsum(batch.num_tokens) - 1, 0).astype(jnp.int32)
