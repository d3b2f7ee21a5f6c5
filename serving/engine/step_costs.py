"""What decode steps cost, remembered between starts.

Measuring takes a few steps of every shape, which is little for a small model and seconds for a
large one. The figures hold for one model, one mesh, one kind of device and one set of shapes; all
of that is in the name of the file, so that figures of other hardware are never taken for its own.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serving.core.buckets import Bucket


def cost_file(directory: Path, identity: Mapping[str, str]) -> Path:
    """Where figures are kept that hold for `identity`, whatever names and values that has."""
    encoded = msgspec.json.encode(sorted(identity.items()))
    return directory / f"step-costs-{hashlib.sha256(encoded).hexdigest()[:32]}.json"


def read_costs(path: Path, buckets: set[Bucket]) -> dict[Bucket, float] | None:
    """Milliseconds of each of the buckets; None if they are not all there and usable."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[tuple[int, int, int, float]])
    except (OSError, msgspec.DecodeError):
        return None
    costs = {Bucket(*sizes): ms for *sizes, ms in rows}
    if costs.keys() != buckets or not all(ms > 0 for ms in costs.values()):
        return None
    return costs


def write_costs(path: Path, costs: Mapping[Bucket, float]) -> None:
    """Keep figures. Another process reads either all of them or those before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(b.num_rows, b.num_tokens, b.num_blocks, ms) for b, ms in costs.items()]
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.encode(rows))
    unfinished.replace(path)
