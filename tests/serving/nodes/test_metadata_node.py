"""Goal: the node answers each message, and a commit counts only when the log has it. Method: a log
in memory that can be made to fail.
"""

from collections.abc import Iterator

import pytest

from serving.kv import directory_calls as calls
from serving.kv.directory import Changes, Directory
from serving.kv.segment_index import Row
from serving.nodes.metadata_node import MetadataNode

KEY = b"k" * 16
ROW = Row(1, KEY, 100, b"t", 0)
STATE = Row(2, KEY, 100, b"t", 0)


class FixedClock:
    def now_ns(self) -> int:
        return 0

    def unix_s(self) -> int:
        return 0


class MemoryLog:
    def __init__(self) -> None:
        self.segments: dict[str, tuple[int, list[Row]]] = {}
        self.is_failing = False

    def load(self) -> Iterator[tuple[str, int, list[Row]]]:
        for name, (size, rows) in self.segments.items():
            yield name, size, rows

    def record(self, changes: Changes) -> None:
        if self.is_failing:
            raise OSError("full")
        for name in changes.gone:
            self.segments.pop(name, None)
        self.segments |= changes.come


def node_of(log: MemoryLog, epoch: int = 5) -> MetadataNode:
    return MetadataNode(Directory(epoch, 10_000), log, FixedClock())


def answer(node: MetadataNode, message: calls.Call) -> calls.Reply | None:
    node.on_message("me", message)
    replies = node.take_replies()
    assert all(source == "me" for source, _ in replies) and len(replies) <= 1
    return replies[0][1] if replies else None


def write(node: MetadataNode, segment: str, row: Row = ROW) -> calls.Reply | None:
    begun = answer(node, calls.Begin(1, [row]))
    assert isinstance(begun, calls.Begun) and begun.granted == [0]
    return answer(node, calls.Complete(2, begun.write, segment, 100))


def test_a_commit_is_in_the_log_and_in_the_next_node() -> None:
    log = MemoryLog()
    node = node_of(log)
    assert write(node, "s") == calls.Completed(2, 5, True)
    assert write(node, "t", STATE) == calls.Completed(2, 5, True)
    assert list(log.segments) == ["s", "t"]
    after = node_of(log, 6)
    assert answer(after, calls.Match(1, KEY)) == calls.Matched(1, 6, 1, 1)
    located = answer(after, calls.Locate(3, b"\1", KEY))
    assert isinstance(located, calls.Located)
    assert located.segments == ["s"] and located.spots == [(0, 0, 100)]
    assert answer(after, calls.Release(located.lease, b"\1", KEY)) is None
    assert answer(after, calls.Contains(1, b"\1\2", KEY * 2)) == calls.Contained(1, 6, b"\0\1")
    after.on_tick()
    assert list(log.segments) == ["t"]


def test_what_cannot_be_written_down_does_not_count() -> None:
    log = MemoryLog()
    node = node_of(log)
    log.is_failing = True
    assert write(node, "s") == calls.Completed(2, 5, False) and node.num_failed_records >= 1
    assert answer(node, calls.Contains(1, b"\1", KEY)) == calls.Contained(1, 5, b"\0")
    log.is_failing = False
    assert write(node, "t") == calls.Completed(2, 5, True)
    assert list(log.segments) == ["t"]


def test_an_empty_node_learns_what_is_announced() -> None:
    log = MemoryLog()
    node = node_of(log)
    asked = answer(node, calls.Announce(1, ["s", "t"]))
    assert asked == calls.Announced(1, 5, ["s", "t"])
    answer(node, calls.Announce(2, segments=[("s", 100, [ROW])]))
    assert answer(node, calls.Announce(3, ["s", "t"])) == calls.Announced(3, 5, ["t"])
    assert list(log.segments) == ["s"]
    assert answer(node, calls.Remaining(1)) == calls.Remained(1, 5, b"\1", KEY)
    assert answer(node, calls.Remaining(1, ["t"])) == calls.Remained(1, 5, b"", b"")
    assert answer(node, calls.Pin(1, b"\1", KEY, True)) == calls.Pinned(1, 5, 1)
    purge = calls.Drop(1, is_purge=True, tenant=b"t")
    assert answer(node, purge) == calls.Dropped(1, 5, 1) and log.segments == {}
    assert answer(node, calls.Hello(9)) == calls.Welcome(9, 5, ["s"])
    assert answer(node, calls.Removed(["s"])) is None
    assert answer(node, calls.Hello(9)) == calls.Welcome(9, 5)
    assert answer(node, calls.Drop(1, b"\1", KEY)) == calls.Dropped(1, 5, 1)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes of keys"):
        node_of(MemoryLog()).on_message("me", calls.Match(1, b"abc"))
