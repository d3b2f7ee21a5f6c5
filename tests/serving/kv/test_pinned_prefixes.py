"""Goal: what operators pin is in shared memory and stays there, within their share of it, and gives
all of its room back. Method: a cache in threads of this process, asked as a command would.
"""

from pathlib import Path

import pytest

from serving.kv.store import tenant_id
from serving.kv_process import ask
from sharding.config_file import ConfigError
from tests.serving.kv.cache_parts import Cache, MemoryStore, check_prefix, keys_of, running


def told(cache: Cache, what: str, keys: list[bytes]) -> float:
    return ask(cache.fetcher.address, what, tenant_id(""), keys=b"".join(keys))["blocks"]


def fill(cache: Cache, count: int) -> None:
    """So many prefixes of other tenants."""
    for number in range(count):
        cache.put(keys_of(4, 1000 + 10 * number), salt=str(number))


def test_a_pinned_prefix_outlives_a_full_memory_until_it_is_unpinned(tmp_path: Path) -> None:
    keys, others = keys_of(4), keys_of(4, 100)
    with running(tmp_path, size=8192) as cache:
        cache.put(keys)
        cache.put(others)
        assert told(cache, "pin", [*keys, b"unknown key 1234"]) == 4
        # Again is no more than once.
        assert told(cache, "pin", keys) == 4
        fill(cache, 12)
        numbers = cache.fetcher.numbers()
        assert numbers["host_pinned_by_operators"] == 5 == numbers["host_pinned"]
        cache.store.payloads.clear()
        check_prefix(cache.fetch(keys), keys)
        assert cache.fetch(others).prefix is None
        assert told(cache, "unpin", keys) == 4 and told(cache, "unpin", keys) == 0
        cache.settle()
        assert cache.fetcher.numbers()["host_pinned"] == 0
        fill(cache, 24)
        cache.store.payloads.clear()
        assert cache.fetch(keys).prefix is None


def test_warming_brings_a_prefix_from_storage(tmp_path: Path) -> None:
    keys = keys_of(4)
    store = MemoryStore()
    with running(tmp_path, store, size=8192) as cache:
        cache.put(keys)
        fill(cache, 24)
        store.num_reads.clear()
        assert told(cache, "warm", keys) == 4
        assert sum(store.num_reads.values()) == 5
        check_prefix(cache.fetch(keys), keys)
        assert sum(store.num_reads.values()) == 5
        cache.settle()
        assert cache.fetcher.numbers()["host_pinned"] == 0


def test_what_cannot_be_pinned_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    with running(tmp_path, size=4096) as cache:
        with pytest.raises(ConfigError, match="no prefix of it is stored"):
            told(cache, "pin", keys_of(4))
        cache.put(keys_of(14))
        with pytest.raises(ConfigError, match="would be pinned; expected at most 2048"):
            told(cache, "pin", keys_of(14))
        cache.settle()
        numbers = cache.fetcher.numbers()
        assert numbers["host_pinned"] == numbers["host_pinned_by_operators"] == 0
