"""Goal: tensors come out as they were stored, and a damaged file is refused by name.

Method: write small files by hand from the format's description, read them back, read a file of the
safetensors library, and damage one thing at a time.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.safetensors_file import CheckpointError, SafetensorsFile

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [24, 29]},
    "c": {"dtype": "BF16", "shape": [2], "data_offsets": [29, 33]},
    "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [33, 33]},
}
DATA = bytes(range(33))


def _write(path: Path, header: object = HEADER, data: bytes = DATA) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **changes}}


def test_values_types_and_shapes(tmp_path: Path) -> None:
    """The header ends anywhere, so the arrays are also read from unaligned addresses."""
    file = SafetensorsFile(_write(tmp_path / "x.safetensors"))
    assert list(file.tensors) == ["a", "b", "c", "none"]
    a, b, c, none = (file.read(name) for name in file.tensors)
    assert (a.dtype, a.shape) == (np.float32, (2, 3))
    np.testing.assert_array_equal(a.ravel(), np.frombuffer(DATA[:24], np.float32))
    assert b.dtype == ml_dtypes.float8_e4m3fn
    assert b.tobytes() == DATA[24:29]
    assert c.dtype == ml_dtypes.bfloat16
    assert c.tobytes() == DATA[29:]
    assert none.shape == (0, 4)


def test_views_do_not_copy_and_cannot_be_written(tmp_path: Path) -> None:
    file = SafetensorsFile(_write(tmp_path / "x.safetensors"))
    assert np.shares_memory(file.read("a"), file.read("a"))
    with pytest.raises(ValueError, match="read-only"):
        file.read("a")[0, 0] = 1


def test_a_file_of_the_library_is_read(golden: Path) -> None:
    """The golden checkpoint was written by the safetensors library, with metadata and padding."""
    file = SafetensorsFile(golden / "tiny-v41" / "model.safetensors")
    assert len(file.tensors) == 1823
    norm = file.read("norm.weight").astype(np.float32)
    # Norm weights were drawn around 1 with deviation 0.1, so a wrong offset would show.
    assert norm.shape == (64,)
    assert abs(norm - 1).max() < 0.5


@pytest.mark.parametrize(
    ("header", "data", "parts"),
    [
        (HEADER, DATA[:-1], ("truncated", "bytes of")),
        (HEADER, b"", ("truncated",)),
        (HEADER, DATA + b"x", ("expected", "by its header")),
        (b"{", DATA, ("header is not valid JSON",)),
        (b"\xff\xfe", DATA, ("header is not valid JSON",)),
        (b"[" * 100_000, DATA, ("header is not valid JSON",)),
        (b"[]", DATA, ("header is not an object",)),
        (b'{"a": 1, "a": 2}', DATA, ("the name a stands twice",)),
        ({"a": 3}, DATA, ("the header entry of tensor a is 3",)),
        ({"a": {"dtype": "F32"}}, DATA, ("the header entry of tensor a",)),
        (_with("b", shape=[-5]), DATA, ("the header entry of tensor b",)),
        (_with("b", shape=[True]), DATA, ("the header entry of tensor b",)),
        (_with("b", data_offsets=[24]), DATA, ("the header entry of tensor b",)),
        (_with("b", dtype="F64"), DATA, ("tensor b has dtype 'F64'", "F8_E4M3")),
        (_with("b", dtype=[]), DATA, ("tensor b has dtype []",)),
        (_with("b", shape=[6]), DATA, ("tensor b", "bytes 24 to 29", "expected 24 to 30")),
        (_with("a", shape=[2**40, 2**40]), DATA, ("tensor a", "bytes 0 to 24")),
        (_with("b", data_offsets=[25, 30]), DATA, ("tensor b", "expected 24 to 29")),
        (_with("c", data_offsets=[24, 28]), DATA, ("tensor", "expected")),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, header: object, data: bytes, parts: tuple[str, ...]
) -> None:
    path = _write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError) as refusal:
        SafetensorsFile(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin with the length of a header"),
        (b"\x01\x00", "does not begin with the length of a header"),
        (b"\xff" * 100, "does not begin with the length of a header"),
        ((1000).to_bytes(8, "little") + b'{"', "truncated, 10 bytes of 1008"),
        (b"version https://git-lfs", "does not begin with the length of a header"),
    ],
)
def test_something_else_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFile(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone.safetensors: cannot be read"):
        SafetensorsFile(tmp_path / "gone.safetensors")
