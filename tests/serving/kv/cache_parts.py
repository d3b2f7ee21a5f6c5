"""A storage tier in memory, and a cache with its line, for tests of what is above them."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from serving.clock import Clock
from serving.core.kv_transfer import KVRead
from serving.kv.fetcher import Fetcher, FetcherOptions
from serving.kv.host_tier import SharedArena
from serving.kv.link import CacheLink
from serving.kv.offload import (
    CacheCall,
    CacheReply,
    FetchPrefix,
    OfferPrefix,
    PrefixFetched,
    PrefixWanted,
    StorePrefix,
)
from serving.kv.store import (
    Buffer,
    Name,
    PayloadForm,
    StoreCounts,
    StoreError,
    layout_id,
    read_header,
)
from serving.kv.write_behind import WriteBehindOptions
from serving.transport.driver import SystemClock

FORM = PayloadForm(layout_id(b"test"), (24, 40), 100)
_numbers = itertools.count()
AT_ONCE = FetcherOptions(behind=WriteBehindOptions(segment_bytes=1))


class MemoryStore:
    """A `BlockStore` that can be made to fail or to wait.

    `gate` holds up reads; `failing` makes writes, reads and look-ups fail.
    """

    def __init__(self) -> None:
        self.payloads: dict[Name, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.failing: set[str] = set()
        self.num_reads: dict[Name, int] = {}
        self.is_closed = False

    def _check(self, what: str) -> None:
        if what in self.failing:
            raise StoreError(f"{what} fails")

    def contains(self, names: Sequence[Name]) -> list[bool]:
        self._check("contains")
        return [name in self.payloads for name in names]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        for name in names:
            self.num_reads[name] = self.num_reads.get(name, 0) + 1
        self.gate.wait()
        self._check("read")
        return [self.payloads.get(name) for name in names]

    def write(self, payloads: Sequence[Buffer]) -> None:
        self._check("write")
        for payload in payloads:
            self.payloads[read_header(payload).name] = bytes(payload)

    def forget(self, names: Sequence[Name]) -> None:
        for name in names:
            self.payloads.pop(name, None)

    def purge(self, tenant: bytes | None) -> int:
        gone = [
            name
            for name, data in self.payloads.items()
            if tenant in (None, read_header(data).tenant)
        ]
        self.forget(gone)
        return len(gone)

    def verify(self) -> list[Name]:
        return []

    def counts(self) -> StoreCounts:
        return StoreCounts(num_payloads=len(self.payloads))

    def sizes(self) -> Mapping[bytes, int]:
        return {}

    def close(self) -> None:
        self.is_closed = True


class ShiftedClock(SystemClock):
    """The machine's clock, put forward by a test."""

    ahead_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.ahead_ns


class Cache:
    """A running fetcher and a line to it, with calls that wait for their answers."""

    def __init__(self, fetcher: Fetcher, link: CacheLink, store: MemoryStore) -> None:
        self.fetcher = fetcher
        self.link = link
        self.store = store

    def ask(self, call: CacheCall, timeout_s: float = 20.0) -> CacheReply:
        replies: list[CacheReply] = []
        arrived = threading.Event()

        def take(reply: CacheReply) -> None:
            replies.append(reply)
            arrived.set()

        self.link.call(call, take)
        assert arrived.wait(timeout_s), f"no answer to {call}"
        return replies[0]

    def fetch(
        self,
        keys: list[bytes],
        first: int = 0,
        num_usable: int = 0,
        salt: str = "",
        has_state: bool = True,
    ) -> PrefixFetched:
        reply = self.ask(
            FetchPrefix(str(next(_numbers)), tuple(keys), first, num_usable, salt, has_state)
        )
        assert isinstance(reply, PrefixFetched)
        return reply

    def wanted(self, keys: list[bytes]) -> PrefixWanted:
        reply = self.ask(OfferPrefix(1, tuple(keys), ""))
        assert isinstance(reply, PrefixWanted)
        return reply

    def put(self, keys: list[bytes], has_state: bool = True, salt: str = "") -> None:
        """Store a prefix and wait until it is found, and written as far as it can be."""
        state = keys[-1] if has_state else None
        self.link.call(StorePrefix(tuple(keys), state, read_of(keys, has_state), salt), _nothing)
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was posted has come through."""
        # A store takes two round trips, a copy between them, and a write.
        for _ in range(3000):
            self.wanted([b"?" * 16])
            numbers = self.fetcher.numbers()
            if not (numbers["writes"] or numbers["unwritten"] or numbers["leases"]):
                if self._is_idle:
                    self._is_idle = False
                    return
                self._is_idle = True
            threading.Event().wait(0.01)
        raise AssertionError(f"the cache does not come to rest: {self.fetcher.numbers()}")

    _is_idle = False


def _nothing(reply: CacheReply) -> None:
    raise AssertionError(f"nobody asked for {reply}")


def keys_of(count: int, start: int = 0) -> list[bytes]:
    """Names of a chain."""
    return [(start + number).to_bytes(16) for number in range(count)]


def block_bytes(key: bytes, group: int) -> np.ndarray:
    """[bytes] uint8, what a test stores under a key."""
    rng = np.random.default_rng([int.from_bytes(key), group])
    return rng.integers(0, 256, FORM.group_bytes[group], np.uint8)


def state_bytes(key: bytes) -> np.ndarray:
    """[bytes] uint8, the state that a test stores under a key."""
    return np.random.default_rng([int.from_bytes(key), 9]).integers(
        0, 256, FORM.state_bytes, np.uint8
    )


def read_of(keys: list[bytes], has_state: bool = True) -> KVRead:
    """What a device would give for a prefix."""
    groups = tuple(np.stack([block_bytes(key, group) for key in keys]) for group in range(2))
    states = np.zeros((0, FORM.state_bytes), np.uint8)
    return KVRead(1, groups, state_bytes(keys[-1])[None] if has_state else states)


def check_prefix(
    reply: PrefixFetched, keys: list[bytes], first: int = 0, has_state: bool = True
) -> None:
    """The answer is the prefix `keys`, with the bytes that a test stores under them."""
    prefix = reply.prefix
    assert prefix is not None, reply.error
    assert list(prefix.keys) == keys and prefix.first == first
    for group, data in enumerate(prefix.groups):
        expected = [block_bytes(key, group) for key in keys[first:]]
        np.testing.assert_array_equal(data, np.stack(expected))
    assert (prefix.state is not None) == has_state
    if prefix.state is not None:
        np.testing.assert_array_equal(prefix.state, state_bytes(keys[-1]))


@contextmanager
def running(
    tmp_path: Path,
    store: MemoryStore | None = None,
    size: int = 1 << 20,
    options: FetcherOptions = AT_ONCE,
    has_store: bool = True,
    clock: Clock | None = None,
    form: PayloadForm = FORM,
) -> Iterator[Cache]:
    """A cache in threads of this process."""
    store = MemoryStore() if store is None else store
    arena = SharedArena.create(tmp_path / f"arena{len(list(tmp_path.iterdir()))}", size)
    address = f"ipc://{tmp_path}/s"
    fetcher = Fetcher(address, arena, store if has_store else None, clock or SystemClock(), options)
    thread = threading.Thread(target=fetcher.run)
    thread.start()
    link = CacheLink(address, form, SystemClock())
    link.start()
    try:
        yield Cache(fetcher, link, store)
    finally:
        store.gate.set()
        link.close()
        fetcher.stop()
        thread.join(20)
        assert not thread.is_alive() and store.is_closed == has_store
        assert not arena.path.exists()
