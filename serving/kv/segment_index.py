"""What a storage tier holds, in segments: which payload lies where, and which goes when room is
needed.

A *segment* is what one call to `write` has made, and is stored and removed as a whole. Room is made
payload by payload, least recently used first; a segment of which less than half is left goes with
what is left of it. The index decides and remembers; whoever owns it removes the bytes of the
segments that are named in `take_removed`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from serving.kv.eviction import EvictionQueue, TenantLimits
from serving.kv.store import Buffer, Name, read_header
from serving.observe import Histogram

_LIVE_MIN = 0.5
"""Share of a segment that must be left for it to stay, when room is needed."""


class Row(NamedTuple):
    """A payload of a segment, as it is written into the segment's own index."""

    kind: int
    key: bytes
    size: int
    tenant: bytes
    written_s: int

    @classmethod
    def of(cls, payload: Buffer) -> "Row":
        """What a payload says of itself."""
        header = read_header(payload)
        return cls(*header.name, len(payload), header.tenant, header.written_s)

    @property
    def name(self) -> Name:
        """What the payload is stored under."""
        return Name(self.kind, self.key)


@dataclass(frozen=True, slots=True)
class Location:
    """Payload `number` of a segment begins at byte `offset` of what was written."""

    segment: str
    number: int
    offset: int
    size: int


@dataclass(slots=True)
class _Segment:
    size: int
    names: list[Name] = field(default_factory=list[Name])
    num_live: int = 0
    num_live_bytes: int = 0


class SegmentIndex:
    """The payloads of one tier. Not for several threads at one time.

    Args:
        bytes_max: of all segments.
        tenant_bytes_max: of the payloads of one tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept; 0 is no limit.
    """

    def __init__(self, bytes_max: int, tenant_bytes_max: int = 0, ttl_s: int = 0) -> None:
        self._queue = EvictionQueue(bytes_max, tenant_bytes_max, ttl_s)
        self._payload_bytes_max = min(bytes_max, tenant_bytes_max or bytes_max)
        self._segments: dict[str, _Segment] = {}
        # Those that are not whole any more: only they can be worth removing.
        self._worn: set[str] = set()
        self._removed: list[str] = []
        self._held: set[Name] = set()
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Name]:
        return iter(list(self._queue.names))

    def __contains__(self, name: object) -> bool:
        return name in self._queue

    def limit(self, tenant: bytes, limits: TenantLimits) -> None:
        """Give a tenant limits of its own."""
        self._payload_bytes_max = max(self._payload_bytes_max, limits.bytes_max)
        self._queue.limit(tenant, limits)

    @property
    def evicted_age_s(self) -> Histogram:
        """How old was what made room for others."""
        return self._queue.evicted_age_s

    @property
    def segments(self) -> set[str]:
        """The segments that are known."""
        return set(self._segments)

    @property
    def worn_segments(self) -> set[str]:
        """The segments that are not whole any more."""
        return set(self._worn)

    @property
    def tenant_bytes(self) -> dict[bytes, int]:
        """Bytes of the payloads of each tenant that has any."""
        return self._queue.tenant_bytes

    def find(self, name: Name, now_s: int) -> Location | None:
        """Where a payload lies; None if it is not there, or too old."""
        location = self._location(name)
        if location is None or self._queue.is_expired(name, now_s):
            return None
        return location

    def _location(self, name: Name) -> Location | None:
        return cast("Location | None", self._queue.value(name))

    def num_leading(self, kind: int, keys: Sequence[bytes], now_s: int) -> int:
        """How many payloads of a kind are there, from the first of `keys` on."""
        # Plain tuples are equal to names, and are made faster; a prompt has thousands of blocks.
        names = zip(itertools.repeat(int(kind)), keys)
        flags = map(self._queue.names.__contains__, names)
        count = sum(1 for _ in itertools.takewhile(bool, flags))
        if not self._queue.has_ttl:
            return count
        fresh = (not self._queue.is_expired(Name(kind, key), now_s) for key in keys[:count])
        return sum(1 for _ in itertools.takewhile(bool, fresh))

    def touch(self, name: Name) -> None:
        """A payload that is there is used."""
        self._queue.touch(name)

    def pin(self, name: Name) -> None:
        """A payload that is there must stay until it is unpinned as often."""
        self._queue.pin(name)

    def unpin(self, name: Name, location: Location) -> None:
        """Take back one pin of the payload that was there, if it has not gone since."""
        if self._location(name) is location:
            self._queue.unpin(name)

    def hold(self, name: Name) -> None:
        """A payload that is there must stay until it is let go of."""
        if name not in self._held:
            self._held.add(name)
            self._queue.pin(name)

    def let_go(self, name: Name) -> None:
        """Hold a payload no longer."""
        if name in self._held:
            self._held.discard(name)
            self._queue.unpin(name)

    def keep(self, names: Iterable[Name], is_held: bool) -> int:
        """Hold payloads, or let go of them; how many of them are there."""
        known = [name for name in names if name in self]
        for name in known:
            if is_held:
                self.hold(name)
            else:
                self.let_go(name)
        return len(known)

    def chain(self, names: Sequence[Name]) -> None:
        """Payloads of one prefix, in order: the later ones are to go first."""
        self._queue.chain(names)

    def of_tenant(self, tenant: bytes | None) -> list[Name]:
        """The payloads of a tenant; all of them for None."""
        return self._queue.of_tenant(tenant)

    def in_segment(self, segment: str) -> set[Name]:
        """The payloads that are left of a segment."""
        known = self._segments.get(segment)
        if known is None:
            return set()
        # Those that have left, or lie in another segment by now, are still in the list.
        places = ((name, self._location(name)) for name in known.names)
        return {name for name, place in places if place is not None and place.segment == segment}

    def choose(self, payloads: Sequence[Buffer]) -> tuple[list[Row], list[Buffer]]:
        """What of `payloads` is to be written, after making room within the limits of tenants.

        Those that are stored already are left out, and those that their tenant has no room for.
        """
        rows: list[Row] = []
        parts: list[Buffer] = []
        seen: set[Name] = set()
        taken: dict[bytes, int] = {}
        for data in payloads:
            row = Row.of(data)
            name, tenant = row.name, row.tenant
            if name in self._queue or name in seen:
                continue
            size = taken.get(tenant, 0) + len(data)
            if not self.fits_tenant(size, tenant):
                continue
            taken[tenant] = size
            seen.add(name)
            rows.append(row)
            parts.append(data)
        return rows, parts

    def fits_tenant(self, size: int, tenant: bytes) -> bool:
        """Make room for `size` bytes of a tenant; whether that is possible."""
        if size > self._payload_bytes_max:
            # Nothing has to go for what cannot fit in any case.
            return False
        while not self._queue.fits(size, tenant):
            victim = self._queue.victim(size, tenant)
            if victim is None:
                return False
            self._drop(victim)
            self.num_evicted += 1
        return True

    def make_room(self, size: int) -> None:
        """Let payloads go until a segment of `size` bytes fits, or nothing is left."""
        self._sweep(0.0)
        while self._segments and self.num_bytes + size > self._queue.bytes_max:
            victim = self._queue.victim(0, b"")
            if victim is None:
                self._sweep(1.0)
                return
            self._drop(victim)
            self.num_evicted += 1
            self._sweep(_LIVE_MIN)

    def adopt(self, segment: str, rows: Sequence[Row], size: int) -> None:
        """A segment of `size` bytes is stored, whose payloads lie in it one after another.

        A payload that lies in several segments is taken from the one whose name comes first, so
        that all who share a storage agree on what is not needed. A segment that is known is passed
        over.
        """
        if segment in self._segments:
            return
        known = self._segments[segment] = _Segment(size)
        self.num_bytes += size
        offsets = itertools.accumulate((row.size for row in rows), initial=0)
        places = list(zip(itertools.count(), offsets, rows, strict=False))
        # The end of a prefix is to go before its beginning.
        for number, offset, row in reversed(places):
            name = row.name
            other = self._location(name)
            if other is not None:
                if other.segment <= segment or self._queue.is_pinned(name):
                    continue
                self._drop(name)
            place = Location(segment, number, offset, row.size)
            self._queue.add(name, row.size, row.tenant, row.written_s, place)
            known.names.append(name)
            known.num_live += 1
            known.num_live_bytes += row.size
        if known.num_live < len(rows) or not rows:
            self._worn.add(segment)
        self._sweep(0.0)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop payloads; those that are not there are passed over."""
        for name in names:
            if name in self._queue:
                self._drop(name)
        self._sweep(0.0)

    def remove(self, segment: str) -> None:
        """Drop a segment with all that is left of it."""
        for name in self.in_segment(segment):
            self._drop(name)
        self._remove(segment)

    def expire(self, now_s: int) -> None:
        """Drop what is too old."""
        for name in self._queue.expired(now_s):
            self._drop(name)
            self.num_evicted += 1
        self._sweep(0.0)

    def take_removed(self) -> list[str]:
        """The segments that have left the index since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def _drop(self, name: Name) -> None:
        location = self._location(name)
        assert location is not None, f"{name} is dropped twice"
        self._held.discard(name)
        self._queue.remove(name)
        segment = self._segments[location.segment]
        segment.num_live -= 1
        segment.num_live_bytes -= location.size
        self._worn.add(location.segment)

    def _sweep(self, live_min: float) -> None:
        """Remove segments of which nothing, or less than a share, is left."""
        for number in list(self._worn):
            segment = self._segments[number]
            is_worth = segment.num_live_bytes >= live_min * segment.size
            names = self.in_segment(number) if segment.num_live and not is_worth else set[Name]()
            if segment.num_live and (is_worth or any(map(self._queue.is_pinned, names))):
                continue
            for name in names:
                self._drop(name)
                self.num_evicted += 1
            self._remove(number)

    def _remove(self, segment: str) -> None:
        known = self._segments.pop(segment, None)
        self._worn.discard(segment)
        if known is not None:
            self.num_bytes -= known.size
            self._removed.append(segment)
