"""One safetensors file, mapped into memory and read without copying.

The format is eight bytes of header length, a JSON header that names every tensor with its type,
shape and byte range, and the bytes. The whole header is checked before any tensor is touched, so
a damaged file is refused with its name instead of giving wrong numbers later.

*Why not the safetensors library*: its numpy side does not give the 8-bit float types, and it
copies each tensor; a mapped view lets a 200 GB table be read row by row.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from deepinfer_jax.parameter_table import DTYPES

_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000
"""The format's own limit, which also keeps a damaged length from asking for a huge read."""


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be used; the message names the file or tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: type in the spelling of the format, shape, first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsFile:
    """Header and mapped bytes of one file.

    Attributes:
        path: the file.
        tensors: what the header names, in file order.

    Raises:
        CheckpointError: the file is absent, truncated or longer than its header says, or the
            header is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                header_size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                self._data_begin = _LENGTH_BYTES + header_size
                if size < _LENGTH_BYTES or header_size > _HEADER_BYTES_MAX:
                    raise self._damaged("it does not begin with the length of a header")
                if size < self._data_begin:
                    raise self._truncated(self._data_begin, size)
                header = stream.read(header_size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self.tensors = self._parse(header)
        end = self._data_begin + sum(_size_bytes(t) for t in self.tensors.values())
        if size < end:
            raise self._truncated(end, size)
        if size > end:
            raise self._damaged(f"it has {size} bytes; expected {end} by its header")
        self._bytes: np.ndarray | None = None

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file; pages are read when touched.

        "I8" tensors come as unsigned bytes.
        """
        if self._bytes is None:
            self._bytes = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        tensor = self.tensors[name]
        begin = self._data_begin + tensor.begin
        raw = self._bytes[begin : begin + _size_bytes(tensor)]
        return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _parse(self, header: bytes) -> dict[str, StoredTensor]:
        try:
            parsed = json.loads(header, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not valid JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise self._damaged("its header is not an object")
        parsed.pop("__metadata__", None)
        ranges = [(self._range(name, entry), name) for name, entry in parsed.items()]
        tensors = {}
        expected_begin = 0
        for (begin, end), name in sorted(ranges):
            tensor = StoredTensor(parsed[name]["dtype"], tuple(parsed[name]["shape"]), begin)
            if begin != expected_begin or end - begin != _size_bytes(tensor):
                raise self._damaged(
                    f"tensor {name} ({tensor.dtype} {list(tensor.shape)}) lies at bytes {begin} "
                    f"to {end}; expected {expected_begin} to "
                    f"{expected_begin + _size_bytes(tensor)}"
                )
            expected_begin = end
            tensors[name] = tensor
        return tensors

    def _range(self, name: str, entry: Any) -> tuple[int, int]:  # noqa: ANN401 - any JSON
        """Byte range of a header entry whose fields have been checked for their kinds."""
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape = fields.get("dtype"), fields.get("shape")
        offsets = fields.get("data_offsets")
        if not (_is_counts(shape) and _is_counts(offsets) and len(offsets) == 2):
            raise self._damaged(f"the header entry of tensor {name} is {str(entry)[:120]}")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {dtype!r}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        return offsets[0], offsets[1]

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: not a whole safetensors file, {what}; copy the file again"
        )

    def _truncated(self, expected: int, size: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: truncated, {size} bytes of {expected}; copy the file again"
        )


def _size_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which a key that stands twice is an error instead of the last one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {repeated} stands twice")
    return found
