"""Goal: whatever happens between look-up, fetch and use, a worker gets the bytes that belong to its
keys or none, and pins, leases and writes are back where they were.

Method: a cache in threads over a store that waits when it is told to, and one as a process that is
killed while it answers.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from serving.core.prefix import prefix_keys, root_key
from serving.kv.link import CacheLink
from serving.kv.offload import CacheReply, FetchPrefix, PrefixFetched
from serving.kv_process import ask
from tests.serving.kv.cache_parts import Cache, MemoryStore, check_prefix, keys_of, running
from tests.serving.node_processes import NodeProcess, nodes
from tests.serving.test_metadata_process import Worker, is_at_rest, wait_for


class Waiting:
    """A fetch that has been begun."""

    def __init__(self, link: CacheLink, keys: list[bytes]) -> None:
        self.replies: list[CacheReply] = []
        self._arrived = threading.Event()
        link.call(FetchPrefix(f"waiting {time.monotonic_ns()}", tuple(keys), 0, 0, ""), self._take)

    def _take(self, reply: CacheReply) -> None:
        self.replies.append(reply)
        self._arrived.set()

    def result(self) -> PrefixFetched:
        assert self._arrived.wait(20)
        (reply,) = self.replies
        assert isinstance(reply, PrefixFetched)
        return reply


def stored_before(tmp_path: Path, keys: list[bytes]) -> MemoryStore:
    store = MemoryStore()
    with running(tmp_path, store) as cache:
        cache.put(keys)
    return store


def check_rest(cache: Cache) -> None:
    cache.settle()
    numbers = cache.fetcher.numbers()
    assert not any(numbers[name] for name in ("host_pinned", "leases", "writes", "unwritten"))


def test_eviction_between_match_and_fetch_is_a_miss(tmp_path: Path) -> None:
    keys = keys_of(4)
    store = stored_before(tmp_path, keys)
    with running(tmp_path, store) as cache:
        store.gate.clear()
        waiting = Waiting(cache.link, keys)
        wait_for(lambda: bool(store.num_reads), "the read")
        store.payloads.clear()
        store.gate.set()
        reply = waiting.result()
        assert reply.prefix is None and reply.error is not None
        check_rest(cache)
        cache.put(keys)
        check_prefix(cache.fetch(keys), keys)
        check_rest(cache)


def test_a_fetch_and_a_computation_of_one_prefix_race(tmp_path: Path) -> None:
    keys = keys_of(4)
    store = stored_before(tmp_path, keys)
    with running(tmp_path, store) as cache:
        store.gate.clear()
        waiting = Waiting(cache.link, keys)
        wait_for(lambda: bool(store.num_reads), "the read")
        # Another request has computed it meanwhile, and asks whether it is wanted.
        assert cache.wanted(keys).blocks == ()
        # One that was asked before does store it.
        cache.put(keys)
        store.gate.set()
        check_prefix(waiting.result(), keys)
        check_prefix(cache.fetch(keys), keys)
        check_rest(cache)


def test_another_tenant_neither_hits_nor_probes(tmp_path: Path) -> None:
    tokens = np.arange(512, dtype=np.int32)
    own, other = (prefix_keys(root_key(b"f" * 32, salt), tokens, 128) for salt in ("a", "b"))
    assert not set(own) & set(other)
    with running(tmp_path) as cache:
        cache.put(own, salt="a")
        assert cache.fetch(other, salt="b").prefix is None
        # What is asked for to be stored does not depend on what others have stored.
        assert cache.wanted(other).blocks == tuple(other)
        check_rest(cache)


def test_the_process_is_killed_in_the_middle_of_a_fetch(tmp_path: Path) -> None:
    keys = keys_of(4)
    settings = {"storage": "memory", "memory_directory": str(tmp_path), "host_bytes": 2**20}
    with nodes() as running_nodes:
        running_nodes.append(NodeProcess("cache", f"ipc://{tmp_path}/c", settings))
        first = running_nodes[0]
        worker = Worker(first.address)
        try:
            worker.put(keys)
            check_prefix(worker.fetch(keys), keys)
            os.kill(first.process.pid, signal.SIGSTOP)
            waiting = Waiting(worker.link, keys)
            first.kill()
            running_nodes.append(NodeProcess("cache", f"ipc://{tmp_path}/c", settings))
            # What was asked of the dead one is answered by nobody, or by the new one with a miss.
            assert worker.fetch(keys).prefix is None
            assert all(getattr(reply, "prefix", None) is None for reply in waiting.replies)
            worker.put(keys)
            check_prefix(worker.fetch(keys), keys)
            wait_for(lambda: is_at_rest(first.address), "rest")
            assert ask(first.address, "stats")["host_payloads"] == 5
            # The memory of the dead one is gone.
            assert len(list(tmp_path.glob("deepinfer-kv-*"))) == 1
        finally:
            worker.link.close()
