"""Payloads in named shared memory: one process owns them, others map the same bytes.

The owner decides what lies where. Whoever maps the memory is given *places* and reads or writes
there, as long as the payload is pinned for it. Each place begins with a generation number, which no
two payloads share and which is zero where none lies: a reader looks at it before and after it has
copied, so a place that was given to another payload meanwhile is noticed even if its pin was lost.

    place   0   8  generation        16  payload (its size is part of the place)

*Why a mapped file and not `multiprocessing.shared_memory`*: that unlinks the memory when any of the
processes that map it ends.
"""

import bisect
import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from serving.kv.eviction import EvictionQueue
from serving.kv.store import Name

_ALIGNMENT = 64
PREFIX_SIZE = 16
_GENERATION = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: `offset` of its prefix, `size` without it."""

    offset: int
    size: int
    generation: int


class StalePlaceError(LookupError):
    """Another payload lies there now, or none."""


class SharedArena:
    """Bytes in a file of a memory file system, mapped by several processes.

    Use `create` or `attach`. The owner's `close` removes the name; who maps it keeps the bytes.
    """

    def __init__(self, path: Path, size: int, descriptor: int, is_owner: bool) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor
        self._is_owner = is_owner
        self._map = mmap.mmap(descriptor, size)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, size: int) -> "SharedArena":
        """New memory of `size` zero bytes, all of them reserved now.

        Raises:
            OSError: the name exists, or there is no room.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Held as long as the owner lives, which is how others see that it does.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Without this, memory that is missing shows later, as a signal that ends the process.
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            path.unlink()
            os.close(descriptor)
            raise
        return cls(path, size, descriptor, is_owner=True)

    @classmethod
    def attach(cls, path: Path, size: int) -> "SharedArena":
        """Map memory that another process has created.

        Raises:
            OSError: there is none of that name, or it is smaller.
        """
        descriptor = os.open(path, os.O_RDWR)
        found = os.fstat(descriptor).st_size
        if found < size:
            os.close(descriptor)
            raise OSError(f"{path} has {found} bytes; expected {size}")
        return cls(path, size, descriptor, is_owner=False)

    def payload(self, place: Place) -> memoryview:
        """The bytes of a place, to be read or written while it is pinned.

        Raises:
            StalePlaceError: the place has another generation.
        """
        self.check(place)
        begin = place.offset + PREFIX_SIZE
        return self._view[begin : begin + place.size]

    def check(self, place: Place) -> None:
        """Raise `StalePlaceError` unless the payload lies there still."""
        end = place.offset + PREFIX_SIZE + place.size
        if not 0 <= place.offset < end <= self.size:
            raise StalePlaceError(f"{place} lies outside of {self.size} bytes")
        (generation,) = _GENERATION.unpack_from(self._view, place.offset)
        if generation != place.generation:
            raise StalePlaceError(f"{place} now has generation {generation}")

    def mark(self, offset: int, generation: int) -> None:
        """Give a place a generation; 0 for none. For the owner."""
        _GENERATION.pack_into(self._view, offset, generation)

    def close(self) -> None:
        """Unmap; the owner also removes the name."""
        if self._is_owner:
            self.path.unlink(missing_ok=True)
        # Views that others still hold keep the bytes until they are gone.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        os.close(self._descriptor)


def remove_abandoned(directory: Path, prefix: str) -> int:
    """Remove the memory of owners that ended without closing it; how many there were."""
    count = 0
    for path in directory.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                count += 1
            finally:
                os.close(descriptor)
    return count


class FreeSpace:
    """Holes in a range of bytes, by offset; the first that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self._offsets = [0]
        self._sizes = {0: size}

    @property
    def num_bytes(self) -> int:
        """Free bytes, in one piece or not."""
        return sum(self._sizes.values())

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes that are no longer free; None if no hole is so large."""
        for index, offset in enumerate(self._offsets):
            hole = self._sizes[offset]
            if hole < size:
                continue
            del self._sizes[offset]
            if hole > size:
                self._offsets[index] = offset + size
                self._sizes[offset + size] = hole - size
            else:
                del self._offsets[index]
            return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Bytes that are free again."""
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes.pop(self._offsets.pop(index))
        if index and self._offsets[index - 1] + self._sizes[self._offsets[index - 1]] == offset:
            self._sizes[self._offsets[index - 1]] += size
            return
        self._offsets.insert(index, offset)
        self._sizes[offset] = size


@dataclass(slots=True)
class _Entry:
    place: Place
    num_pins: int = 0
    is_ready: bool = False
    is_indexed: bool = True


class HostTier:
    """The payloads in an arena, for the process that owns it.

    A payload is reserved, written and then committed; it is found from then on. Reserved and pinned
    ones stay where they are. One that is forgotten while pinned is not found any more, and its
    place is free when the last pin is gone.

    Args:
        arena: created by this process.
        tenant_bytes_max: bytes of one tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept; 0 is no limit.
    """

    def __init__(self, arena: SharedArena, tenant_bytes_max: int = 0, ttl_s: int = 0) -> None:
        self.arena = arena
        self.queue = EvictionQueue(arena.size, tenant_bytes_max, ttl_s)
        self._free = FreeSpace(arena.size)
        self._entries: dict[Name, _Entry] = {}
        self._pinned: dict[Place, _Entry] = {}
        self._generation = 0
        self.num_evicted = 0

    @property
    def num_pinned(self) -> int:
        """Places that are reserved or pinned."""
        return len(self._pinned)

    def contains(self, name: Name, now_s: int = 0) -> bool:
        """Whether a payload is there, and not too old."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_ready and not self.queue.is_expired(name, now_s)

    def is_known(self, name: Name) -> bool:
        """Whether a payload is there or being written."""
        return name in self._entries

    def reserve(self, name: Name, size: int, tenant: bytes, now_s: int) -> Place | None:
        """Room for a payload that is not there, pinned for the caller; None if there is none."""
        assert name not in self._entries, f"{name} is reserved twice"
        length = _padded(size)
        while not self.queue.fits(length, tenant):
            if not self._evict(length, tenant):
                return None
        while (offset := self._free.take(length)) is None:
            if not self._evict(length, tenant):
                return None
        self._generation += 1
        place = Place(offset, size, self._generation)
        self.arena.mark(offset, self._generation)
        entry = _Entry(place, num_pins=1)
        self._entries[name] = self._pinned[place] = entry
        self.queue.add(name, length, tenant, now_s)
        self.queue.pin(name)
        return place

    def commit(self, name: Name, place: Place) -> bool:
        """The payload is written; False if the place is no longer its own. It stays pinned."""
        entry = self._entries.get(name)
        if entry is None or entry.place != place:
            return False
        entry.is_ready = True
        return True

    def pin(self, name: Name) -> Place:
        """The place of a payload that is there, which stays until it is unpinned."""
        entry = self._entries[name]
        assert entry.is_ready, f"{name} is not written yet"
        entry.num_pins += 1
        self._pinned[entry.place] = entry
        self.queue.pin(name)
        self.queue.touch(name)
        return entry.place

    def unpin(self, name: Name, place: Place) -> None:
        """Take back one pin; a payload that nobody has committed is gone with its last one."""
        entry = self._pinned[place]
        entry.num_pins -= 1
        if entry.is_indexed:
            self.queue.unpin(name)
        if entry.num_pins:
            return
        del self._pinned[place]
        if not entry.is_indexed:
            self._release(place)
        elif not entry.is_ready:
            self._drop(name)

    def forget(self, name: Name) -> bool:
        """The payload is not to be found any more; whether there was one."""
        if name not in self._entries:
            return False
        self._drop(name)
        return True

    def expire(self, now_s: int) -> None:
        """Drop what is too old."""
        for name in self.queue.expired(now_s):
            self._drop(name)
            self.num_evicted += 1

    def read(self, place: Place) -> memoryview:
        """The payload at a place that is pinned."""
        return self.arena.payload(place)

    def _evict(self, size: int, tenant: bytes) -> bool:
        name = self.queue.victim(size, tenant)
        if name is None:
            return False
        self._drop(name)
        self.num_evicted += 1
        return True

    def _drop(self, name: Name) -> None:
        entry = self._entries.pop(name)
        self.queue.remove(name)
        entry.is_indexed = False
        if not entry.num_pins:
            self._release(entry.place)

    def _release(self, place: Place) -> None:
        self.arena.mark(place.offset, 0)
        self._free.give(place.offset, _padded(place.size))


def _padded(size: int) -> int:
    return -(-(size + PREFIX_SIZE) // _ALIGNMENT) * _ALIGNMENT
