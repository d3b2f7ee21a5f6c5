"""Goal: a tier over any storage of segments finds what it and others have written, and what the
storage does not do is a miss or a `StoreError`.

Method: a storage in memory that two tiers share and that can be made to fail. What a disk adds to
that is in the tests of the disk tier.
"""

import itertools
from collections.abc import Mapping, Sequence

import pytest

from serving.kv.segment_tier import Range, SegmentTier
from serving.kv.store import Buffer, Name, StoreError, tenant_id
from tests.serving.kv.test_orbax_tier import FixedClock, name, payload

A, B = tenant_id("a"), tenant_id("b")


class MemorySegments:
    """Segments in a dictionary; calls named in `failing` raise."""

    def __init__(self) -> None:
        self.segments: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self.num_reads = 0
        self._numbers = itertools.count()

    def _check(self, what: str) -> None:
        if what in self.failing:
            raise OSError(5, f"{what} fails")

    def load(self) -> Mapping[str, int]:
        self._check("load")
        return {segment: len(data) for segment, data in self.segments.items()}

    def choose_name(self, size: int) -> str:
        return str(next(self._numbers))

    def write(self, segment: str, parts: Sequence[Buffer]) -> None:
        self._check("write")
        self.segments[segment] = b"".join(parts)

    def read(self, segment: str, ranges: Sequence[Range]) -> list[Buffer]:
        self._check("read")
        if segment not in self.segments:
            raise FileNotFoundError(segment)
        self.num_reads += len(ranges)
        return [self.segments[segment][begin:end] for begin, end in ranges]

    def remove(self, segment: str) -> None:
        self._check("remove")
        self.segments.pop(segment, None)

    def close(self) -> None:
        self.segments.clear()


def tier_of(segments: MemorySegments, bytes_max: int = 1 << 20) -> SegmentTier:
    return SegmentTier(segments, bytes_max, FixedClock())


def names(*numbers: int) -> list[Name]:
    return [name(number) for number in numbers]


def test_two_tiers_on_one_storage_learn_from_each_other() -> None:
    segments = MemorySegments()
    one, other = tier_of(segments), tier_of(segments)
    one.write([payload(1), payload(2)])
    assert other.contains(names(1)) == [False]
    other.refresh()
    assert [bytes(data or b"") for data in other.read(names(1, 2))] == [payload(1), payload(2)]
    other.purge(None)
    # Not heard of yet: a miss, and known from then on.
    assert one.contains(names(1)) == [True] and one.read(names(1)) == [None]
    one.refresh()
    assert one.contains(names(1, 2)) == [False, False] and one.counts().num_bytes == 0


def test_neighbours_are_read_with_one_call_and_an_index_of_any_size_is_found() -> None:
    segments = MemorySegments()
    tier = tier_of(segments)
    tier.write([payload(number, 10) for number in range(2000)])
    assert all(tier.contains(names(*range(2000))))
    before = segments.num_reads
    assert None not in tier.read(names(*range(500)))
    assert segments.num_reads == before + 1
    assert all(tier_of(segments).contains(names(*range(2000))))


@pytest.mark.parametrize("what", ["write", "read", "remove", "load"])
def test_a_storage_that_fails(what: str) -> None:
    segments = MemorySegments()
    tier = tier_of(segments)
    tier.write([payload(1)])
    segments.failing.add(what)
    match what:
        case "write":
            with pytest.raises(StoreError, match="cannot be written"):
                tier.write([payload(2)])
            assert tier.contains(names(1, 2)) == [True, False]
        case "read":
            assert tier.read(names(1)) == [None]
        case "remove":
            tier.forget(names(1))
            assert tier.contains(names(1)) == [False] and len(segments.segments) == 1
        case _:
            with pytest.raises(StoreError, match="cannot be listed"):
                tier.refresh()
    if what != "load":
        assert tier.counts().num_failed == 1
    segments.failing.clear()
    tier.write([payload(3)])
    assert bytes(tier.read(names(3))[0] or b"") == payload(3)


class Crash(BaseException):
    """The process ends here."""


class CrashingSegments(MemorySegments):
    """The process ends at the change of a given number from now on, which is not made."""

    num_left = 1_000_000

    def _check(self, what: str) -> None:
        if what in ("write", "remove"):
            if not self.num_left:
                raise Crash
            self.num_left -= 1
        super()._check(what)


def test_a_purge_goes_on_after_a_crash_at_any_time() -> None:
    num_crashes = 0
    for num_changes in range(20):
        segments = CrashingSegments()
        tier = tier_of(segments)
        # Two tenants share two segments; a third segment is of the one that goes.
        tier.write([payload(1, tenant=A), payload(2, tenant=B)])
        tier.write([payload(3, tenant=B), payload(4, tenant=A)])
        tier.write([payload(5, tenant=A)])
        segments.num_left = num_changes
        try:
            tier.purge(A)
        except Crash:
            num_crashes += 1
        segments.num_left = 1_000_000
        after = tier_of(segments)
        gone = after.contains(names(1, 4, 5))
        # As if nobody had asked, or for good; what is another's is kept in any case.
        assert gone == [num_changes == 0] * 3
        assert [bytes(data or b"") for data in after.read(names(2, 3))] == [
            payload(2, tenant=B),
            payload(3, tenant=B),
        ]
        if num_changes:
            assert (
                tier_of(segments).contains(names(1, 2, 3, 4, 5))
                == [False, True, True] + [False] * 2
            )
            assert len(segments.segments) == 1, "what was purged, or what said so, is left"
    assert 5 <= num_crashes < 20


def test_a_purge_that_another_began_is_heard_of_and_ended_when_it_does_not() -> None:
    segments = CrashingSegments()
    one, other = tier_of(segments), tier_of(segments)
    one.write([payload(1, tenant=A), payload(2, tenant=B)])
    other.refresh()
    segments.num_left = 1
    with pytest.raises(Crash):
        one.purge(A)
    segments.num_left = 1_000_000
    other.refresh()
    assert other.contains(names(1, 2)) == [False, True] and len(segments.segments) == 2
    other.refresh()
    assert other.contains(names(1, 2)) == [False, True] and len(segments.segments) == 1
    other.write([payload(1, tenant=A)])
    other.refresh()
    assert other.contains(names(1)) == [True]


def test_a_full_storage_can_be_purged() -> None:
    segments = MemorySegments()
    tier = tier_of(segments)
    tier.write([payload(1)])
    segments.failing.add("write")
    assert tier.purge(None) == 1 and segments.segments == {}


def test_room_is_made_in_the_storage_too() -> None:
    segments = MemorySegments()
    tier = tier_of(segments, 2500)
    for number in range(8):
        tier.write([payload(number)])
    assert sum(map(len, segments.segments.values())) == tier.counts().num_bytes <= 2500
    assert tier.contains(names(7)) == [True]
    # A smaller limit acts at the next start.
    assert tier_of(segments, 1000).counts().num_bytes <= 1000
    tier.close()
    assert segments.segments == {}
