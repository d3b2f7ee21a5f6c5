"""Goal: hits, misses, times and ages are counted once each. Method: a cache in threads."""

from pathlib import Path

from serving.kv.eviction import EvictionQueue
from serving.kv.offload import FetchPrefix
from serving.kv.segment_index import SegmentIndex
from serving.kv.store import Name
from serving.kv.tier_metrics import EvictingStore, TierMetrics
from tests.serving.kv.cache_parts import MemoryStore, keys_of, running
from tests.serving.kv.test_segment_tier import MemorySegments, tier_of


def test_a_request_that_is_tried_again_counts_once(tmp_path: Path) -> None:
    keys = keys_of(3)
    store = MemoryStore()
    with running(tmp_path, store) as cache:
        cache.put(keys)
    with running(tmp_path, store) as cache:
        for _ in range(3):
            cache.ask(FetchPrefix("the request", tuple(keys), 0, 0, ""))
        cache.fetch(keys_of(2, 50))
        for salt in ("", "other"):
            cache.ask(FetchPrefix("nothing", tuple(keys_of(2, 60)), 0, 0, salt))
        cache.settle()
        numbers = cache.fetcher.numbers()
    assert (numbers["fetch_hits"], numbers["fetch_misses"], numbers["fetch_retries"]) == (1, 3, 2)
    assert (numbers["fetch_from_storage"], numbers["fetch_from_memory"]) == (4, 0)
    # Payloads: all came from storage once.
    assert (numbers["host_hits"], numbers["host_misses"]) == (0, 4)
    assert (numbers["storage_hits"], numbers["storage_misses"]) == (4, 0)
    assert numbers["storage_read_seconds_count"] == 1 and numbers["storage_look_up_seconds_count"]
    assert numbers["storage_bytes_hit"] == 3 * 144 + 180


def test_ages_of_what_is_evicted() -> None:
    queue = EvictionQueue(100)
    names = [Name(1, bytes([number]) * 16) for number in range(3)]
    for number, name in enumerate(names):
        queue.add(name, 10, b"t", written_s=100 * number)
    queue.is_expired(names[2], 300)
    assert queue.victim(100, b"t") == names[0]
    queue.remove(names[0])
    # What was forgotten for another reason made no room.
    queue.remove(names[1])
    assert queue.evicted_age_s.count == 1 and queue.evicted_age_s.total == 300
    assert isinstance(tier_of(MemorySegments()), EvictingStore)
    assert SegmentIndex(100).evicted_age_s.count == 0
    assert TierMetrics().numbers("x") == {"x_hits": 0, "x_misses": 0, "x_bytes_hit": 0}
