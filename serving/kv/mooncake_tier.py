"""Payloads in a Mooncake Store, which spreads them over the memory and disks of its clients.

A payload is one object under its name. What there is, and what goes when there is no room, the
store's master knows; it does not tell whose a payload is, so a tenant's payloads can be purged by
those processes that have written or read them.

The library is optional: `pip install 'deepinfer-jax[mooncake]'`, and Debian's `libibverbs1`.
"""

import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from serving.clock import Clock
from serving.kv.store import (
    Buffer,
    CorruptPayloadError,
    Name,
    StoreCounts,
    StoreError,
    check,
    read_header,
)

_PREFIX = "deepinfer-kv-"
_THREADS = 4
_BUFFER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class MooncakeSetup:
    """How the store is reached; fields as in `serving.config.MooncakeOptions`.

    `call_s`: time for one call, after which it has failed.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    call_s: float = 2.0


class MooncakeTier:
    """A `BlockStore` in a Mooncake Store.

    Args:
        ttl_s: seconds that a payload is kept; 0 is no limit.

    Raises:
        StoreError: the library is missing, or the master does not answer.
    """

    def __init__(self, setup: MooncakeSetup, clock: Clock, ttl_s: int = 0) -> None:
        self._setup = setup
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._tenants: dict[Name, bytes] = {}
        self._counts = StoreCounts()
        # Calls of the library wait as long as they like; these threads do the waiting.
        self._threads = ThreadPoolExecutor(_THREADS, "kv-mooncake")
        self._store = self._connect()

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are stored, as the master knows.

        Raises:
            StoreError: it does not answer.
        """
        keys = list(map(_key, names))
        return [found == 1 for found in self._call(lambda: self._store.batch_is_exist(keys))]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those that are not stored, damaged or too old.

        Raises:
            StoreError: the store does not answer.
        """
        keys = list(map(_key, names))
        answers: list[bytes] = self._call(lambda: self._store.get_batch(keys))
        found = [
            self._take(name, data) if data else None
            for name, data in zip(names, answers, strict=True)
        ]
        there = [data for data in found if data is not None]
        self._count(num_read=len(there), bytes_read=sum(map(len, there)))
        return found

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Store payloads.

        Raises:
            StoreError: the store does not take them.
        """
        headers = [read_header(data) for data in payloads]
        keys = [_key(header.name) for header in headers]
        if not keys:
            return
        code = self._call(lambda: self._store.put_batch(keys, list(map(bytes, payloads))))
        if code:
            self._count(num_failed=1)
            self.forget([header.name for header in headers])
            raise StoreError(f"Mooncake at {self._setup.master} answers {code} to a write")
        with self._lock:
            self._tenants.update((header.name, header.tenant) for header in headers)
        self._count(num_written=len(payloads), bytes_written=sum(map(len, payloads)))

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads; those that are not stored are passed over.

        Raises:
            StoreError: the store does not answer.
        """
        keys = list(map(_key, names))
        self._call(lambda: self._store.batch_remove(keys, True))
        with self._lock:
            for name in names:
                self._tenants.pop(name, None)

    def purge(self, tenant: bytes | None) -> int:
        """Drop the payloads of a tenant that this process knows of, or all; how many there were.

        Raises:
            StoreError: the store does not answer.
        """
        if tenant is None:
            pattern = f"^{re.escape(_PREFIX)}"
            count = self._call(lambda: self._store.remove_by_regex(pattern, True))
            with self._lock:
                self._tenants.clear()
            return max(0, count)
        with self._lock:
            names = [name for name, owner in self._tenants.items() if owner == tenant]
        self.forget(names)
        return len(names)

    def verify(self) -> list[Name]:
        """Read what this process knows of; the names of what is damaged, which is forgotten.

        Raises:
            StoreError: the store does not answer.
        """
        with self._lock:
            names = list(self._tenants)
        before = self.counts().num_corrupt
        damaged: list[Name] = []
        for name in names:
            self.read([name])
            if self.counts().num_corrupt > before:
                before = self.counts().num_corrupt
                damaged.append(name)
        return damaged

    def counts(self) -> StoreCounts:
        """What this process has done; what the store holds, its master tells."""
        with self._lock:
            return replace(self._counts, num_payloads=len(self._tenants))

    def sizes(self) -> Mapping[bytes, int]:
        """Nothing: the store does not tell."""
        return {}

    def close(self) -> None:
        """Leave the store; what lies in this process's part of it goes too."""
        self._threads.submit(self._store.close)
        self._threads.shutdown(wait=False)

    def _connect(self) -> Any:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StoreError(
                f"the library of Mooncake cannot be loaded: {error}; expected "
                "pip install 'deepinfer-jax[mooncake]' and the system library libibverbs1"
            ) from None
        setup = self._setup
        # The library would go on trying for minutes.
        host, _, port = setup.master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), setup.call_s).close()
        except (OSError, ValueError) as error:
            raise StoreError(
                f"no master of Mooncake at {setup.master!r}: {error}; expected HOST:PORT of a "
                "running mooncake_master"
            ) from None
        store = MooncakeDistributedStore()
        code = self._call(
            lambda: store.setup(
                setup.hostname,
                setup.metadata,
                setup.segment_bytes,
                _BUFFER_BYTES,
                setup.protocol,
                setup.devices,
                setup.master,
            )
        )
        if code:
            raise StoreError(f"Mooncake at {setup.master} answers {code} to a new client")
        return store

    def _take(self, name: Name, data: bytes) -> Buffer | None:
        try:
            header = check(data)
            if header.name != name:
                raise CorruptPayloadError(f"{header.name} lies where {name} should")
        except CorruptPayloadError:
            self._count(num_corrupt=1)
            self.forget([name])
            return None
        if self._ttl_s and self._clock.unix_s() - header.written_s > self._ttl_s:
            self._count(num_evicted=1)
            self.forget([name])
            return None
        with self._lock:
            self._tenants[name] = header.tenant
        return data

    def _call[T](self, work: Callable[[], T]) -> T:
        try:
            return self._threads.submit(work).result(self._setup.call_s)
        except TimeoutError:
            self._count(num_failed=1)
            raise StoreError(
                f"Mooncake at {self._setup.master}: no answer within {self._setup.call_s:g} s"
            ) from None

    def _count(self, **more: int) -> None:
        with self._lock:
            changed = {name: getattr(self._counts, name) + count for name, count in more.items()}
            self._counts = replace(self._counts, **changed)


def _key(name: Name) -> str:
    return f"{_PREFIX}{name.kind}-{name.key.hex()}"
