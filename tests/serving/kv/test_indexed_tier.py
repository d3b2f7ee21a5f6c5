"""Goal: pins, limits and sizes of a tier are those of its index. Method: an index with three
payloads of two tenants.
"""

from serving.kv.eviction import TenantLimits
from serving.kv.indexed_tier import IndexedTier
from serving.kv.segment_index import Row, SegmentIndex
from serving.kv.store import Name


def test_pins_limits_and_sizes_are_those_of_the_index() -> None:
    index = SegmentIndex(1000)
    tier = IndexedTier(index)
    rows = [Row(1, bytes([n]) * 16, 100, tenant, 0) for n, tenant in enumerate((b"a", b"a", b"b"))]
    index.adopt("s", rows, 300)
    names = [row.name for row in rows]
    assert tier.sizes() == {b"a": 200, b"b": 100}
    # One that is not there is not counted.
    assert tier.pin([*names[:1], Name(1, b"?" * 16)], True) == 1
    tier.limit(b"a", TenantLimits(bytes_max=200))
    assert index.fits_tenant(100, b"a")
    assert [name in index for name in names] == [True, False, True]
    assert tier.evicted_age_s.count == 1
    tier.pin(names[:1], False)
    assert index.fits_tenant(200, b"a") and names[0] not in index
