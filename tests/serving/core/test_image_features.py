"""Goal: features are kept up to their bytes, the least recently used going first; those that came
for a request are gone once they were used, or the request is over.

Method: small arrays whose bytes are counted by hand.
"""

import numpy as np

from serving.core.image_features import FeatureCache, FeatureShelf


def rows(count: int) -> np.ndarray:
    return np.full((count, 4), count, np.uint8)


def test_the_least_recently_used_goes_first() -> None:
    cache = FeatureCache(40)
    for name, count in ((b"a", 4), (b"b", 3), (b"c", 3)):
        cache.put(name, rows(count))
    assert cache.num_bytes == 40 and cache.num_evicted == 0
    assert cache.get(b"a") is not None
    cache.put(b"d", rows(2))
    assert cache.get(b"b") is None and cache.get(b"a") is not None and cache.get(b"c") is not None
    assert (cache.num_bytes, cache.num_evicted, len(cache)) == (36, 1, 3)


def test_what_is_there_is_not_counted_twice() -> None:
    cache = FeatureCache(40)
    cache.put(b"a", rows(5))
    cache.put(b"b", rows(5))
    cache.put(b"a", rows(5))
    assert cache.num_bytes == 40
    # Putting it again was a use of it.
    cache.put(b"c", rows(1))
    assert cache.get(b"a") is not None and cache.get(b"b") is None
    cache.clear()
    assert cache.num_bytes == len(cache) == 0


def test_what_is_too_large_drives_nothing_out() -> None:
    cache = FeatureCache(40)
    cache.put(b"a", rows(5))
    cache.put(b"b", rows(11))
    assert cache.get(b"a") is not None and cache.get(b"b") is None
    assert (cache.num_bytes, cache.num_evicted) == (20, 1)


def test_features_of_a_request_are_gone_after_their_last_use() -> None:
    shelf = FeatureShelf()
    shelf.put("r", b"a", rows(5))
    shelf.put("s", b"a", rows(5))
    assert shelf.num_bytes == 40
    assert shelf.take("r", b"a", is_last=False) is not None
    assert shelf.take("r", b"a", is_last=True) is not None
    assert shelf.take("r", b"a", is_last=True) is None
    assert shelf.num_bytes == 20 and shelf.take("t", b"a", is_last=True) is None
    shelf.drop("s")
    shelf.drop("s")
    assert shelf.num_bytes == 0
    shelf.put("r", b"a", rows(5))
    shelf.clear()
    assert shelf.num_bytes == 0
