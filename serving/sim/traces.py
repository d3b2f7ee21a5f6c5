"""Request traces: when requests came, how long they were, and which beginnings they share.

Five published formats are understood and told apart by their first line:

| format | a row | tokens of a block |
| --- | --- | --- |
| Mooncake, JSON Lines | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` | 512 |
| Bailian, JSON Lines | the same in seconds, with `chat_id`, `turn`, `type` | 16 |
| Azure 2023, CSV | `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` | no blocks |
| Azure 2025, CSV | the same with `NumImages` | no blocks |
| BurstGPT, CSV | `Timestamp` (s), `Request tokens`, `Response tokens`, ... | no blocks |

A hash id names a block of input tokens together with everything before it, so requests share what
their lists have in common from the front. A BurstGPT row without response tokens is a failed
request and left out. Rows are sorted by time.
"""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16


class TraceError(ValueError):
    """A trace that cannot be replayed; names the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request.

    Attributes:
        arrival_s: seconds since the first request.
        num_prompt: tokens of the prompt, at least 1.
        num_output: tokens that were generated, at least 1.
        blocks: numbers of the prompt's blocks, each standing for the whole prefix up to its end;
            counted from 0 over the trace. Empty where the format says nothing of them.
        num_images: images in the prompt.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    num_images: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """All rows by time, and what `TraceRow.blocks` count.

    Attributes:
        rows: at least one.
        block_tokens: prompt tokens of a block; 0 if the trace knows no blocks.
        num_blocks: distinct blocks.
    """

    rows: tuple[TraceRow, ...]
    block_tokens: int
    num_blocks: int

    @property
    def duration_s(self) -> float:
        """From the first request to where the one after the last is due."""
        last = self.rows[-1].arrival_s
        return last * len(self.rows) / max(len(self.rows) - 1, 1) if last else 1.0

    @cached_property
    def first_rows(self) -> np.ndarray:
        """[num_blocks] int64: the row in which each block comes first."""
        first_rows = np.full(self.num_blocks, -1, np.int64)
        for index in range(len(self.rows) - 1, -1, -1):
            first_rows[list(self.rows[index].blocks)] = index
        return first_rows

    @cached_property
    def best_depths(self) -> np.ndarray:
        """[rows] int64: blocks of each prompt that came before, from the first on.

        It is what an endless store has that is written the moment a request arrives.
        """
        first_rows = self.first_rows.tolist()
        # Whoever knows a prefix knows all shorter ones, so the known blocks come first.
        return np.array(
            [
                bisect_left(
                    row.blocks, True, key=lambda block, index=index: first_rows[block] >= index
                )
                for index, row in enumerate(self.rows)
            ],
            np.int64,
        )

    def best_hit_ratio(self) -> float:
        """The share of blocks that came before; 0 for a trace without blocks."""
        num_referenced = sum(len(row.blocks) for row in self.rows)
        return int(self.best_depths.sum()) / num_referenced if num_referenced else 0.0


def read_trace(lines: Iterable[str], source: str) -> Trace:
    """Reads a trace in any of the formats; `source` names it in errors.

    Raises:
        TraceError: an unknown format, no rows, or a broken row, which is named by its line.
    """
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{source}: no rows; expected a trace")
    if first[1].lstrip().startswith("{"):
        rows, block_tokens = _json_rows(_with_first(first, numbered), source)
    else:
        rows, block_tokens = _csv_rows(first, numbered, source), 0
    if not rows:
        raise TraceError(f"{source}: no requests; expected at least one row after the header")
    start = min(row.arrival_s for row in rows)
    numbers: dict[int, int] = {}
    for row in rows:
        for block in row.blocks:
            numbers.setdefault(block, len(numbers))
    shifted = sorted(
        (
            TraceRow(
                row.arrival_s - start,
                row.num_prompt,
                row.num_output,
                tuple(numbers[block] for block in row.blocks),
                row.num_images,
            )
            for row in rows
        ),
        key=lambda row: row.arrival_s,
    )
    return Trace(tuple(shifted), block_tokens, len(numbers))


def _with_first(
    first: tuple[int, str], others: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    yield first
    yield from others


def _json_rows(numbered: Iterator[tuple[int, str]], source: str) -> tuple[list[TraceRow], int]:
    rows: list[TraceRow] = []
    block_tokens = 0
    for number, line in numbered:
        place = f"{source}:{number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{place}: not JSON ({error.msg}); expected one object") from None
        if not isinstance(values, dict):
            raise TraceError(f"{place}: {line.strip()[:40]!r}; expected one JSON object")
        if not block_tokens:
            is_bailian = "chat_id" in values
            block_tokens = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
        is_seconds = block_tokens == BAILIAN_BLOCK_TOKENS
        rows.append(_json_row(values, place, block_tokens, 1.0 if is_seconds else 1e-3))
    return rows, block_tokens


def _json_row(
    values: Mapping[str, object], place: str, block_tokens: int, unit_s: float
) -> TraceRow:
    time = values.get("timestamp")
    if not isinstance(time, int | float) or isinstance(time, bool) or not math.isfinite(time):
        raise _refused(place, "timestamp", time, "a number")
    num_prompt = _count(values.get("input_length"), place, "input_length")
    num_output = _count(values.get("output_length"), place, "output_length")
    ids = values.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise _refused(place, "hash_ids", ids, "a list of whole numbers")
    num_blocks = -(-num_prompt // block_tokens)
    if len(ids) != num_blocks or len(set(ids)) != num_blocks:
        what = f"{len(set(ids))} different ids of {len(ids)}"
        expected = f"{num_blocks}, one per {block_tokens} of {num_prompt} tokens"
        raise TraceError(f"{place}: hash_ids holds {what}; expected {expected}")
    return TraceRow(time * unit_s, num_prompt, num_output, tuple(ids))


def _csv_rows(
    first: tuple[int, str], numbered: Iterator[tuple[int, str]], source: str
) -> list[TraceRow]:
    header = [name.strip() for name in next(csv.reader([first[1]]))]
    read: Callable[[Mapping[str, str], str], TraceRow | None]
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(header):
        read = _azure_row
    elif {"Timestamp", "Request tokens", "Response tokens"} <= set(header):
        read = _burst_row
    else:
        raise TraceError(
            f"{source}:{first[0]}: {first[1].strip()[:60]!r} begins no known trace; expected the "
            "Mooncake, Bailian, Azure or BurstGPT format"
        )
    rows: list[TraceRow] = []
    for number, line in numbered:
        place = f"{source}:{number}"
        fields = next(csv.reader([line]))
        if len(fields) != len(header):
            raise TraceError(f"{place}: {len(fields)} fields; expected {len(header)}: {header}")
        row = read(dict(zip(header, fields, strict=True)), place)
        if row is not None:
            rows.append(row)
    return rows


def _azure_row(values: Mapping[str, str], place: str) -> TraceRow:
    text = values["TIMESTAMP"].strip()
    try:
        # Times are differences only, so a zone that is not written does not matter.
        time = datetime.fromisoformat(text)
    except ValueError:
        raise _refused(place, "TIMESTAMP", text, "a date and a time") from None
    num_images = 0
    if "NumImages" in values:
        num_images = _count(_whole(values["NumImages"]), place, "NumImages", least=0)
    return TraceRow(
        (time.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds(),
        _count(_whole(values["ContextTokens"]), place, "ContextTokens"),
        _count(_whole(values["GeneratedTokens"]), place, "GeneratedTokens"),
        num_images=num_images,
    )


def _burst_row(values: Mapping[str, str], place: str) -> TraceRow | None:
    text = values["Timestamp"].strip()
    try:
        time = float(text)
    except ValueError:
        raise _refused(place, "Timestamp", text, "a number") from None
    if not math.isfinite(time):
        raise _refused(place, "Timestamp", text, "a number")
    num_prompt = _count(_whole(values["Request tokens"]), place, "Request tokens")
    num_output = _count(_whole(values["Response tokens"]), place, "Response tokens", least=0)
    return TraceRow(time, num_prompt, num_output) if num_output else None


def _whole(text: str) -> object:
    """The number that a text spells, or the text itself, to be refused."""
    try:
        return int(text)
    except ValueError:
        return text


def _count(value: object, place: str, name: str, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise _refused(place, name, value, f"a whole number of at least {least}")
    return value


def _refused(place: str, name: str, received: object, expected: str) -> TraceError:
    shown = "nothing" if received is None else repr(received)[:60]
    return TraceError(f"{place}: {name} is {shown}; expected {expected}")
