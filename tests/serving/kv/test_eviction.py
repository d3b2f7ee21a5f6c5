"""Goal: room is made within the limits, in the order of use, and never at the cost of what is
pinned or of another tenant. Method: queues filled by hand.
"""

from serving.kv.eviction import EvictionQueue, LimitedTier, TenantLimits
from serving.kv.store import Name, tenant_id
from tests.serving.kv.test_orbax_tier import name as payload_name
from tests.serving.kv.test_orbax_tier import payload
from tests.serving.kv.test_segment_tier import MemorySegments, tier_of

A, B = b"a", b"b"


def name(number: int) -> Name:
    return Name(1, bytes([number]))


def filled(**limits: int) -> EvictionQueue:
    queue = EvictionQueue(**{"bytes_max": 100, **limits})
    for number in range(4):
        queue.add(name(number), 10, A if number % 2 else B, written_s=number)
    return queue


def test_what_was_used_goes_last() -> None:
    queue = filled()
    queue.touch(name(0))
    order = []
    while (victim := queue.victim(100, A)) is not None:
        order.append(victim)
        queue.remove(victim)
    assert order == [name(1), name(2), name(3), name(0)]
    assert queue.num_bytes == len(queue) == 0 and queue.tenant_bytes == {}


def test_pinned_ones_stay() -> None:
    queue = filled()
    queue.pin(name(0))
    queue.pin(name(0))
    assert queue.victim(100, A) == name(1)
    queue.unpin(name(0))
    assert queue.is_pinned(name(0)) and queue.victim(100, A) == name(1)
    queue.unpin(name(0))
    for number in (1, 2, 3):
        queue.pin(name(number))
    assert queue.victim(100, A) == name(0)
    queue.pin(name(0))
    assert queue.victim(100, A) is None


def test_what_stands_behind_goes_first() -> None:
    queue = filled()
    queue.chain([name(0), name(7), name(1), name(3)])
    # Another prefix begins alike.
    queue.chain([name(0), name(2)])
    queue.touch(name(3))
    order = []
    while (victim := queue.victim(100, A)) is not None:
        order.append(victim)
        queue.remove(victim)
    assert order == [name(2), name(3), name(1), name(0)]


def test_what_comes_back_stands_behind_nothing_until_it_is_said() -> None:
    queue = filled()
    queue.chain([name(0), name(1)])
    queue.remove(name(0))
    queue.add(name(0), 10, B, 0)
    for other in (2, 3):
        queue.remove(name(other))
    assert queue.victim(100, A) == name(1)
    queue.pin(name(1))
    assert queue.victim(100, A) == name(0)
    queue.chain([name(0), name(1)])
    assert queue.victim(100, A) is None


def test_a_tenant_above_its_share_makes_room_from_its_own() -> None:
    queue = filled(tenant_bytes_max=25)
    assert queue.fits(5, A) and not queue.fits(6, A)
    # The oldest of all belongs to the other.
    assert queue.victim(6, A) == name(1)
    assert queue.victim(5, A) == name(0)
    queue.pin(name(1))
    queue.pin(name(3))
    assert queue.victim(6, A) is None
    assert queue.of_tenant(A) == [name(1), name(3)] and len(queue.of_tenant(None)) == 4
    assert queue.tenant_bytes == {A: 20, B: 20}


def test_the_whole_is_bounded() -> None:
    queue = filled()
    assert queue.fits(60, A) and not queue.fits(61, A)


def test_time_to_live() -> None:
    queue = filled(ttl_s=10)
    assert not queue.is_expired(name(2), 12) and queue.is_expired(name(2), 13)
    queue.pin(name(0))
    assert queue.expired(12) == [name(1)]
    assert filled().expired(10**9) == [] and not filled().is_expired(name(0), 10**9)


def test_a_tenant_may_have_limits_of_its_own() -> None:
    queue = filled(ttl_s=100)
    queue.limit(A, TenantLimits(20, 10))
    assert queue.fits(10, B) and not queue.fits(1, A)
    assert queue.victim(1, A) == name(1)
    # Older than ten seconds are those of A alone.
    assert queue.expired(50) == [name(1), name(3)] and queue.has_ttl
    assert queue.is_expired(name(1), 50) and not queue.is_expired(name(0), 50)
    # And a tenant may be kept without any.
    queue.limit(B, TenantLimits())
    assert queue.expired(10**9) == [name(1), name(3)]


def test_tiers_take_such_limits() -> None:
    first, second = tenant_id("a"), tenant_id("b")
    segments = tier_of(MemorySegments())
    assert isinstance(segments, LimitedTier)
    segments.limit(first, TenantLimits(700))
    segments.write([payload(1, tenant=first)])
    segments.write([payload(2, tenant=first)])
    segments.write([payload(3, tenant=second), payload(4, tenant=second)])
    assert segments.contains([payload_name(n) for n in range(1, 5)]) == [False, True, True, True]
