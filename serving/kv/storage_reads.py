"""Reads of storage into the host tier, for requests that wait for the payloads.

What several requests want is read once. A tenant may keep storage busy with half of the reads that
are allowed at one time; requests beyond that wait for their turn.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.clock import Clock, s_of_ns
from serving.kv.host_tier import HostTier, Place
from serving.kv.store import BlockStore, Buffer, Name, StoreError, read_header
from serving.kv.tier_metrics import TierMetrics


@dataclass(slots=True, eq=False)
class Fetch:
    """A request for payloads, the state of its prefix being the last.

    Attributes:
        client, call: whom to answer.
        names: the payloads.
        num_blocks: blocks of the prefix that they belong to.
        tenant: whose share of the reads it uses.
        pins: where the payloads are, pinned for the request.
        num_read: payloads that were not in memory.
        error: why some could not be had; None if all are pinned.
        missing: payloads that are not pinned yet.
        is_counted: whether it counts as a hit or a miss; one that is tried again does not.
        on_ready: called when all are pinned, or some cannot be had, in place of an answer.
    """

    client: bytes
    call: int
    names: list[Name]
    num_blocks: int
    tenant: bytes
    pins: dict[Name, Place] = field(default_factory=dict[Name, Place])
    num_read: int = 0
    error: str | None = None
    missing: set[Name] = field(default_factory=set[Name])
    is_counted: bool = True
    on_ready: "Callable[[Fetch], None] | None" = None


class Background(Protocol):
    """Does slow work on another thread and goes on with its result on the loop's."""

    def __call__(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None: ...


class StorageReads:
    """Pins the payloads of requests, reading from storage what is not in memory.

    Args:
        store: None if there is no storage.
        finish: called with each request when all is pinned, or some cannot be had.
        reading_max: requests that storage is read for at one time.
    """

    def __init__(
        self,
        host: HostTier,
        store: BlockStore | None,
        background: Background,
        clock: Clock,
        finish: Callable[[Fetch], None],
        reading_max: int,
    ) -> None:
        self._host = host
        self._store = store
        self._background = background
        self._clock = clock
        self._finish = finish
        self._reading_max = reading_max
        # Payloads that are being read, and who waits for them.
        self._reading: dict[Name, list[Fetch]] = {}
        self._queued: deque[Fetch] = deque()
        self._active: dict[bytes, int] = {}
        self.num_coalesced = 0
        self.host = TierMetrics()
        self.storage = TierMetrics()

    def is_reading(self, name: Name) -> bool:
        """Whether a payload is on its way into memory."""
        return name in self._reading

    def begin(self, fetch: Fetch) -> None:
        """Pin what is in memory; read the rest, or wait until there is a turn for it."""
        now_s = self._clock.unix_s()
        self._host.queue.chain(fetch.names)
        # From the end on, so that the beginning counts as used last.
        for name in reversed(fetch.names):
            if self._host.contains(name, now_s):
                fetch.pins[name] = self._host.pin(name)
            else:
                fetch.missing.add(name)
        fetch.num_read = len(fetch.missing)
        if fetch.is_counted:
            self.host.num_hits += len(fetch.pins)
            self.host.num_misses += fetch.num_read
        self.host.bytes_hit += sum(place.size for place in fetch.pins.values())
        if not fetch.missing:
            self._finish(fetch)
        elif self._may_read(fetch.tenant):
            self._read(fetch)
        else:
            self._queued.append(fetch)

    def _may_read(self, tenant: bytes) -> bool:
        is_free = sum(self._active.values()) < self._reading_max
        return is_free and self._active.get(tenant, 0) < max(1, self._reading_max // 2)

    def _read(self, fetch: Fetch) -> None:
        self._active[fetch.tenant] = self._active.get(fetch.tenant, 0) + 1
        names: list[Name] = []
        for name in fetch.names:
            if name in fetch.missing:
                if name in self._reading:
                    self.num_coalesced += 1
                else:
                    self._reading[name] = []
                    names.append(name)
                self._reading[name].append(fetch)
        store = self._store
        if not names:
            return
        if store is None:
            self._on_read(dict.fromkeys(names), fetch.tenant)
            return

        begun_ns = self._clock.now_ns()

        def read() -> dict[Name, Buffer | None]:
            try:
                return dict(zip(names, store.read(names), strict=True))
            except StoreError:
                # Counted by the store; for the request it is a miss.
                return dict.fromkeys(names)

        def then(found: dict[Name, Buffer | None]) -> None:
            self.storage.read_s.observe(s_of_ns(self._clock.now_ns() - begun_ns))
            there = [data for data in found.values() if data is not None]
            self.storage.num_hits += len(there)
            self.storage.num_misses += len(found) - len(there)
            self.storage.bytes_hit += sum(map(len, there))
            self._on_read(found, fetch.tenant)

        self._background(read, then)

    def _on_read(self, found: Mapping[Name, Buffer | None], tenant: bytes) -> None:
        """Copy what was read into memory, and let those who wait go on."""
        copies: list[tuple[Name, Place, Buffer]] = []
        now_s = self._clock.unix_s()
        for name, data in found.items():
            if data is None:
                self._arrive(name, "a payload that was found could not be read")
            elif self._host.is_known(name):
                # It was stored once more meanwhile.
                is_there = self._host.contains(name, now_s)
                self._arrive(name, None if is_there else "a payload is being written")
            else:
                written_s = read_header(data).written_s
                place = self._host.reserve(name, len(data), tenant, written_s)
                if place is None:
                    self._arrive(name, "no room in shared memory")
                else:
                    copies.append((name, place, data))

        def copy() -> None:
            for _, place, data in copies:
                self._host.read(place)[:] = data

        def then(_: None) -> None:
            for name, place, _data in copies:
                self._host.commit(name, place)
                self._arrive(name, None)
                self._host.unpin(name, place)

        if copies:
            self._background(copy, then)

    def _arrive(self, name: Name, error: str | None) -> None:
        """A payload is in memory, or `error` says why it is not."""
        for fetch in self._reading.pop(name, ()):
            fetch.missing.discard(name)
            if error is not None:
                fetch.error = error
            elif self._host.contains(name):
                fetch.pins[name] = self._host.pin(name)
            else:
                fetch.error = "a payload was evicted before it could be used"
            if not fetch.missing:
                self._leave(fetch.tenant)
                self._finish(fetch)

    def _leave(self, tenant: bytes) -> None:
        """A request has all it waited for; others may have their turn."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
        for _ in range(len(self._queued)):
            fetch = self._queued.popleft()
            if self._may_read(fetch.tenant):
                # Some of it may have come into memory since.
                self._resume(fetch)
            else:
                self._queued.append(fetch)

    def _resume(self, fetch: Fetch) -> None:
        for name in list(fetch.missing):
            if self._host.contains(name):
                fetch.pins[name] = self._host.pin(name)
                fetch.missing.discard(name)
        if fetch.missing:
            self._read(fetch)
        else:
            self._finish(fetch)
