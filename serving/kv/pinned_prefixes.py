"""Prefixes that an operator keeps in shared memory: a long system prompt, before its rush comes.

*Warming* brings what is stored of a prefix into shared memory; *pinning* does so and keeps it
there, and in storage that can, until it is unpinned or the process ends. Pins may take half of the
memory, so that there is always room for the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from serving.kv.host_tier import HostTier, Place
from serving.kv.storage_reads import Background, Fetch, StorageReads
from serving.kv.store import Name, PayloadKind, StoreError

_PINNED_SHARE = 0.5

AskStore = Callable[[list[Name], Callable[[set[Name]], None]], None]
"""Goes on with those of the names that are in memory or in storage."""


@runtime_checkable
class PinningStore(Protocol):
    """A storage tier that keeps what it is told to."""

    def pin(self, names: Sequence[Name], is_pinned: bool) -> int:
        """Keep payloads from being evicted, or no longer; how many of them there are."""
        ...


@dataclass(frozen=True, slots=True)
class Pinning:
    """What came of it: blocks of the prefix that are in shared memory, or why there are none."""

    num_blocks: int = 0
    error: str | None = None


Then = Callable[[Pinning], None]


class PinnedPrefixes:
    """The pins of operators in one host tier; all calls on the loop's thread."""

    def __init__(
        self,
        host: HostTier,
        reads: StorageReads,
        store: object,
        ask_store: AskStore,
        background: Background,
    ) -> None:
        self._host = host
        self._reads = reads
        self._store = store if isinstance(store, PinningStore) else None
        self._ask_store = ask_store
        self._background = background
        self._pins: dict[Name, Place] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that are pinned."""
        return sum(place.size for place in self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def bring(self, keys: Sequence[bytes], tenant: bytes, is_pinned: bool, then: Then) -> None:
        """Bring what is stored of a chain into shared memory, and pin it or not."""
        blocks = [Name(PayloadKind.BLOCK, key) for key in keys]
        states = [Name(PayloadKind.STATE, key) for key in keys]

        def on_known(there: set[Name]) -> None:
            count = next((n for n, name in enumerate(blocks) if name not in there), len(blocks))
            while count and states[count - 1] not in there:
                count -= 1
            if not count:
                then(Pinning(0, "no prefix of it is stored; compute it first"))
                return
            names = [*blocks[:count], *(name for name in states[:count] if name in there)]
            fetch = Fetch(b"", 0, names, count, tenant)
            fetch.on_ready = lambda ready: self._on_ready(ready, is_pinned, then)
            self._reads.begin(fetch)

        self._ask_store([*blocks, *states], on_known)

    def unpin(self, keys: Sequence[bytes], then: Then) -> None:
        """Pin a chain no longer; how many of its blocks were pinned."""
        names = [Name(kind, key) for kind in PayloadKind for key in keys]
        count = 0
        for name in names:
            place = self._pins.pop(name, None)
            if place is not None:
                count += name.kind == PayloadKind.BLOCK
                self._host.unpin(name, place)
        self._tell_store(names, False, Pinning(count), then)

    def _on_ready(self, fetch: Fetch, is_pinned: bool, then: Then) -> None:
        kept = {name: place for name, place in fetch.pins.items() if self._is_new(name, place)}
        size = self.num_bytes + sum(place.size for place in kept.values())
        result = Pinning(fetch.num_blocks)
        if fetch.error is not None:
            result = Pinning(0, fetch.error)
        elif is_pinned and size > _PINNED_SHARE * self._host.arena.size:
            share = round(_PINNED_SHARE * self._host.arena.size)
            result = Pinning(0, f"{size} bytes would be pinned; expected at most {share}")
        if result.error is not None or not is_pinned:
            kept = {}
        for name, place in fetch.pins.items():
            if name in kept:
                # One that was forgotten meanwhile is pinned in vain.
                old = self._pins.get(name)
                if old is not None:
                    self._host.unpin(name, old)
                self._pins[name] = place
            else:
                self._host.unpin(name, place)
        if kept:
            self._tell_store(list(kept), True, result, then)
        else:
            then(result)

    def _is_new(self, name: Name, place: Place) -> bool:
        return self._pins.get(name) != place

    def _tell_store(self, names: list[Name], is_pinned: bool, result: Pinning, then: Then) -> None:
        store = self._store
        if store is None:
            then(result)
            return

        def tell() -> Pinning:
            try:
                store.pin(names, is_pinned)
            except StoreError as error:
                return Pinning(result.num_blocks, f"in shared memory only: {error}")
            return result

        self._background(tell, then)
