"""Goal: what one tier has written the others read, through whatever happens to the directory, to
the store and to bytes in it; bytes of what was given up go.

Method: tiers over one store in memory and a metadata node on a thread; afterwards its leases,
writes and doomed segments are at zero.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.kv.directory_link import DirectoryLink
from serving.kv.shared_tier import SharedTier
from serving.kv.store import StoreError
from serving.kv_process import ask
from serving.transport.driver import SystemClock
from tests.serving.kv.metadata_parts import metadata
from tests.serving.kv.test_orbax_tier import A, B, name, payload
from tests.serving.kv.test_segment_tier import MemorySegments


class KeptSegments(MemorySegments):
    """A store that outlives the tiers that use it."""

    def close(self) -> None:
        pass


@contextmanager
def tier(address: str, segments: MemorySegments, timeout_s: float = 20.0) -> Iterator[SharedTier]:
    shared = SharedTier(segments, DirectoryLink(address, SystemClock(), timeout_s))
    try:
        yield shared
    finally:
        shared.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_rest(address: str) -> None:
    names = ("directory_leases", "directory_writes", "directory_doomed")
    wait_for(lambda: not any(ask(address, "stats")[name] for name in names))


def test_one_reads_what_the_other_wrote(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path) as address, tier(address, segments) as one:
        with tier(address, segments) as two:
            one.write([payload(1), payload(2)])
            assert two.contains([name(1), name(2), name(3)]) == [True, True, False]
            assert two.read([name(2), name(3), name(1)]) == [payload(2), None, payload(1)]
            # Written once.
            two.write([payload(2), payload(3)])
            two.write([payload(2)])
            assert len(segments.segments) == 2 and two.counts().num_written == 1
        assert one.read([name(3)]) == [payload(3)] and one.verify() == []
        check_rest(address)


def test_a_directory_that_starts_empty_loses_nothing(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path) as address, tier(address, segments) as one:
        one.write([payload(1)])
    with metadata(tmp_path, "other") as address, tier(address, segments) as one:
        wait_for(lambda: one.contains([name(1)]) == [True])
        one.write([payload(2)])
        assert one.read([name(1), name(2)]) == [payload(1), payload(2)]
    # With what it has written down it needs nobody to tell it.
    with metadata(tmp_path, "other") as address:
        assert ask(address, "stats")["directory_payloads"] == 2


def test_a_tier_that_runs_tells_a_directory_that_starts_empty(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path) as address:
        one = SharedTier(segments, DirectoryLink(address, SystemClock(), 0.5))
        one.write([payload(1)])
    with pytest.raises(StoreError, match="does not answer"):
        one.contains([name(1)])
    with metadata(tmp_path, "other"):
        wait_for(lambda: one.contains([name(1)]) == [True])
        assert one.read([name(1)]) == [payload(1)]
        one.close()


def test_damaged_and_missing_bytes_are_misses_and_forgotten(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path) as address, tier(address, segments) as one:
        one.write([payload(1), payload(2)])
        (segment,) = segments.segments
        data = bytearray(segments.segments[segment])
        data[100] ^= 1
        segments.segments[segment] = bytes(data)
        assert one.read([name(1), name(2)]) == [None, payload(2)]
        assert one.contains([name(1), name(2)]) == [False, True]
        assert one.counts().num_corrupt == 1
        segments.segments.clear()
        assert one.verify() == [name(2)] and one.contains([name(2)]) == [False]
        one.write([payload(1)])
        assert one.read([name(1)]) == [payload(1)]
        check_rest(address)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path, lease_s=0.3) as address, tier(address, segments) as one:
        segments.failing.add("write")
        with pytest.raises(StoreError, match="cannot be written"):
            one.write([payload(1)])
        segments.failing.clear()
        assert one.contains([name(1)]) == [False]
        # Its claim ends by itself.
        check_rest(address)
        one.write([payload(1)])
        assert one.read([name(1)]) == [payload(1)]
        segments.failing.add("read")
        assert one.read([name(1)]) == [None] and one.contains([name(1)]) == [True]


def test_bytes_go_with_what_is_evicted_and_purged(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path, disk_bytes=2**16) as address, tier(address, segments) as one:
        for number in range(6):
            one.write([payload(number, 20_000)])
        check_rest(address)
        assert len(segments.segments) == 3
        assert sum(one.contains([name(number) for number in range(6)])) == 3
        assert one.purge(None) == 3 and segments.segments == {}
        one.write([payload(1, tenant=A), payload(2, tenant=B)])
        assert one.purge(A) == 1
        # Nothing of it is left, and what was beside it is.
        assert one.read([name(1), name(2)]) == [None, payload(2, tenant=B)]
        (data,) = segments.segments.values()
        assert payload(1, tenant=A) not in data
        check_rest(address)


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    segments = KeptSegments()
    with metadata(tmp_path, disk_bytes=2**16) as address, tier(address, segments) as one:
        one.write([payload(0, 20_000)])
        assert one.pin([name(0), name(9)], True) == 1
        for number in range(1, 6):
            one.write([payload(number, 20_000)])
        assert one.contains([name(0), name(1)]) == [True, False]


def test_without_a_metadata_node_there_is_no_tier(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not answer"):
        SharedTier(KeptSegments(), DirectoryLink(f"ipc://{tmp_path}/m", SystemClock(), 0.1))
