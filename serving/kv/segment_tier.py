"""A storage tier of segments: what is written together is stored, read from and removed together.

    payload  payload  payload ... index  trailer

The index of the tier is in memory and is read back from the segments at the start; the bytes of a
payload are checked whenever they are read. Where the bytes of segments lie is another's concern:
a `SegmentStorage` keeps a segment whole or not at all, and reads ranges of it.
"""

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import xxhash

from serving.clock import Clock
from serving.kv.indexed_tier import IndexedTier
from serving.kv.segment_index import Location, Row, SegmentIndex
from serving.kv.store import (
    Buffer,
    CorruptPayloadError,
    Name,
    StoreCounts,
    StoreError,
    check,
)

_log = logging.getLogger(__name__)

_TRAILER = struct.Struct("<Q16s8s")
_TRAILER_MAGIC = b"DJSEGMT2"
_GAP_MAX = 64 * 1024
"""Payloads so near to each other are read with one call."""

_RUN_BYTES_MAX = 1 << 20
"""Read with one call; so much is still in the processor's cache when it is checked."""

_PURGE = 0
"""Kind of the only row of a segment that says what is being purged."""

_TAIL_BYTES = 64 * 1024
"""Read at once to find an index; enough for some hundreds of payloads."""

Range = tuple[int, int]
"""First byte, and the one after the last."""


class SegmentStorage(Protocol):
    """Keeps segments, for several threads at one time. All calls may raise OSError."""

    def load(self) -> Mapping[str, int]:
        """The segments that are there, whole, with their sizes; what is unfinished is removed."""
        ...

    def choose_name(self, size: int) -> str:
        """A name that no segment has had, for one of so many bytes."""
        ...

    def write(self, segment: str, parts: Sequence[Buffer]) -> None:
        """Keep a segment for good, or raise and keep nothing of it."""
        ...

    def read(self, segment: str, ranges: Sequence[Range]) -> Iterable[Buffer]:
        """Bytes of a segment, range by range as they come; fewer where it has been cut.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        ...

    def remove(self, segment: str) -> None:
        """Remove a segment; one that is not there is passed over."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class SegmentTier(IndexedTier):
    """A `BlockStore` over a `SegmentStorage`.

    Args:
        bytes_max: of all segments.
        clock: for the time to live.
        tenant_bytes_max: of one tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept; 0 is no limit.

    Raises:
        StoreError: what is stored cannot be listed.
    """

    def __init__(
        self,
        storage: SegmentStorage,
        bytes_max: int,
        clock: Clock,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
    ) -> None:
        super().__init__(SegmentIndex(bytes_max, tenant_bytes_max, ttl_s))
        self._storage = storage
        self._clock = clock
        # Purges that have begun, by the segments that say so.
        self._purges: dict[str, bytes | None] = {}
        self._num_written = self._num_read = self._num_corrupt = self._num_failed = 0
        self._bytes_written = self._bytes_read = 0
        self.refresh()
        with self._lock:
            # What was being purged when a process ended must not come back.
            self._go_on_purging(list(self._purges))
            self._index.make_room(0)
            self._remove_segments()

    def refresh(self) -> None:
        """Learn of segments that others have written, or removed, since the last time.

        Raises:
            StoreError: what is stored cannot be listed.
        """
        with self._lock:
            # Taken first: what is written meanwhile is not missing from the list.
            known, before = self._index.segments, list(self._purges)
        try:
            sizes = self._storage.load()
        except OSError as error:
            raise StoreError(f"cannot be listed: {error.strerror or error}") from error
        for segment in sorted(sizes.keys() - known - self._purges.keys()):
            rows = read_rows(self._storage, segment, sizes[segment])
            with self._lock:
                if rows is None:
                    self._num_corrupt += 1
                    self._remove_quietly(segment)
                elif rows and rows[0].kind == _PURGE:
                    self._purges[segment] = rows[0].tenant or None
                else:
                    self._index.adopt(segment, rows, sizes[segment])
        with self._lock:
            for segment in known - sizes.keys():
                self._index.remove(segment)
            for marker in self._purges.keys() - sizes.keys():
                del self._purges[marker]
            for tenant in self._purges.values():
                self._index.forget(self._index.of_tenant(tenant))
            # Whoever began it may be at it still, or may have ended.
            self._go_on_purging(before)
            self._remove_segments()

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are stored and not too old."""
        now_s = self._clock.unix_s()
        with self._lock:
            return [self._index.find(name, now_s) is not None for name in names]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those that are not stored, or damaged."""
        now_s = self._clock.unix_s()
        wanted: dict[str, list[tuple[Location, Name]]] = {}
        with self._lock:
            self._index.chain(names)
            for name in reversed(names):
                location = self._index.find(name, now_s)
                if location is not None:
                    self._index.touch(name)
                    wanted.setdefault(location.segment, []).append((location, name))
        found: dict[Name, Buffer] = {}
        for segment, places in wanted.items():
            for name, data in self._read_segment(segment, places):
                if data is None:
                    with self._lock:
                        self._num_corrupt += 1
                    self.forget([name])
                else:
                    found[name] = data
        with self._lock:
            self._num_read += len(found)
            self._bytes_read += sum(map(len, found.values()))
        return [found.get(name) for name in names]

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Store payloads as one segment.

        Those that are stored already are passed over, and so are those that a limit of their
        tenant has no room for.

        Raises:
            StoreError: they could not be stored; none of them counts as stored.
        """
        with self._lock:
            self._index.expire(self._clock.unix_s())
            rows, parts = self._index.choose(payloads)
            self._remove_segments()
        if not rows:
            return
        whole, size = segment_parts(rows, parts)
        with self._lock:
            self._index.make_room(size)
            self._remove_segments()
        segment = self._storage.choose_name(size)
        try:
            self._storage.write(segment, whole)
        except OSError as error:
            with self._lock:
                self._num_failed += 1
            self._remove_quietly(segment)
            raise StoreError(f"{segment}: cannot be written: {error}") from error
        with self._lock:
            self._index.adopt(segment, rows, size)
            self._num_written += len(rows)
            self._bytes_written += sum(map(len, parts))

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads from the index; their bytes go with their segments."""
        with self._lock:
            self._index.forget(names)
            self._remove_segments()

    def purge(self, tenant: bytes | None) -> int:
        """Drop all payloads of a tenant, or of everybody, for good; how many there were.

        What shares their segments is written anew. That a purge has begun is written down first:
        if the process ends in the middle, the next one goes on with it.
        """
        with self._lock:
            return self._purge(tenant, self._mark_purge(tenant))

    def _mark_purge(self, tenant: bytes | None) -> str | None:
        """A segment that says what is purged; None if the storage takes no more."""
        parts, size = segment_parts([Row(_PURGE, bytes(16), 0, tenant or b"", 0)], [])
        marker = self._storage.choose_name(size)
        try:
            self._storage.write(marker, parts)
        except OSError as error:
            # A full disk is a reason to purge, not one to refuse it.
            self._num_failed += 1
            _log.warning("a purge is not written down: %s", error)
            self._remove_quietly(marker)
            return None
        self._purges[marker] = tenant
        return marker

    def _go_on_purging(self, markers: Iterable[str]) -> None:
        for marker in markers:
            if marker in self._purges:
                try:
                    # What has been forgotten already lies in segments that are not whole.
                    self._purge(self._purges[marker], marker, self._index.worn_segments)
                except StoreError as error:
                    _log.warning("a purge is not over: %s", error)

    def _purge(self, tenant: bytes | None, marker: str | None, touched: Iterable[str] = ()) -> int:
        names = self._index.of_tenant(tenant)
        now_s = self._clock.unix_s()
        places = [self._index.find(name, now_s) for name in names]
        touched = {place.segment for place in places if place is not None}.union(touched)
        self._index.forget(names)
        left = [name for segment in touched for name in self._index.in_segment(segment)]
        survivors = [data for data in self.read(left) if data is not None]
        for segment in touched:
            self._index.remove(segment)
        # Others' payloads are written before they are removed, if there is room for both.
        doomed, unwritten = self._index.take_removed(), list[Buffer]()
        try:
            self.write(survivors)
        except StoreError as error:
            _log.warning("written when there is room: %s", error)
            unwritten = survivors
        is_gone = all([self._remove_quietly(segment) for segment in doomed])
        if unwritten:
            self.write(unwritten)
        if marker is not None and is_gone and self._remove_quietly(marker):
            del self._purges[marker]
        return len(names)

    def verify(self) -> list[Name]:
        """Read everything; the names of what was damaged, which is forgotten."""
        with self._lock:
            names = list(self._index)
        return [name for name in names if self.read([name]) == [None]]

    def expire(self) -> None:
        """Drop what is too old."""
        with self._lock:
            self._index.expire(self._clock.unix_s())
            self._remove_segments()

    def counts(self) -> StoreCounts:
        """What the tier has done and holds; bytes are those of segments."""
        with self._lock:
            return StoreCounts(
                num_payloads=len(self._index),
                num_bytes=self._index.num_bytes,
                num_written=self._num_written,
                num_read=self._num_read,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                num_corrupt=self._num_corrupt,
                num_evicted=self._index.num_evicted,
                num_failed=self._num_failed,
            )

    def close(self) -> None:
        """Let go of what the storage holds."""
        self._storage.close()

    def _remove_segments(self) -> None:
        for segment in self._index.take_removed():
            self._remove_quietly(segment)

    def _remove_quietly(self, segment: str) -> bool:
        """Remove a segment; whether that worked."""
        try:
            self._storage.remove(segment)
        except OSError:
            # A read-only disk keeps it; it is not in the index, and is tried again at the next
            # start.
            with self._lock:
                self._num_failed += 1
            return False
        return True

    def _read_segment(
        self, segment: str, places: list[tuple[Location, Name]]
    ) -> list[tuple[Name, Buffer | None]]:
        try:
            return list(read_payloads(self._storage, segment, places))
        except FileNotFoundError:
            # Evicted meanwhile, by whoever else uses this storage.
            self.forget([name for _, name in places])
        except OSError:
            with self._lock:
                self._num_failed += 1
        return []


def segment_parts(rows: Sequence[Row], payloads: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """A segment of `payloads`, which `rows` describe, in pieces, and its size."""
    index = msgspec.msgpack.encode(rows)
    trailer = _TRAILER.pack(len(index), xxhash.xxh3_128_digest(index), _TRAILER_MAGIC)
    parts = [*payloads, index, trailer]
    return parts, sum(map(len, parts))


def read_payloads(
    storage: SegmentStorage, segment: str, places: list[tuple[Location, Name]]
) -> Iterable[tuple[Name, Buffer | None]]:
    """The payloads at places of a segment, checked; None for what is damaged.

    Raises:
        FileNotFoundError: the segment is not there any more.
        OSError: it cannot be read now.
    """
    places.sort(key=lambda place: place[0].offset)
    runs = list(_runs(places))
    ranges = [(run[0][0].offset, run[-1][0].offset + run[-1][0].size) for run in runs]
    pieces = storage.read(segment, ranges)
    for run, (begin, _), data in zip(runs, ranges, pieces, strict=True):
        view = memoryview(data)
        for location, name in run:
            payload = view[location.offset - begin :][: location.size]
            try:
                is_whole = check(payload).name == name
            except CorruptPayloadError:
                is_whole = False
            yield name, payload if is_whole else None


def read_rows(storage: SegmentStorage, segment: str, size: int) -> list[Row] | None:
    """The index of a segment; None if it is damaged."""
    begin = max(0, size - _TAIL_BYTES)
    try:
        (tail,) = storage.read(segment, [(begin, size)])
        index_size, checksum, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
        end = size - _TRAILER.size
        if magic != _TRAILER_MAGIC or index_size > end:
            return None
        if end - index_size < begin:
            (index,) = storage.read(segment, [(end - index_size, end)])
        else:
            index = tail[end - index_size - begin : end - begin]
        if xxhash.xxh3_128_digest(index) != checksum:
            return None
        return msgspec.msgpack.decode(index, type=list[Row])
    except (OSError, struct.error, msgspec.MsgspecError):
        return None


def _runs(places: list[tuple[Location, Name]]) -> Iterable[list[tuple[Location, Name]]]:
    """Places in the order of their offsets, in groups that are worth one read."""
    run: list[tuple[Location, Name]] = []
    end = 0
    for place in places:
        is_far = run and place[0].offset - end > _GAP_MAX
        if is_far or (run and end - run[0][0].offset >= _RUN_BYTES_MAX):
            yield run
            run = []
        run.append(place)
        end = place[0].offset + place[0].size
    if run:
        yield run
