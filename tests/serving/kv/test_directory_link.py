"""Goal: many threads ask over one line; silence is a `StoreError`, and a new directory is noticed.
Method: metadata nodes on threads, one after the other at one address.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.kv import directory_calls as calls
from serving.kv import directory_link
from serving.kv.directory_link import DirectoryLink
from serving.kv.segment_index import Row
from serving.kv.store import PayloadKind, StoreError
from serving.transport.driver import SystemClock
from tests.serving.kv.metadata_parts import metadata


def key(number: int) -> bytes:
    return number.to_bytes(16)


def test_threads_get_their_own_answers(tmp_path: Path) -> None:
    link = None
    with metadata(tmp_path) as address:
        link = DirectoryLink(address, SystemClock(), 20.0)
        link.start()
        rows = [Row(1, key(n), 10, b"t", 0) for n in range(0, 40, 2)]
        link.ask(calls.Announced, calls.Announce(0, segments=[("s", 200, rows)]))

        def look(number: int) -> bytes:
            message = calls.Contains(0, b"\1", key(number))
            return link.ask(calls.Contained, message).flags

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(look, range(40))) == [b"\1", b"\0"] * 20
        with pytest.raises(StoreError, match="answered with a Contained"):
            link.ask(calls.Welcome, calls.Contains(0, b"\1", key(1)))
        link.close()


def test_a_chain_is_matched_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_link, "_MATCH_BLOCKS", 4)
    chain = [key(n) for n in range(12)]
    with metadata(tmp_path) as address:
        link = DirectoryLink(address, SystemClock(), 20.0)
        link.start()
        # Blocks 0 to 8 and 10; states after 2, 6 and 11 blocks.
        rows = [Row(PayloadKind.BLOCK, key(n), 10, b"t", 0) for n in (*range(9), 10)]
        rows += [Row(PayloadKind.STATE, key(n), 10, b"t", 0) for n in (1, 5, 10)]
        link.ask(calls.Announced, calls.Announce(0, segments=[("s", 200, rows)]))
        made: list[int] = []

        def keys(count: int) -> Iterator[bytes]:
            for number in range(count):
                made.append(number)
                yield chain[number]

        # Block 9 is missing, so that what lies behind it is of no use.
        assert link.match(keys(12)) == 6 and made == list(range(12))
        assert [link.match(keys(count)) for count in (0, 1, 2, 5, 8)] == [0, 0, 2, 2, 6]
        link.close()


def test_a_new_directory_is_noticed_and_silence_ends(tmp_path: Path) -> None:
    epochs: list[int] = []
    changed = threading.Event()

    def note(epoch: int) -> None:
        epochs.append(epoch)
        changed.set()

    link = DirectoryLink(f"ipc://{tmp_path}/m", SystemClock(), 0.3)
    link.on_epoch = note
    link.start()
    try:
        with pytest.raises(StoreError, match="does not answer"):
            link.ask(calls.Welcome, calls.Hello(0))
        for count in (1, 2):
            changed.clear()
            with metadata(tmp_path):
                # Without being asked anything.
                assert changed.wait(20)
            assert len(epochs) == count
        assert epochs[0] != epochs[1]
    finally:
        link.close()
