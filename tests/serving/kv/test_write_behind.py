"""Goal: payloads are written together, stay pinned until they are, and a storage that fails is left
alone for a while. Method: a loop that is turned by hand, with a clock that is set by hand.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from serving.kv.host_tier import HostTier, Place, SharedArena
from serving.kv.store import Header, Name, PayloadKind, encode, tenant_id
from serving.kv.wire import Loop
from serving.kv.write_behind import WriteBehind, WriteBehindOptions
from tests.serving.kv.cache_parts import FORM, MemoryStore

OPTIONS = WriteBehindOptions(segment_bytes=700, flush_s=10.0, retry_s=20.0)


class HandClock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.ns = 10**12

    def now_ns(self) -> int:
        return self.ns

    def unix_s(self) -> int:
        return self.ns // 10**9


class Posts:
    """The part of a loop that is used here; what is posted runs when the test says so."""

    def __init__(self) -> None:
        self._posted: list[Callable[[], None]] = []
        self._arrived = threading.Semaphore(0)

    def post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        self._arrived.release()

    def run_one(self) -> None:
        assert self._arrived.acquire(timeout=20)
        self._posted.pop(0)()


class Bench:
    """A queue of writes with everything around it."""

    def __init__(self, arena: SharedArena) -> None:
        self.clock, self.loop, self.store = HandClock(), Posts(), MemoryStore()
        self.host = HostTier(arena)
        loop = cast(Loop, self.loop)
        self.behind = WriteBehind(self.host, self.store, loop, self.clock, OPTIONS)

    def add(self, *numbers: int) -> list[tuple[Name, Place]]:
        pins: list[tuple[Name, Place]] = []
        for number in numbers:
            name = Name(PayloadKind.STATE, number.to_bytes(16))
            header = Header(name, FORM.layout, tenant_id(""), 1, 100)
            place = self.host.reserve(name, header.size, header.tenant, 0)
            assert place is not None
            self.host.read(place)[:] = encode(header, [bytes(100)])
            self.host.commit(name, place)
            pins.append((name, place))
        self.behind.add(pins)
        return pins


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    arena = SharedArena.create(tmp_path / "arena", 1 << 16)
    made = Bench(arena)
    yield made
    made.behind.close()
    arena.close()


def test_writes_wait_until_there_are_enough_or_for_long_enough(bench: Bench) -> None:
    bench.add(1, 2)
    assert bench.behind.num_waiting == 2 and bench.host.num_pinned == 2 and not bench.store.payloads
    bench.add(3, 4)
    bench.loop.run_one()
    assert len(bench.store.payloads) == 4 and bench.host.num_pinned == 0
    bench.add(5)
    bench.clock.ns += 9 * 10**9
    bench.behind.flush_if_due()
    assert bench.behind.num_waiting == 1 and len(bench.store.payloads) == 4
    bench.clock.ns += 10**9
    bench.behind.flush_if_due()
    bench.loop.run_one()
    assert len(bench.store.payloads) == 5 and bench.behind.num_waiting == 0


def test_a_flush_writes_what_came_during_another(bench: Bench) -> None:
    called: list[int] = []
    bench.behind.flush_all(lambda: called.append(0))
    assert called == [0]
    bench.add(1, 2, 3, 4)
    bench.add(5)
    bench.behind.flush_all(lambda: called.append(1))
    bench.loop.run_one()
    assert called == [0] and bench.behind.num_waiting == 1
    bench.loop.run_one()
    assert called == [0, 1] and len(bench.store.payloads) == 5


def test_a_failed_write_is_given_up_and_storage_is_left_alone(bench: Bench) -> None:
    bench.store.failing.add("write")
    bench.add(1, 2, 3, 4)
    bench.add(5)
    bench.loop.run_one()
    assert bench.behind.num_dropped == 5 and bench.host.num_pinned == 0
    bench.store.failing.clear()
    bench.add(6, 7, 8, 9)
    assert bench.behind.num_dropped == 9 and bench.host.num_pinned == 0
    assert all(bench.host.contains(Name(2, n.to_bytes(16))) for n in range(1, 10))
    bench.clock.ns += 20 * 10**9
    bench.add(10, 11, 12, 13)
    bench.loop.run_one()
    assert len(bench.store.payloads) == 4


def test_damaged_payloads_are_not_written(bench: Bench) -> None:
    pins = bench.add(1, 2)
    bench.host.read(pins[0][1])[90] ^= 1
    bench.behind.close()
    assert list(bench.store.payloads) == [pins[1][0]]
