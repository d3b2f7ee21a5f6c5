"""Goal: payloads in shared memory are found by those who map it, stay while pinned, and a place
that was given away is noticed. Method: small arenas, two mappings, and a random walk.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.kv.host_tier import (
    FreeSpace,
    HostTier,
    Place,
    SharedArena,
    StalePlaceError,
    remove_abandoned,
)
from serving.kv.store import Name

TENANT = b"t"


def name(number: int) -> Name:
    return Name(1, number.to_bytes(16))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[SharedArena]:
    made = SharedArena.create(tmp_path / "arena", 1024)
    yield made
    made.close()


def put(tier: HostTier, number: int, data: bytes, tenant: bytes = TENANT) -> Place | None:
    place = tier.reserve(name(number), len(data), tenant, 0)
    if place is not None:
        tier.arena.payload(place)[:] = data
        assert tier.commit(name(number), place)
        tier.unpin(name(number), place)
    return place


def test_others_see_what_the_owner_has(arena: SharedArena) -> None:
    tier = HostTier(arena)
    place = put(tier, 1, b"bytes")
    assert place is not None
    other = SharedArena.attach(arena.path, 1024)
    assert bytes(other.payload(place)) == b"bytes"
    other.payload(place)[:] = b"BYTES"
    assert bytes(tier.read(place)) == b"BYTES"
    other.close()
    assert arena.path.exists()
    with pytest.raises(OSError, match="has 1024 bytes; expected 2048"):
        SharedArena.attach(arena.path, 2048)


def test_a_place_that_was_given_away_is_noticed(arena: SharedArena) -> None:
    tier = HostTier(arena)
    place = put(tier, 1, b"x" * 900)
    assert place is not None
    other = SharedArena.attach(arena.path, 1024)
    again = put(tier, 2, b"y" * 900)
    assert again is not None and again.offset == place.offset and tier.num_evicted == 1
    with pytest.raises(StalePlaceError, match="now has generation"):
        other.payload(place)
    assert not tier.commit(name(1), place)
    for outside in (Place(1020, 10, 1), Place(-64, 10, 1), Place(2**40, 1, 1)):
        with pytest.raises(StalePlaceError, match="outside"):
            other.payload(outside)
    other.close()


def test_what_is_pinned_or_being_written_is_not_evicted(arena: SharedArena) -> None:
    tier = HostTier(arena)
    first = tier.reserve(name(1), 300, TENANT, 0)
    assert first is not None and not tier.contains(name(1)) and tier.is_known(name(1))
    put(tier, 2, b"2" * 300)
    second = tier.pin(name(2))
    assert tier.reserve(name(3), 600, TENANT, 0) is None
    tier.unpin(name(2), second)
    assert tier.reserve(name(3), 600, TENANT, 0) is not None
    # Given up before it was written: it is gone.
    tier.unpin(name(1), first)
    assert not tier.is_known(name(1))


def test_what_is_forgotten_while_pinned_keeps_its_bytes_but_is_not_found(
    arena: SharedArena,
) -> None:
    tier = HostTier(arena)
    put(tier, 1, b"1" * 900)
    place = tier.pin(name(1))
    assert tier.forget(name(1)) and not tier.forget(name(1))
    assert not tier.contains(name(1)) and bytes(tier.read(place)) == b"1" * 900
    assert tier.reserve(name(2), 900, TENANT, 0) is None
    tier.unpin(name(1), place)
    assert tier.num_pinned == 0 and tier.reserve(name(2), 900, TENANT, 0) is not None


def test_limits_of_tenants_and_of_time(arena: SharedArena) -> None:
    tier = HostTier(arena, tenant_bytes_max=512, ttl_s=10)
    put(tier, 1, b"1" * 200, b"a")
    put(tier, 2, b"2" * 400, b"b")
    put(tier, 3, b"3" * 200, b"b")
    assert [tier.contains(name(n)) for n in (1, 2, 3)] == [True, False, True]
    assert put(tier, 4, b"4" * 500, b"b") is None
    assert tier.contains(name(1), 10) and not tier.contains(name(1), 11)
    tier.expire(11)
    assert not tier.is_known(name(1))


def test_holes_grow_together() -> None:
    free = FreeSpace(100)
    places = [free.take(25) for _ in range(4)]
    assert places == [0, 25, 50, 75] and free.take(1) is None
    for offset in (25, 75, 50):
        free.give(offset, 25)
    assert free.take(75) == 25 and free.num_bytes == 0
    free.give(25, 75)
    free.give(0, 25)
    assert free.take(100) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_never_shares_bytes(arena: SharedArena, seed: int) -> None:
    source = random.Random(seed)
    tier = HostTier(arena)
    pins: list[tuple[Name, Place, bytes]] = []
    for step in range(400):
        kind = source.randrange(4)
        number = source.randrange(12)
        data = bytes([step % 256]) * source.choice([60, 150, 333])
        if kind == 0 and not tier.is_known(name(number)):
            put(tier, number, data)
        elif kind == 1 and tier.contains(name(number)) and len(pins) < 3:
            place = tier.pin(name(number))
            pins.append((name(number), place, bytes(tier.read(place))))
        elif kind == 2 and pins:
            held, place, _ = pins.pop(source.randrange(len(pins)))
            tier.unpin(held, place)
        elif kind == 3:
            tier.forget(name(number))
        for _, place, content in pins:
            assert bytes(tier.read(place)) == content
    for held, place, _ in pins:
        tier.unpin(held, place)
    for number in range(12):
        tier.forget(name(number))
    assert tier.num_pinned == 0 and tier._free.num_bytes == 1024 and not len(tier.queue)


def test_memory_of_owners_that_are_gone_is_removed(tmp_path: Path) -> None:
    living = SharedArena.create(tmp_path / "kv-living", 64)
    (tmp_path / "kv-dead").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"x")
    assert remove_abandoned(tmp_path, "kv-") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv-living", "other"]
    living.close()
    assert not (tmp_path / "kv-living").exists()


def test_memory_that_cannot_be_had_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SharedArena.create(tmp_path / "arena", 2**60)
    assert list(tmp_path.iterdir()) == []
    SharedArena.create(tmp_path / "arena", 64).close()
