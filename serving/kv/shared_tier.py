"""A storage tier that several hosts use at one time: segments in a store that all of them reach,
and a metadata node that says what lies where and what goes.

    write   Begin -> the segment is written -> Complete; it counts only then
    read    Locate (a lease) -> the bytes are read and checked -> Release, with what was not there

Whoever is asked to removes the bytes of segments that the directory has given up. A directory that
has started anew is told which segments there are. While it does not answer, everything is a miss.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from serving.kv import directory_calls as calls
from serving.kv.directory_link import DirectoryLink
from serving.kv.segment_index import Location, Row
from serving.kv.segment_tier import SegmentStorage, read_payloads, read_rows, segment_parts
from serving.kv.store import Buffer, Name, StoreCounts, StoreError

_log = logging.getLogger(__name__)

_ANNOUNCED_MAX = 64
"""Segments in one message."""


class SharedTier:
    """A `BlockStore` over a `SegmentStorage` that others use too.

    Args:
        storage: closed with the tier. Names of its segments are never given twice, by nobody.
        link: to the metadata node, not started yet; closed with the tier.

    Raises:
        StoreError: the metadata node does not answer.
    """

    def __init__(self, storage: SegmentStorage, link: DirectoryLink) -> None:
        self._storage = storage
        self._link = link
        self._lock = threading.Lock()
        self._counts = StoreCounts()
        self._work = ThreadPoolExecutor(1, "kv-shared")
        link.on_epoch = lambda _: self._later(self._announce)
        link.on_doomed = lambda segments: self._later(lambda: self._remove(segments))
        link.start()
        try:
            link.ask(calls.Welcome, calls.Hello(0))
        except StoreError:
            self.close()
            raise

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are stored.

        Raises:
            StoreError: the metadata node does not answer.
        """
        answer = self._link.ask(calls.Contained, calls.Contains(0, *calls.pack_names(names)))
        return [bool(flag) for flag in answer.flags]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those that are not stored, or damaged.

        Raises:
            StoreError: the metadata node does not answer.
        """
        answer = self._link.ask(calls.Located, calls.Locate(0, *calls.pack_names(names)))
        wanted: dict[str, list[tuple[Location, Name]]] = {}
        for name, spot in zip(names, answer.spots, strict=True):
            if spot is not None:
                number, offset, size = spot
                segment = answer.segments[number]
                place = Location(segment, 0, offset, size)
                wanted.setdefault(segment, []).append((place, name))
        found: dict[Name, Buffer] = {}
        lost: list[Name] = []
        num_corrupt = 0
        for segment, places in wanted.items():
            try:
                for name, data in read_payloads(self._storage, segment, places):
                    if data is None:
                        num_corrupt += 1
                        lost.append(name)
                    else:
                        found[name] = data
            except FileNotFoundError:
                lost += [name for _, name in places]
            except OSError as error:
                self._count(num_failed=1)
                _log.warning("%s: cannot be read: %s", segment, error)
        self._link.tell(calls.Release(answer.lease, *calls.pack_names(lost)))
        size = sum(map(len, found.values()))
        self._count(num_read=len(found), bytes_read=size, num_corrupt=num_corrupt)
        return [found.get(name) for name in names]

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Store payloads that nobody has stored or is storing, as one segment.

        Raises:
            StoreError: they could not be stored, or it took so long that they do not count.
        """
        answer = self._link.ask(calls.Begun, calls.Begin(0, [Row.of(data) for data in payloads]))
        if not answer.granted:
            return
        rows = [Row.of(payloads[index]) for index in answer.granted]
        parts, size = segment_parts(rows, [payloads[index] for index in answer.granted])
        segment = self._storage.choose_name(size)
        try:
            self._storage.write(segment, parts)
            is_kept = self._link.ask(
                calls.Completed, calls.Complete(0, answer.write, segment, size)
            ).is_kept
        except OSError as error:
            # Nobody is to know whether it counts: what is not there is a miss.
            self._count(num_failed=1)
            self._remove([segment])
            raise StoreError(f"{segment}: cannot be written: {error}") from error
        if not is_kept:
            self._count(num_failed=1)
            self._remove([segment])
            raise StoreError(f"{segment}: came too late")
        written = sum(row.size for row in rows)
        self._count(num_written=len(rows), bytes_written=written)

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads; their bytes go with their segments."""
        self._link.ask(calls.Dropped, calls.Drop(0, *calls.pack_names(names)))

    def purge(self, tenant: bytes | None) -> int:
        """Drop all payloads of a tenant, or of everybody, for good; how many there were.

        What shares their segments is written anew.

        Raises:
            StoreError: the metadata node does not answer.
        """
        dropped = self._link.ask(calls.Dropped, calls.Drop(0, is_purge=True, tenant=tenant))
        if dropped.touched:
            left = self._link.ask(calls.Remained, calls.Remaining(0, dropped.touched))
            names = calls.unpack_names(left.kinds, left.keys)
            survivors = [data for data in self.read(names) if data is not None]
            self._remove(dropped.touched)
            if survivors:
                self.write(survivors)
        # What was doomed is removed now, not when somebody says hello.
        self._remove(self._link.ask(calls.Welcome, calls.Hello(0)).doomed)
        return dropped.num_dropped

    def verify(self) -> list[Name]:
        """Read everything; the names of what was damaged, which is forgotten."""
        left = self._link.ask(calls.Remained, calls.Remaining(0))
        names = calls.unpack_names(left.kinds, left.keys)
        return [name for name in names if self.read([name]) == [None]]

    def pin(self, names: Sequence[Name], is_pinned: bool) -> int:
        """Keep payloads from being evicted, or no longer; how many of them there are."""
        message = calls.Pin(0, *calls.pack_names(names), is_pinned)
        return self._link.ask(calls.Pinned, message).num_pinned

    def counts(self) -> StoreCounts:
        """What this tier has done; what the store holds, the metadata node knows."""
        with self._lock:
            return self._counts

    def sizes(self) -> Mapping[bytes, int]:
        """Nothing: what tenants hold, the metadata node knows."""
        return {}

    def close(self) -> None:
        """Let go of the store and of the metadata node."""
        self._work.shutdown(cancel_futures=True)
        self._link.close()
        self._storage.close()

    def _later(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except OSError as error:
                _log.warning("%s", error)

        try:
            self._work.submit(guarded)
        except RuntimeError:
            _log.debug("the tier is being closed")

    def _announce(self) -> None:
        """Tell a directory that may have started anew which segments there are."""
        sizes = self._storage.load()
        names = sorted(sizes)
        unknown = self._link.ask(calls.Announced, calls.Announce(0, names)).unknown
        for begin in range(0, len(unknown), _ANNOUNCED_MAX):
            found: list[calls.Found] = []
            for segment in unknown[begin : begin + _ANNOUNCED_MAX]:
                rows = read_rows(self._storage, segment, sizes[segment])
                if rows is not None:
                    found.append((segment, sizes[segment], rows))
            self._link.ask(calls.Announced, calls.Announce(0, segments=found))

    def _remove(self, segments: Sequence[str]) -> None:
        removed: list[str] = []
        for segment in segments:
            try:
                self._storage.remove(segment)
                removed.append(segment)
            except OSError as error:
                self._count(num_failed=1)
                _log.warning("%s: cannot be removed: %s", segment, error)
        if removed:
            self._link.tell(calls.Removed(removed))

    def _count(self, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self._counts, name) + count for name, count in more.items()}
            self._counts = replace(self._counts, **sums)
