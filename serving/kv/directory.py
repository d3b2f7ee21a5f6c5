"""Where the payloads of a store lie that several hosts share, and who may write, read or remove.

Payloads lie in segments, each written once under a name of its own, by whoever was granted the
write. The directory decides what is written, by whom, and what goes; bytes never pass through it.

    begin -> a write of what nobody else has or writes -> complete: found from now on
    locate -> places under a lease: neither is the payload evicted nor its segment removed meanwhile
    make room -> payloads leave the index -> segments are doomed -> somebody removes their bytes

A write that is not completed in time is given up, and refused when it is completed after all.
Writes and leases bear numbers that begin at the *epoch*, which differs from start to start, so
nothing that an earlier directory granted is taken for something of this one.

All of it is *soft state*: what lies where is known again from a log (`placements`), or from what
those who see the store announce. Nothing it could forget makes an answer wrong: a payload says
itself which key and layout it belongs to, and a name that is not found is a miss.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serving.kv.segment_index import Location, Row, SegmentIndex
from serving.kv.store import Name, PayloadKind

_NUMBERS_PER_EPOCH = 1 << 32


@dataclass(frozen=True, slots=True)
class DirectoryTimes:
    """How long things may take.

    Attributes:
        write_ns: from the grant of a write to its completion.
        lease_ns: a read of what was located.
        removal_ns: the removal of a segment, after which somebody else is asked for it.
    """

    write_ns: int = 60_000_000_000
    lease_ns: int = 60_000_000_000
    removal_ns: int = 60_000_000_000


@dataclass(slots=True)
class DirectoryCounts:
    """What has happened since the start."""

    num_matches: int = 0
    num_matched_blocks: int = 0
    num_committed: int = 0
    num_refused: int = 0
    num_given_up: int = 0
    num_announced: int = 0
    num_leases_expired: int = 0


@dataclass(slots=True)
class _Write:
    rows: list[Row]
    deadline_ns: int


@dataclass(slots=True)
class _Lease:
    places: list[tuple[Name, Location]]
    segments: set[str]
    deadline_ns: int


@dataclass(slots=True)
class _Doom:
    """When a segment may be given to somebody to remove; the first time is at once."""

    not_before_ns: int = 0


@dataclass(slots=True)
class Changes:
    """What has to be written down: segments that have come, and those that have left."""

    come: dict[str, tuple[int, list[Row]]] = field(default_factory=dict[str, tuple[int, list[Row]]])
    gone: list[str] = field(default_factory=list[str])


class Directory:
    """The payloads of one store.

    Args:
        epoch: 31 bits that no other start has.
        bytes_max, tenant_bytes_max, ttl_s: limits of the whole store, as for every tier.
    """

    def __init__(
        self,
        epoch: int,
        bytes_max: int,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
        times: DirectoryTimes | None = None,
    ) -> None:
        self.epoch = epoch
        self.counts = DirectoryCounts()
        self._times = times or DirectoryTimes()
        self._index = SegmentIndex(bytes_max, tenant_bytes_max, ttl_s)
        self._numbers = itertools.count(epoch * _NUMBERS_PER_EPOCH + 1)
        self._writes: dict[int, _Write] = {}
        self._claimed: set[Name] = set()
        self._leases: dict[int, _Lease] = {}
        self._readers: dict[str, int] = {}
        self._doomed: dict[str, _Doom] = {}
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def index(self) -> SegmentIndex:
        """What there is, to be looked at."""
        return self._index

    @property
    def num_writes(self) -> int:
        """Writes that are granted and not completed."""
        return len(self._writes)

    @property
    def num_leases(self) -> int:
        """Leases that hold payloads."""
        return len(self._leases)

    @property
    def num_doomed(self) -> int:
        """Segments that are to be removed."""
        return len(self._doomed)

    # --- looking up ---

    def match(
        self, keys: Sequence[bytes], first: int, num_usable: int, now_s: int
    ) -> tuple[int, int]:
        """Blocks of the longest stored prefix of a chain that has a state at its end, and blocks of
        the longest one with or without.

        `first` blocks are present elsewhere and need not be stored; a prefix of `num_usable` blocks
        or fewer counts as none.
        """
        self.counts.num_matches += 1
        num_present = first + self._index.num_leading(PayloadKind.BLOCK, keys[first:], now_s)
        for count in range(num_present, num_usable, -1):
            name = Name(PayloadKind.STATE, keys[count - 1])
            if name in self._index and self._index.find(name, now_s) is not None:
                self.counts.num_matched_blocks += count
                return count, num_present
        return 0, num_present

    def contains(self, names: Sequence[Name], now_s: int) -> list[bool]:
        """Which payloads are stored."""
        return [self._index.find(name, now_s) is not None for name in names]

    def locate(
        self, names: Sequence[Name], now_s: int, now_ns: int
    ) -> tuple[int, list[Location | None]]:
        """A lease, and where payloads lie as long as it lasts."""
        found = [self._index.find(name, now_s) for name in names]
        self._index.chain(names)
        places = [
            (name, place) for name, place in zip(names, found, strict=True) if place is not None
        ]
        for name, _ in reversed(places):
            self._index.touch(name)
            self._index.pin(name)
        lease = next(self._numbers)
        segments = {place.segment for _, place in places}
        for segment in segments:
            self._readers[segment] = self._readers.get(segment, 0) + 1
        self._leases[lease] = _Lease(places, segments, now_ns + self._times.lease_ns)
        return lease, found

    def release(self, lease: int) -> bool:
        """A lease is over; whether it was there still."""
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        for name, place in held.places:
            self._index.unpin(name, place)
        for segment in held.segments:
            self._readers[segment] -= 1
            if not self._readers[segment]:
                del self._readers[segment]
        return True

    # --- writing ---

    def begin(self, rows: Sequence[Row], now_ns: int) -> tuple[int, list[int]]:
        """Grant a write of those payloads, by index, that are neither stored nor being written.

        Room is made for them first. Those that their tenant has no room for are not granted.
        """
        granted: list[int] = []
        claimed: set[Name] = set()
        taken: dict[bytes, int] = {}
        for write in self._writes.values():
            for row in write.rows:
                taken[row.tenant] = taken.get(row.tenant, 0) + row.size
        for index, row in enumerate(rows):
            known = row.name in claimed or row.name in self._claimed or row.name in self._index
            size = taken.get(row.tenant, 0) + row.size
            if known or not self._index.fits_tenant(size, row.tenant):
                continue
            taken[row.tenant] = size
            claimed.add(row.name)
            granted.append(index)
        chosen = [rows[index] for index in granted]
        if chosen:
            self._index.make_room(sum(taken.values()))
        self._collect()
        self._claimed |= claimed
        write = next(self._numbers)
        if chosen:
            self._writes[write] = _Write(chosen, now_ns + self._times.write_ns)
        return write, granted

    def complete(self, write: int, segment: str, size: int) -> bool:
        """What a write was granted is stored; False if it was given up, or the name is in use."""
        begun = self._writes.pop(write, None)
        if begun is None:
            self.counts.num_refused += 1
            return False
        self._claimed -= {row.name for row in begun.rows}
        if segment in self._index.segments or segment in self._doomed:
            self.counts.num_refused += 1
            return False
        self.counts.num_committed += len(begun.rows)
        self._adopt(segment, begun.rows, size)
        return True

    def announce(self, segment: str, rows: Sequence[Row], size: int) -> None:
        """A segment is stored, whoever wrote it; one that is known or doomed is passed over."""
        if segment not in self._index.segments and segment not in self._doomed:
            self.counts.num_announced += 1
            self._adopt(segment, rows, size)

    def unknown(self, segments: Iterable[str]) -> list[str]:
        """Segments that are neither known nor about to be removed."""
        known = self._index.segments
        return [name for name in segments if name not in known and name not in self._doomed]

    def _adopt(self, segment: str, rows: Sequence[Row], size: int) -> None:
        self._changes.come[segment] = size, list(rows)
        self._index.adopt(segment, rows, size)
        self._index.make_room(0)
        self._collect()

    # --- removing ---

    def forget(self, names: Sequence[Name]) -> None:
        """Payloads are not to be found any more."""
        self._index.forget(names)
        self._collect()

    def purge(self, tenant: bytes | None, now_s: int) -> tuple[int, list[str]]:
        """Forget all payloads of a tenant, or of everybody: how many there were, and the segments
        in which their bytes lie beside those of others.
        """
        names = self._index.of_tenant(tenant)
        places = [self._index.find(name, now_s) for name in names]
        touched = {place.segment for place in places if place is not None}
        self.forget(names)
        return len(names), [name for name in touched if name in self._index.segments]

    def remove(self, segments: Iterable[str]) -> None:
        """The bytes of segments are gone, and with them what the index has of them."""
        for segment in segments:
            self._index.remove(segment)
            self._doomed.pop(segment, None)
            self._changes.gone.append(segment)
        for segment in self._index.take_removed():
            self._doomed.pop(segment, None)

    def take_doomed(self, now_ns: int) -> list[str]:
        """Segments whose bytes the asker is to remove. Nobody else is asked for a while."""
        taken: list[str] = []
        for segment, doom in self._doomed.items():
            if segment not in self._readers and now_ns >= doom.not_before_ns:
                doom.not_before_ns = now_ns + self._times.removal_ns
                taken.append(segment)
        return taken

    def tick(self, now_s: int, now_ns: int) -> None:
        """Give up what has taken too long, and drop what is too old."""
        for number, write in list(self._writes.items()):
            if now_ns >= write.deadline_ns:
                del self._writes[number]
                self._claimed -= {row.name for row in write.rows}
                self.counts.num_given_up += 1
        for number, lease in list(self._leases.items()):
            if now_ns >= lease.deadline_ns:
                self.release(number)
                self.counts.num_leases_expired += 1
        self._index.expire(now_s)
        self._collect()

    def pin(self, names: Sequence[Name], is_pinned: bool, now_s: int) -> int:
        """Keep payloads from being evicted, or no longer; how many of them there are."""
        count = 0
        for name in names:
            place = self._index.find(name, now_s)
            if place is None:
                continue
            count += 1
            if is_pinned:
                self._index.hold(name)
            else:
                self._index.let_go(name)
        return count

    def take_changes(self) -> Changes:
        """What has come and gone since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def _collect(self) -> None:
        """Segments that have left the index are doomed."""
        for segment in self._index.take_removed():
            self._doomed[segment] = _Doom()
            self._changes.come.pop(segment, None)
            self._changes.gone.append(segment)
