"""Tile sizes of the kernels: the measured table where it has an entry, a heuristic otherwise.

A tile never changes a result: along the reduced dimension every kernel takes the same steps in the
same order whatever the number of rows, which is what makes a row's result independent of its
company. In the batch-invariant mode even the tile is the same for any number of rows, so what runs
is one program, and a call that no kernel covers is refused: XLA's own products and sums depend on
how many rows there are.
"""

import contextlib
import functools
import tomllib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from pallas_kernels.targets import Target

ROW_SIZES = (8, 16, 32, 64, 128)
INVARIANT_ROWS = 64
"""Rows of a tile in the batch-invariant mode."""

_invariant: ContextVar[bool] = ContextVar("pallas_kernels_batch_invariant", default=False)
_trial: ContextVar[dict[str, int] | None] = ContextVar("pallas_kernels_trial", default=None)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """What is traced inside gives a row the same bits whatever the number of rows.

    `auto` then means the kernel or an exception.
    """
    token = _invariant.set(True)
    try:
        yield
    finally:
        _invariant.reset(token)


def is_batch_invariant() -> bool:
    """Whether the batch-invariant mode is on."""
    return _invariant.get()


def settings() -> tuple[Any, ...]:
    """Everything beside a call itself that decides about its tiles."""
    tried = _trial.get()
    return is_batch_invariant(), None if tried is None else tuple(sorted(tried.items()))


@contextlib.contextmanager
def trial(sizes: dict[str, int]) -> Iterator[None]:
    """What is traced inside takes tiles of these sizes, to measure them."""
    token = _trial.set(sizes)
    try:
        yield
    finally:
        _trial.reset(token)


@dataclass(frozen=True)
class ProductTile:
    """Tile of `scaled_matmul` and of both products of `grouped_matmul`.

    Attributes:
        rows: rows of the activations that one block multiplies, 8 to 128.
        stages: weight tiles in flight.
    """

    rows: int
    stages: int

    def __post_init__(self) -> None:
        if self.rows not in ROW_SIZES or not 2 <= self.stages <= 8:
            raise ValueError(f"{self}; expected rows in {ROW_SIZES} and 2 to 8 stages")


@dataclass(frozen=True)
class AttentionTile:
    """Tile of `sparse_attention`.

    Attributes:
        stages: tiles of selected entries in flight.
    """

    stages: int

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= 2:
            raise ValueError(f"{self}; expected 1 or 2 stages, more do not fit")


def attention_tile(target: Target) -> AttentionTile:
    """Tile for any number of tokens."""
    return AttentionTile(**{"stages": 2} | _preferred("sparse_attention", target.name, ()))


def product_tile(target: Target, op: str, num_rows: int, n: int, k: int) -> ProductTile:
    """Tile for about `num_rows` rows (of an expert) and a weight of `n` by `k` values."""
    num_rows = INVARIANT_ROWS if is_batch_invariant() else num_rows
    rows = next((size for size in ROW_SIZES if size >= num_rows), ROW_SIZES[-1])
    # Few rows leave room for weight tiles in flight, which is all that matters then.
    default = {"rows": rows, "stages": 4 if rows <= 32 else 2}
    shape = {"n": n, "k": k, "rows": rows}
    return ProductTile(**default | _preferred(op, target.name, tuple(shape.items())))


def _preferred(op: str, device: str, shape: tuple[tuple[str, int], ...]) -> dict[str, int]:
    tried = _trial.get()
    return _measured(op, device, shape) if tried is None else tried


def has_measured(device: str) -> bool:
    """Whether the table has an entry for this device."""
    return any(row["device"] == device for row in _table())


@functools.cache
def _measured(op: str, device: str, shape: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """The tile in the table for exactly this device and shape; empty if there is none."""
    for row in _table():
        if row["op"] == op and row["device"] == device and row["shape"] == dict(shape):
            return row["tile"]
    return {}


@functools.cache
def _table() -> tuple[dict[str, Any], ...]:
    text = resources.files("pallas_kernels").joinpath("tuned.toml").read_text(encoding="utf-8")
    return parse_table(text)


def parse_table(text: str) -> tuple[dict[str, Any], ...]:
    """The rows of a table of measured tiles.

    Raises:
        ValueError: a row lacks a key or has an unknown one, or its tile has an unknown size.
    """
    rows = tomllib.loads(text).get("tile", [])
    keys = {"op", "device", "shape", "tile", "us", "date"}
    sizes = {field.name for field in fields(ProductTile)}
    for number, row in enumerate(rows, 1):
        if row.keys() != keys:
            raise ValueError(f"tile {number} has keys {sorted(row)}; expected {sorted(keys)}")
        if not row["tile"].keys() <= sizes:
            raise ValueError(f"tile {number} sets {sorted(row['tile'])}; known: {sorted(sizes)}")
    return tuple(rows)
