"""Goal: what was recorded is there after the file is opened again, and nothing else is. Method: a
file in a temporary folder, one entry of it damaged.
"""

from pathlib import Path

import lmdb
import pytest

from serving.kv.directory import Changes
from serving.kv.placements import PlacementFile
from serving.kv.segment_index import Row

ROWS = [Row(1, bytes(16), 5, b"t", 9)]


def loaded(folder: Path) -> list[tuple[str, int, list[Row]]]:
    file = PlacementFile(folder)
    try:
        return list(file.load())
    finally:
        file.close()


def test_segments_come_back_in_order_and_those_that_left_do_not(tmp_path: Path) -> None:
    file = PlacementFile(tmp_path)
    file.record(Changes({"b": (10, ROWS)}))
    file.record(Changes({"a": (20, []), "c": (1, [])}))
    file.record(Changes({"d": (30, ROWS)}, ["c", "unknown"]))
    file.record(Changes())
    file.close()
    assert loaded(tmp_path) == [("b", 10, ROWS), ("a", 20, []), ("d", 30, ROWS)]
    file = PlacementFile(tmp_path)
    list(file.load())
    file.record(Changes({"0": (1, [])}))
    file.close()
    assert [name for name, _, _ in loaded(tmp_path)] == ["b", "a", "d", "0"]


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    file = PlacementFile(tmp_path)
    file.record(Changes({"a": (10, ROWS), "b": (20, ROWS)}))
    file.close()
    database = lmdb.open(str(tmp_path))
    with database.begin(write=True) as transaction:
        transaction.put(b"a", b"nonsense")
    database.close()
    assert loaded(tmp_path) == [("b", 20, ROWS)]


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        PlacementFile(tmp_path / "file")
