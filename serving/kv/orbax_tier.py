"""Payloads on a disk, in segments: each one Orbax checkpoint, written whole or not at all.

    DIRECTORY/000000000017/payloads.bin      payloads, then their index, then the trailer
    DIRECTORY/000000000017/commit_success... what Orbax writes around it

A call to `write` makes one segment. Orbax writes it under another name and renames it when
everything is on the disk, so a crash leaves a folder that is removed at the next start. The index
of the tier is in memory and is read back from the segments at the start; the bytes of a payload are
checked whenever they are read.

*Why a file format of our own inside a checkpoint*: an array checkpoint is cut into chunks that go
across blocks, and costs 45 ms and more whatever its size. This one costs 6 ms and the time to write
the bytes, and single payloads are read from it with one call each.

Room is made segment by segment: payloads are evicted from the index, least recently used first,
and a segment of which less than half is left goes as a whole.
"""

import contextlib
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import orbax.checkpoint as ocp
import xxhash

from serving.clock import Clock
from serving.kv.eviction import EvictionQueue
from serving.kv.store import (
    Buffer,
    CorruptPayloadError,
    Name,
    StoreCounts,
    StoreError,
    check,
    read_header,
)

_FILE = "payloads.bin"
_TRAILER = struct.Struct("<Q16s8s")
_TRAILER_MAGIC = b"DJSEGMT1"
_LIVE_MIN = 0.5
"""Share of a segment that must be left for it to stay, when room is needed."""

_GAP_MAX = 64 * 1024
"""Payloads so near to each other are read with one call."""

_IndexRow = tuple[int, bytes, int, int, bytes, int]
"""Kind, key, offset, size, tenant, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class _Location:
    segment: int
    offset: int
    size: int


@dataclass(slots=True)
class _Segment:
    size: int
    names: set[Name] = field(default_factory=set[Name])
    num_live_bytes: int = 0


@dataclass
class _SegmentArgs(ocp.args.CheckpointArgs):
    parts: Sequence[Buffer] = ()


class _SegmentWriter(ocp.CheckpointHandler):
    """Writes one file inside a checkpoint."""

    def save(self, directory: os.PathLike[str], args: _SegmentArgs) -> None:
        with Path(directory, _FILE).open("wb") as file:
            for part in args.parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, directory: os.PathLike[str], args: object = None) -> bytes:
        return Path(directory, _FILE).read_bytes()


ocp.args.register_with_handler(_SegmentWriter, for_save=True, for_restore=True)(_SegmentArgs)


class OrbaxTier:
    """A `BlockStore` in a directory that this process alone uses.

    Args:
        directory: made if it does not exist.
        bytes_max: of all segments.
        clock: for the time to live.
        tenant_bytes_max: of one tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept; 0 is no limit.

    Raises:
        StoreError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        clock: Clock,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        self._queue = EvictionQueue(bytes_max, tenant_bytes_max, ttl_s)
        self._locations: dict[Name, _Location] = {}
        self._segments: dict[int, _Segment] = {}
        self._checkpointer = ocp.Checkpointer(_SegmentWriter())
        self._num_written = self._num_read = self._num_corrupt = 0
        self._bytes_written = self._bytes_read = self._num_evicted = self._num_failed = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._load()
        except OSError as error:
            raise StoreError(f"{directory}: cannot be used: {error.strerror or error}") from error
        self._next_segment = max(self._segments, default=0) + 1

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are stored and not too old."""
        now_s = self._clock.unix_s()
        with self._lock:
            return [
                name in self._locations and not self._queue.is_expired(name, now_s)
                for name in names
            ]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those that are not stored, or damaged."""
        now_s = self._clock.unix_s()
        wanted: dict[int, list[tuple[_Location, Name]]] = {}
        with self._lock:
            for name in reversed(names):
                location = self._locations.get(name)
                if location is not None and not self._queue.is_expired(name, now_s):
                    self._queue.touch(name)
                    wanted.setdefault(location.segment, []).append((location, name))
        found: dict[Name, Buffer] = {}
        for segment, places in wanted.items():
            for name, data in self._read_segment(segment, places):
                try:
                    header = check(data)
                    if header.name != name:
                        raise CorruptPayloadError(f"{header.name} lies where {name} should")
                except CorruptPayloadError:
                    with self._lock:
                        self._num_corrupt += 1
                    self.forget([name])
                    continue
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
            rows, parts = self._choose(payloads)
            if not rows:
                return
            number = self._next_segment
            self._next_segment += 1
        index = msgspec.msgpack.encode(rows)
        trailer = _TRAILER.pack(len(index), xxhash.xxh3_128_digest(index), _TRAILER_MAGIC)
        size = sum(map(len, parts)) + len(index) + len(trailer)
        with self._lock:
            self._make_room(size)
        path = self._path(number)
        try:
            self._checkpointer.save(path, args=_SegmentArgs((*parts, index, trailer)))
        except (OSError, ValueError) as error:
            # Orbax reports some failures of the file system as wrong values.
            self._num_failed += 1
            self._remove(path)
            raise StoreError(f"{path}: cannot be written: {error}") from error
        with self._lock:
            self._adopt(number, rows, size)
            self._num_written += len(rows)
            self._bytes_written += sum(map(len, parts))

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads from the index; their bytes go with their segments."""
        with self._lock:
            for name in names:
                if name in self._locations:
                    self._drop(name)
            self._sweep(0.0)

    def purge(self, tenant: bytes | None) -> int:
        """Drop all payloads of a tenant, or of everybody, from the disk too; how many there were.

        What shares their segments is written anew.
        """
        with self._lock:
            names = self._queue.of_tenant(tenant)
            touched = {self._locations[name].segment for name in names}
            for name in names:
                self._drop(name)
            left = [
                name for s in touched if s in self._segments for name in self._segments[s].names
            ]
            survivors = [data for data in self.read(left) if data is not None]
            for name in left:
                if name in self._locations:
                    self._drop(name)
            for segment in touched:
                self._segments.pop(segment, None)
                self._remove(self._path(segment))
            if survivors:
                self.write(survivors)
        return len(names)

    def verify(self) -> list[Name]:
        """Read everything; the names of what was damaged, which is forgotten."""
        with self._lock:
            names = list(self._locations)
        return [name for name in names if self.read([name]) == [None]]

    def expire(self) -> None:
        """Drop what is too old."""
        with self._lock:
            for name in self._queue.expired(self._clock.unix_s()):
                self._drop(name)
                self._num_evicted += 1
            self._sweep(0.0)

    def counts(self) -> StoreCounts:
        """What the tier has done and holds; bytes are those of segments."""
        with self._lock:
            return StoreCounts(
                num_payloads=len(self._locations),
                num_bytes=self._num_segment_bytes,
                num_written=self._num_written,
                num_read=self._num_read,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                num_corrupt=self._num_corrupt,
                num_evicted=self._num_evicted,
                num_failed=self._num_failed,
            )

    def sizes(self) -> Mapping[bytes, int]:
        """Bytes held for each tenant."""
        with self._lock:
            return self._queue.tenant_bytes

    def close(self) -> None:
        """Let go of what Orbax holds."""
        self._checkpointer.close()

    @property
    def _num_segment_bytes(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:012d}"

    def _load(self) -> None:
        """Find the segments of an earlier run, and remove what was not finished."""
        for path in sorted(self._directory.iterdir()):
            if not path.is_dir():
                continue
            if not path.name.isdigit():
                self._remove(path)
                continue
            number = int(path.name)
            rows = _read_index(path / _FILE)
            if rows is None:
                self._num_corrupt += 1
                self._remove(path)
                continue
            self._adopt(number, rows, (path / _FILE).stat().st_size)
        self._make_room(0)

    def _adopt(self, number: int, rows: Iterable[_IndexRow], size: int) -> None:
        segment = self._segments[number] = _Segment(size)
        # The end of a prefix is to go before its beginning.
        for kind, key, offset, length, tenant, written_s in reversed(list(rows)):
            name = Name(kind, key)
            if name in self._locations:
                continue
            self._locations[name] = _Location(number, offset, length)
            self._queue.add(name, length, tenant, written_s)
            segment.names.add(name)
            segment.num_live_bytes += length
        self._sweep(0.0)

    def _choose(self, payloads: Sequence[Buffer]) -> tuple[list[_IndexRow], list[Buffer]]:
        """The payloads to write, after making room within the limits of their tenants."""
        rows: list[_IndexRow] = []
        parts: list[Buffer] = []
        seen: set[Name] = set()
        offset = 0
        taken: dict[bytes, int] = {}
        for data in payloads:
            header = read_header(data)
            name, tenant = header.name, header.tenant
            if name in self._locations or name in seen:
                continue
            size = taken.get(tenant, 0) + len(data)
            if not self._fits_tenant(size, tenant):
                continue
            taken[tenant] = size
            seen.add(name)
            rows.append((name.kind, name.key, offset, len(data), tenant, header.written_s))
            parts.append(data)
            offset += len(data)
        return rows, parts

    def _fits_tenant(self, size: int, tenant: bytes) -> bool:
        """Make room for `size` bytes of a tenant; whether that is possible."""
        while not self._queue.fits(size, tenant):
            victim = self._queue.victim(size, tenant)
            if victim is None:
                return False
            self._drop(victim)
            self._num_evicted += 1
        return True

    def _make_room(self, size: int) -> None:
        while self._segments and self._num_segment_bytes + size > self._queue.bytes_max:
            victim = self._queue.victim(0, b"")
            if victim is None:
                self._sweep(1.0)
                return
            self._drop(victim)
            self._num_evicted += 1
            self._sweep(_LIVE_MIN)

    def _drop(self, name: Name) -> None:
        location = self._locations.pop(name)
        self._queue.remove(name)
        segment = self._segments[location.segment]
        segment.names.discard(name)
        segment.num_live_bytes -= location.size

    def _sweep(self, live_min: float) -> None:
        """Remove segments of which nothing, or less than a share, is left."""
        for number, segment in list(self._segments.items()):
            if segment.names and segment.num_live_bytes >= live_min * segment.size:
                continue
            for name in list(segment.names):
                self._drop(name)
                self._num_evicted += 1
            del self._segments[number]
            self._remove(self._path(number))

    def _remove(self, path: Path) -> None:
        # A read-only disk keeps it; it is not in the index, and is tried again at the next start.
        with contextlib.suppress(OSError):
            shutil.rmtree(path)

    def _read_segment(
        self, number: int, places: list[tuple[_Location, Name]]
    ) -> Iterable[tuple[Name, Buffer]]:
        places.sort(key=lambda place: place[0].offset)
        try:
            descriptor = os.open(self._path(number) / _FILE, os.O_RDONLY)
        except OSError:
            # Evicted meanwhile, or the disk is gone: what cannot be read is a miss.
            self.forget([name for _, name in places])
            return
        try:
            for run in _runs(places):
                begin = run[0][0].offset
                end = run[-1][0].offset + run[-1][0].size
                try:
                    data = memoryview(os.pread(descriptor, end - begin, begin))
                except OSError:
                    with self._lock:
                        self._num_failed += 1
                    continue
                for location, name in run:
                    yield name, data[location.offset - begin :][: location.size]
        finally:
            os.close(descriptor)


def _runs(places: list[tuple[_Location, Name]]) -> Iterable[list[tuple[_Location, Name]]]:
    """Places in the order of their offsets, in groups that are worth one read."""
    run: list[tuple[_Location, Name]] = []
    end = 0
    for place in places:
        if run and place[0].offset - end > _GAP_MAX:
            yield run
            run = []
        run.append(place)
        end = place[0].offset + place[0].size
    if run:
        yield run


def _read_index(path: Path) -> list[_IndexRow] | None:
    """The index of a segment; None if it is damaged."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END) - _TRAILER.size
            file.seek(max(end, 0))
            size, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
            if magic != _TRAILER_MAGIC or size > end:
                return None
            file.seek(end - size)
            index = file.read(size)
        if xxhash.xxh3_128_digest(index) != checksum:
            return None
        return msgspec.msgpack.decode(index, type=list[_IndexRow])
    except (OSError, struct.error, msgspec.MsgspecError):
        return None
