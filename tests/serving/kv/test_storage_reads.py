"""Goal: one tenant's reads leave room for others', and nobody waits for ever. Method: reads whose
background work is done by hand. What is read once for many is tested with the fetcher.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.kv.host_tier import HostTier, SharedArena
from serving.kv.storage_reads import Fetch, StorageReads
from serving.kv.store import Header, Name, PayloadKind, encode
from serving.transport.driver import SystemClock
from tests.serving.kv.cache_parts import FORM, MemoryStore


class Bench:
    """Reads with everything around them; `work` holds what is to be done in the background."""

    def __init__(self, arena: SharedArena) -> None:
        self.work: list[Callable[[], None]] = []
        self.finished: list[str] = []
        self.host, self.store = HostTier(arena), MemoryStore()
        self.reads = StorageReads(
            self.host, self.store, self._later, SystemClock(), self._finish, reading_max=4
        )

    def _later(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.work.append(lambda: then(work()))

    def _finish(self, fetch: Fetch) -> None:
        self.finished.append(fetch.client.decode() + ("" if fetch.error is None else "!"))
        for name, place in fetch.pins.items():
            self.host.unpin(name, place)

    def begin(self, who: str, number: int, tenant: bytes, is_stored: bool = True) -> None:
        name = Name(PayloadKind.STATE, number.to_bytes(16))
        if is_stored:
            header = Header(name, FORM.layout, tenant, 1, 10)
            self.store.payloads[name] = bytes(encode(header, [bytes(10)]))
        self.reads.begin(Fetch(who.encode(), 1, [name], 1, tenant))

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    arena = SharedArena.create(tmp_path / "arena", 1 << 16)
    made = Bench(arena)
    yield made
    assert made.host.num_pinned == 0 and not made.reads._active and not made.reads._queued
    arena.close()


def test_one_tenant_leaves_room_for_another(bench: Bench) -> None:
    for number in range(5):
        bench.begin(f"a{number}", number, b"a")
    bench.begin("b", 9, b"b")
    # Two of the first tenant and the one of the other; the rest wait.
    assert len(bench.work) == 3
    bench.run()
    assert sorted(bench.finished) == ["a0", "a1", "a2", "a3", "a4", "b"]
    assert bench.finished.index("b") < bench.finished.index("a2")


def test_what_came_meanwhile_is_not_read_again(bench: Bench) -> None:
    for number in (0, 1, 0, 1):
        bench.begin(f"a{number}", number, b"a")
    bench.run()
    assert len(bench.finished) == 4 and set(bench.store.num_reads.values()) == {1}


def test_what_is_gone_from_storage_is_an_error_for_those_who_wait(bench: Bench) -> None:
    bench.begin("a", 1, b"a", is_stored=False)
    bench.begin("b", 2, b"b")
    bench.run()
    assert sorted(bench.finished) == ["a!", "b"]


def test_without_storage_nothing_is_read(bench: Bench) -> None:
    bench.reads._store = None
    bench.begin("a", 1, b"a")
    assert bench.finished == ["a!"]
