"""Goal: workers get exactly the prefixes that are stored, from memory or from storage, and whatever
fails is a miss that leaves nothing pinned.

Method: a fetcher on a thread of this process, a real line to it, and a storage tier that fails and
waits on demand.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
import zmq

from serving.kv import wire
from serving.kv.fetcher import FetcherOptions
from serving.kv.offload import CacheReply, FetchPrefix, PrefixFetched
from serving.kv.store import Header, Name, PayloadKind, encode, tenant_id
from serving.kv.write_behind import WriteBehindOptions
from tests.serving.kv.cache_parts import (
    FORM,
    Cache,
    MemoryStore,
    ShiftedClock,
    block_bytes,
    check_prefix,
    keys_of,
    running,
    state_bytes,
)


def stored_by_hand(keys: list[bytes]) -> MemoryStore:
    """A store as an earlier process has left it."""
    store = MemoryStore()
    tenant = tenant_id("")
    for key in keys:
        name = Name(PayloadKind.BLOCK, key)
        header = Header(name, FORM.layout, tenant, 1, sum(FORM.group_bytes))
        parts = [block_bytes(key, group).tobytes() for group in range(2)]
        store.payloads[name] = bytes(encode(header, parts))
    name = Name(PayloadKind.STATE, keys[-1])
    header = Header(name, FORM.layout, tenant, 1, FORM.state_bytes)
    store.payloads[name] = bytes(encode(header, [state_bytes(keys[-1]).tobytes()]))
    return store


def at_rest(cache: Cache) -> None:
    cache.settle()
    numbers = cache.fetcher.numbers()
    assert numbers["host_pinned"] == numbers["leases"] == numbers["writes"] == 0


def test_what_was_put_is_found_and_written_behind(tmp_path: Path) -> None:
    keys = keys_of(5)
    with running(tmp_path) as cache:
        assert cache.fetch(keys).prefix is None
        wanted = cache.wanted(keys)
        assert wanted.blocks == tuple(keys) and wanted.has_state
        cache.put(keys)
        wanted = cache.wanted(keys)
        assert wanted.blocks == () and not wanted.has_state
        check_prefix(cache.fetch(keys), keys)
        # A longer prompt gets what there is of it; blocks that are present are left out.
        check_prefix(cache.fetch([*keys, *keys_of(2, 100)], first=2), keys, first=2)
        # Nothing longer than what is usable anyway.
        assert cache.fetch(keys, first=5, num_usable=5).prefix is None
        at_rest(cache)
        numbers = cache.fetcher.numbers()
        assert (numbers["fetch_hits"], numbers["fetch_misses"]) == (2, 2)
        assert numbers["fetch_from_memory"] == 6 + 4 and numbers["fetch_from_storage"] == 0
        assert len(cache.store.payloads) == 6


def test_a_prefix_ends_where_a_state_is(tmp_path: Path) -> None:
    keys = keys_of(6)
    with running(tmp_path) as cache:
        cache.put(keys[:3])
        cache.put(keys, has_state=False)
        check_prefix(cache.fetch(keys), keys[:3])
        assert cache.fetch(keys, first=3, num_usable=3).prefix is None
        cache.store.forget([Name(PayloadKind.BLOCK, keys[1])])
        at_rest(cache)


def test_a_state_is_fetched_for_blocks_that_are_present(tmp_path: Path) -> None:
    keys = keys_of(6)
    with running(tmp_path) as cache:
        cache.put(keys[:3])
        reply = cache.fetch(keys, first=5, num_usable=2)
        assert reply.prefix is not None and reply.prefix.first == 3
        assert [len(group) for group in reply.prefix.groups] == [0, 0]
        np.testing.assert_array_equal(reply.prefix.state, state_bytes(keys[2]))
        at_rest(cache)


def test_blocks_without_a_state_are_fetched_where_none_is_needed(tmp_path: Path) -> None:
    keys = keys_of(6)
    with running(tmp_path) as cache:
        cache.put(keys[:3])
        cache.put(keys[:5], has_state=False)
        check_prefix(cache.fetch(keys, has_state=False), keys[:5], has_state=False)
        reply = cache.fetch(keys, first=2, num_usable=4, has_state=False)
        check_prefix(reply, keys[:5], first=2, has_state=False)
        assert cache.fetch(keys, first=3, num_usable=5, has_state=False).prefix is None
        at_rest(cache)


def test_what_an_earlier_process_stored_is_read_once_for_all_who_want_it(tmp_path: Path) -> None:
    keys = keys_of(4)
    store = stored_by_hand(keys)
    store.gate.clear()
    with running(tmp_path, store) as cache:
        replies: list[CacheReply] = []
        arrived = threading.Semaphore(0)

        def take(reply: CacheReply) -> None:
            replies.append(reply)
            arrived.release()

        for number in range(3):
            cache.link.call(FetchPrefix(str(number), tuple(keys), 0, 0, ""), take)
        for _ in range(200):
            if cache.fetcher.numbers()["fetch_coalesced"] == 10:
                break
            threading.Event().wait(0.02)
        store.gate.set()
        for _ in range(3):
            assert arrived.acquire(timeout=20)
        for reply in replies:
            assert isinstance(reply, PrefixFetched)
            check_prefix(reply, keys)
        assert set(store.num_reads.values()) == {1} and len(store.num_reads) == 5
        check_prefix(cache.fetch(keys), keys)
        assert set(store.num_reads.values()) == {1}
        at_rest(cache)


def test_damage_in_memory_and_in_storage_is_a_miss_and_is_forgotten(tmp_path: Path) -> None:
    keys = keys_of(3)
    store = stored_by_hand(keys)
    name = Name(PayloadKind.BLOCK, keys[1])
    damaged = bytearray(store.payloads[name])
    damaged[-1] ^= 1
    store.payloads[name] = bytes(damaged)
    with running(tmp_path, store) as cache:
        reply = cache.fetch(keys)
        assert reply.prefix is None and reply.error is not None and "checksum" in reply.error
        cache.settle()
        assert name not in store.payloads
        assert cache.fetcher.numbers()["fetch_corrupt"] == 1
        assert cache.fetch(keys).prefix is None
        # Computed again, it is stored again.
        assert cache.wanted(keys).blocks == (keys[1],)
        cache.put(keys)
        check_prefix(cache.fetch(keys), keys)
        at_rest(cache)


def test_bytes_of_another_layout_or_tenant_are_not_taken(tmp_path: Path) -> None:
    """Keys differ, so this can only be a fault; the payload says what it is all the same."""
    keys = keys_of(2)
    store = stored_by_hand(keys)
    name = Name(PayloadKind.BLOCK, keys[0])
    foreign = Header(name, b"another layout!!", tenant_id(""), 1, 64)
    store.payloads[name] = bytes(encode(foreign, [bytes(64)]))
    with running(tmp_path, store) as cache:
        reply = cache.fetch(keys)
        assert reply.prefix is None and reply.error is not None and "layout" in reply.error
        at_rest(cache)


@pytest.mark.parametrize("what", ["contains", "read"])
def test_storage_that_fails_is_a_miss(tmp_path: Path, what: str) -> None:
    keys = keys_of(3)
    store = stored_by_hand(keys)
    store.failing.add(what)
    with running(tmp_path, store) as cache:
        assert cache.fetch(keys).prefix is None
        at_rest(cache)
        store.failing.clear()
        check_prefix(cache.fetch(keys), keys)
        at_rest(cache)


def test_storage_that_takes_nothing_leaves_memory_working(tmp_path: Path) -> None:
    keys = keys_of(3)
    with running(tmp_path) as cache:
        cache.store.failing.add("write")
        cache.put(keys)
        check_prefix(cache.fetch(keys), keys)
        assert cache.store.payloads == {}
        assert cache.fetcher.numbers()["unwritten_dropped"] == 4
        # Left alone for a while: not even tried.
        cache.store.failing.clear()
        cache.put(keys_of(2, 50))
        assert cache.store.payloads == {}
        at_rest(cache)


def test_without_storage_memory_is_all(tmp_path: Path) -> None:
    keys = keys_of(3)
    with running(tmp_path, has_store=False) as cache:
        cache.put(keys)
        check_prefix(cache.fetch(keys), keys)
        assert cache.fetch(keys_of(3, 50)).prefix is None
        at_rest(cache)


def test_memory_that_is_exhausted_is_a_miss(tmp_path: Path) -> None:
    keys = keys_of(12)
    with running(tmp_path, stored_by_hand(keys), size=1024) as cache:
        reply = cache.fetch(keys)
        assert reply.prefix is None and reply.error == "no room in shared memory"
        at_rest(cache)
        cache.put(keys_of(1, 50))
        check_prefix(cache.fetch(keys_of(1, 50)), keys_of(1, 50))
        at_rest(cache)


def test_leases_of_workers_that_are_gone_end(tmp_path: Path) -> None:
    keys = keys_of(2)
    options, clock = FetcherOptions(lease_s=1e6, behind=WriteBehindOptions(1)), ShiftedClock()
    with running(tmp_path, options=options, clock=clock) as cache:
        cache.put(keys)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(cache.fetcher.address)

        def ask(message: wire.Message) -> wire.Message:
            socket.send(wire.encode(message))
            assert socket.poll(10_000)
            return wire.decode(socket.recv())

        fetched = ask(wire.Fetch(1, b"".join(keys), 0, 0, b"t"))
        assert isinstance(fetched, wire.Fetched) and fetched.num_blocks == 2
        reserved = ask(wire.Reserve(2, [(1, b"n" * 16, 144)], b"t"))
        assert isinstance(reserved, wire.Reserved) and reserved.places[0] is not None
        # Neither released nor committed: both end by themselves, when it is time.
        numbers = cache.fetcher.numbers()
        assert (numbers["leases"], numbers["writes"], numbers["host_pinned"]) == (1, 1, 4)
        clock.ahead_ns = 10**15
        at_rest(cache)
        socket.send(wire.encode(wire.Commit(reserved.write)))
        cache.settle()
        assert cache.fetcher.numbers()["fetch_refused_commits"] == 1
        assert cache.fetch([b"n" * 16]).prefix is None
        # Nonsense is passed over.
        socket.send(b"nonsense")
        socket.send(wire.encode(wire.Wanted(1, [], False)))
        socket.send(wire.encode(wire.Offer(2, b"no key")))
        answer = ask(wire.Ask(3, "what?"))
        assert isinstance(answer, wire.Answer) and "expected stats" in (answer.error or "")
        socket.close(linger=0)
        context.term()
        at_rest(cache)


def test_a_purge_takes_one_tenant_out_of_all_tiers(tmp_path: Path) -> None:
    mine, other = keys_of(2), keys_of(2, 50)
    with running(tmp_path) as cache:
        cache.put(mine, salt="mine")
        cache.put(other, salt="other")
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(cache.fetcher.address)
        for what in ("flush", "purge", "verify", "stats"):
            socket.send(wire.encode(wire.Ask(1, what, tenant_id("mine"))))
            assert socket.poll(10_000)
            answer = wire.decode(socket.recv())
            assert isinstance(answer, wire.Answer) and answer.error is None
            if what == "purge":
                assert answer.numbers == {"purged": 3}
        assert answer.numbers["storage_payloads"] == 3
        assert cache.fetch(mine, salt="mine").prefix is None
        check_prefix(cache.fetch(other, salt="other"), other)
        socket.close(linger=0)
        context.term()
        at_rest(cache)
