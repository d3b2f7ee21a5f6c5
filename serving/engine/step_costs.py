"""What steps cost, remembered between starts.

Measuring takes a few steps of every shape, which is little for a small model and seconds for a
large one. The figures hold for one model, one mesh, one kind of device and one set of shapes; all
of that is in the name of the file, so that figures of other hardware are never taken for its own.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from serving.core.buckets import Bucket
from serving.core.cost import PrefillSample


def cost_file(directory: Path, identity: Mapping[str, str], name: str = "step-costs") -> Path:
    """Where figures are kept that hold for `identity`, whatever names and values that has."""
    encoded = msgspec.json.encode(sorted(identity.items()))
    return directory / f"{name}-{hashlib.sha256(encoded).hexdigest()[:32]}.json"


def read_costs(path: Path, buckets: set[Bucket]) -> dict[Bucket, float] | None:
    """Milliseconds of each of the buckets; None if they are not all there and usable."""
    rows = _read(path, list[tuple[int, int, int, float]])
    if rows is None:
        return None
    costs = {Bucket(*sizes): ms for *sizes, ms in rows}
    if costs.keys() != buckets or not all(ms > 0 for ms in costs.values()):
        return None
    return costs


def write_costs(path: Path, costs: Mapping[Bucket, float]) -> None:
    """Keep figures. Another process reads either all of them or those before. Raises OSError."""
    _write(path, [(b.num_rows, b.num_tokens, b.num_blocks, ms) for b, ms in costs.items()])


def read_samples(path: Path, counts: Iterable[tuple[int, float]]) -> list[PrefillSample] | None:
    """Samples with these tokens and pairs, in order; None if they are not there and usable."""
    rows = _read(path, list[tuple[int, float, float]])
    if (
        rows is None
        or [row[:2] for row in rows] != list(counts)
        or not all(ms > 0 for *_, ms in rows)
    ):
        return None
    return [PrefillSample(*row) for row in rows]


def write_samples(path: Path, samples: Sequence[PrefillSample]) -> None:
    """Keep samples, as `write_costs` does. Raises OSError."""
    _write(path, [(s.num_tokens, s.num_pairs, s.time_ms) for s in samples])


def _read[T](path: Path, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.encode(rows))
    unfinished.replace(path)
