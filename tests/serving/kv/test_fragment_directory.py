"""Goal: a directory holds whole fragments and nothing else, before and after a restart.

Method: fragments written, cut, damaged in every region and left half written; a disk that is
full.
"""

import os
from pathlib import Path

import pytest

from serving.kv import fragment_directory
from serving.kv.fragment_directory import FragmentDirectory
from serving.kv.fragments import CorruptFragmentError, StripeCodec
from serving.kv.segment_index import Row
from serving.kv.stripes import Coding
from tests.serving.kv.storage_parts import payload

STRIPE = "ab" * 16
PAYLOADS = [payload(n, 300 + n) for n in range(5)]


def fragment(stripe: str = STRIPE, number: int = 2) -> list[bytes]:
    rows = [Row.of(data) for data in PAYLOADS]
    head, pieces = StripeCodec(Coding(3, 2)).encode_stripe(stripe, rows, PAYLOADS)[number]
    return [head.encode(), *pieces]


def file_of(path: Path) -> Path:
    (found,) = (path / "fragments").glob("*/*")
    return found


def test_what_is_written_is_read_after_a_restart_too(tmp_path: Path) -> None:
    directory = FragmentDirectory(tmp_path)
    data = fragment()
    held = directory.write(data)
    assert held.size == sum(map(len, data)) and held.head.fragment == 2
    with pytest.raises(BlockingIOError):
        FragmentDirectory(tmp_path)
    directory.close()
    directory = FragmentDirectory(tmp_path)
    assert directory.load() == {STRIPE: held}
    assert directory.read(held, [0, 1, 3]) == data[1] + data[2] + data[4]
    assert directory.read(held, [4]) == data[5]
    assert directory.read_whole(held) == (data[0], b"".join(data[1:]))
    assert directory.is_good(held)
    directory.remove(STRIPE)
    directory.remove(STRIPE)
    assert directory.load() == {}
    directory.close()


def test_damage_in_any_region_is_found(tmp_path: Path) -> None:
    directory = FragmentDirectory(tmp_path)
    held = directory.write(fragment())
    path = file_of(tmp_path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x20
        path.write_bytes(damaged)
        assert not directory.is_good(held), f"byte {at}"
    path.write_bytes(whole + b"x")
    assert not directory.is_good(held)
    path.write_bytes(whole)
    assert directory.is_good(held)
    path.unlink()
    assert not directory.is_good(held)
    directory.close()


@pytest.mark.parametrize("cut", [0, 20, 47, 100, -1])
def test_what_was_cut_or_not_finished_is_removed_at_the_start(tmp_path: Path, cut: int) -> None:
    directory = FragmentDirectory(tmp_path)
    directory.write(fragment())
    path = file_of(tmp_path)
    (path.parent / f"{path.name}.part").write_bytes(path.read_bytes())
    os.truncate(path, cut if cut >= 0 else path.stat().st_size - 1)
    assert directory.load() == {} and not list(path.parent.iterdir())
    directory.close()


def test_a_file_under_another_name_is_not_taken(tmp_path: Path) -> None:
    directory = FragmentDirectory(tmp_path)
    directory.write(fragment())
    path = file_of(tmp_path)
    path.rename(path.with_name("ac" * 16))
    assert directory.load() == {}
    directory.close()


def test_a_full_disk_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FragmentDirectory(tmp_path)
    directory.write(fragment())

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fragment_directory.os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            directory.write(fragment("cd" * 16))
    assert list(directory.load()) == [STRIPE]
    with pytest.raises(CorruptFragmentError):
        directory.write([b"no fragment"])
    directory.close()


def test_what_a_node_knows_of_itself_and_others_is_remembered(tmp_path: Path) -> None:
    directory = FragmentDirectory(tmp_path)
    assert directory.nodes() == {} and not directory.is_leaving
    directory.remember_nodes({"a": "ipc://a"})
    directory.mark_leaving(True)
    directory.close()
    directory = FragmentDirectory(tmp_path)
    assert directory.nodes() == {"a": "ipc://a"} and directory.is_leaving
    directory.mark_leaving(False)
    assert not directory.is_leaving
    (tmp_path / "nodes.json").write_text("[")
    assert directory.nodes() == {}
    directory.close()
