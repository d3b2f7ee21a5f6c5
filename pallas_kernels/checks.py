"""Checks at the door: a wrong call becomes one `ValueError` that names values and expectation.

Shapes and types are always checked, since they cost nothing in a compiled step. Contents are
checked in debug mode only (`debug_mode`), and then where the arrays are at hand: a call under
`jax.jit` has none, so debug a step by running it under `jax.disable_jit`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.scaled_array import ScaledArray

_debug: ContextVar[bool] = ContextVar("pallas_kernels_debug", default=False)


@contextlib.contextmanager
def debug_mode() -> Iterator[None]:
    """Inside, every call of an operation also checks the contents of its index arrays."""
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


def expect(holds: bool, name: str, received: object, expected: str) -> None:
    """Raises `ValueError` unless `holds`."""
    if not holds:
        raise ValueError(f"{name} is {received}; expected {expected}")


def expect_both(name: str, value: object, other_name: str, other: object) -> None:
    """Raises `ValueError` unless both values or neither are None."""
    received = "None" if value is None else "given"
    expect((value is None) == (other is None), name, received, f"None exactly when {other_name} is")


def expect_integers(**arrays: jax.Array) -> None:
    """Raises `ValueError` unless every array is int32, naming the first that is not."""
    for name, array in arrays.items():
        expect(array.dtype == jnp.int32, name, array.dtype, "int32")


def expect_range(name: str, array: jax.Array, low: int, high: int) -> None:
    """In debug mode, raises `ValueError` for the first entry outside `low` to `high - 1`."""
    if not _debug.get() or isinstance(array, Tracer):
        return
    values = np.asarray(array)
    outside = np.argwhere((values < low) | (values >= high))
    if outside.size:
        at = tuple(int(i) for i in outside[0])
        place = ", ".join(str(i) for i in at)
        raise ValueError(f"{name}[{place}] is {values[at]}; expected {low} to {high - 1}")


def expect_distinct(name: str, *columns: jax.Array, where: Any = True) -> None:
    """In debug mode, raises `ValueError` if a tuple of `columns` occurs twice among `where`."""
    if not _debug.get() or any(isinstance(column, Tracer) for column in columns):
        return
    rows = np.stack([np.asarray(column) for column in columns], axis=1)[np.asarray(where)]
    values, counts = np.unique(rows, axis=0, return_counts=True)
    if np.any(counts > 1):
        twice = tuple(int(i) for i in values[np.argmax(counts > 1)])
        raise ValueError(f"{name} {twice} occurs {int(counts.max())} times; expected once")


def format_name(array: ScaledArray | jax.Array) -> str:
    """How values are stored, for messages."""
    return array.format.name if isinstance(array, ScaledArray) else "unquantised"


def expect_sampling(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    **columns: jax.Array,
) -> None:
    """Raises `ValueError` unless logits and the settings of their rows have their shapes."""
    expect(logits.ndim == 2, "logits", logits.shape, "[M, V]")
    expect_rows(logits.shape[0], temperature, top_k, top_p, seed, **columns)


def expect_rows(
    num_rows: int,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    **columns: jax.Array,
) -> None:
    """Raises `ValueError` unless each of the settings has one value for each row."""
    expect(seed.shape == (num_rows, 2), "seed", seed.shape, f"[{num_rows}, 2]")
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, **columns}
    for name, column in columns.items():
        expect(column.shape == (num_rows,), name, column.shape, f"[{num_rows}]")


def expect_entries(
    entries: ScaledArray | jax.Array, entry_index: jax.Array, num_tokens: int, width: int
) -> None:
    """Raises `ValueError` unless selected entries can be looked up in `entries`."""
    fits = entries.ndim == 3 and entries.shape[-1] == width
    expect(fits, "entries", entries.shape, f"[num_blocks, entries_per_block, {width}]")
    fits = entry_index.ndim == 2 and entry_index.shape[0] == num_tokens
    expect(fits, "entry_index", entry_index.shape, f"[{num_tokens}, K]")
    expect_integers(entry_index=entry_index)
    expect_range("entry_index", entry_index, -1, entries.shape[0] * entries.shape[1])


def expect_streams(streams: jax.Array, output: jax.Array | None, weight: jax.Array) -> None:
    """Raises `ValueError` unless streams, their weights and an output belong together."""
    expect(streams.ndim == 3, "streams", streams.shape, "[T, S, D]")
    num_tokens, num_streams, width = streams.shape
    expect(
        weight.shape == (num_tokens, num_streams),
        "weights of the streams",
        weight.shape,
        f"[{num_tokens}, {num_streams}]",
    )
    if output is not None:
        fits = output.shape == (num_tokens, width)
        expect(fits, "output", output.shape, f"[{num_tokens}, {width}]")
