"""Goal: the index knows where payloads lie, and what goes when room is needed.

Method: segments of small payloads by hand; afterwards the sums of bytes and the list of removed
segments are compared with what is left.
"""

import itertools

import pytest

from serving.kv.segment_index import Location, Row, SegmentIndex
from serving.kv.store import Header, Name, PayloadKind, encode, layout_id, tenant_id

A, B = tenant_id("a"), tenant_id("b")


def name(number: int) -> Name:
    return Name(PayloadKind.BLOCK, number.to_bytes(16))


def row(number: int, size: int = 100, tenant: bytes = A, written_s: int = 0) -> Row:
    return Row(PayloadKind.BLOCK, number.to_bytes(16), size, tenant, written_s)


def payload(number: int, size: int, tenant: bytes = A) -> bytes:
    return bytes(encode(Header(name(number), layout_id(b""), tenant, 0, size), [bytes(size)]))


def test_payloads_lie_one_after_another() -> None:
    index = SegmentIndex(10_000)
    index.adopt("s", [row(1, 10), row(2, 30), row(3, 5)], 60)
    assert index.find(name(2), 0) == Location("s", 1, 10, 30)
    assert index.find(name(3), 0) == Location("s", 2, 40, 5)
    assert index.find(name(4), 0) is None
    assert (len(index), index.num_bytes, index.tenant_bytes) == (3, 60, {A: 45})
    index.adopt("s", [row(1, 10)], 60)
    assert index.num_bytes == 60 and index.in_segment("s") == {name(1), name(2), name(3)}


@pytest.mark.parametrize("order", list(itertools.permutations("stu")))
def test_who_shares_segments_agrees_on_where_a_payload_lies(order: tuple[str, ...]) -> None:
    rows = {"s": [row(1)], "t": [row(1), row(2)], "u": [row(1)]}
    index = SegmentIndex(10_000)
    for segment in order:
        index.adopt(segment, rows[segment], 100 * len(rows[segment]))
    assert index.take_removed() == ["u"] and index.take_removed() == []
    found = index.find(name(1), 0)
    assert found is not None and found.segment == "s" and index.tenant_bytes == {A: 200}
    index.forget([name(2), name(9)])
    assert index.take_removed() == ["t"] and index.num_bytes == 100


def test_room_is_made_by_use_and_worn_segments_go_whole() -> None:
    index = SegmentIndex(800)
    for number in range(4):
        index.adopt(str(number), [row(2 * number), row(2 * number + 1)], 200)
    # 0 and 1 were used last; of segment 1 one payload goes first, then the other with it.
    for used in (0, 1):
        index.touch(name(used))
    index.make_room(200)
    assert index.take_removed() == ["1"] and index.num_bytes == 600 and index.num_evicted == 2
    assert name(0) in set(index) and index.find(name(2), 0) is None
    index.make_room(10_000)
    assert sorted(index.take_removed()) == ["0", "2", "3"] and len(index) == 0


def test_choice_leaves_out_what_is_stored_and_what_a_tenant_has_no_room_for() -> None:
    index = SegmentIndex(10_000, tenant_bytes_max=500)
    index.adopt("s", [row(1), row(2, 300, B)], 400)
    rows, parts = index.choose(
        [payload(1, 20), payload(3, 20), payload(3, 20), payload(4, 600), payload(5, 300, B)]
    )
    # The payload of B pushes out another of B's own, and none of A's.
    assert [one.name for one in rows] == [name(3), name(5)]
    assert [len(part) for part in parts] == [100, 380]
    assert set(index) == {name(1)} and index.num_evicted == 1


def test_what_is_kept_is_not_evicted() -> None:
    index = SegmentIndex(400)
    for number in range(4):
        index.adopt(str(number), [row(number)], 100)
    assert index.keep([name(0), name(9)], is_held=True) == 1
    index.make_room(300)
    assert set(index) == {name(0)}
    assert index.keep([name(0)], is_held=False) == 1
    index.make_room(400)
    assert len(index) == 0


def test_what_is_too_old_is_not_found_and_goes() -> None:
    index = SegmentIndex(10_000, ttl_s=60)
    index.adopt("s", [row(1, written_s=0), row(2, written_s=50)], 200)
    assert index.find(name(1), 61) is None and index.find(name(2), 61) is not None
    index.expire(61)
    assert set(index) == {name(2)} and index.take_removed() == []
    index.expire(1000)
    assert index.take_removed() == ["s"] and index.num_bytes == 0


def test_a_segment_is_removed_with_what_is_left_of_it() -> None:
    index = SegmentIndex(10_000)
    index.adopt("s", [row(1), row(2)], 200)
    index.remove("s")
    index.remove("s")
    assert len(index) == 0 and index.take_removed() == ["s"] and index.of_tenant(None) == []
