"""Goal: the directory grants each payload to one writer, refuses what comes too late, keeps what is
leased or pinned, and dooms what nobody may read any more.

Method: calls by hand with times of our own; afterwards leases, writes and sums are at their start.
"""

from serving.kv.directory import Directory, DirectoryTimes
from serving.kv.segment_index import Row
from serving.kv.store import Name, PayloadKind

A, B = b"tenant-a", b"tenant-b"
TIMES = DirectoryTimes(write_ns=10, lease_ns=10, removal_ns=10)


def key(number: int) -> bytes:
    return number.to_bytes(16)


def row(number: int, kind: int = PayloadKind.BLOCK, size: int = 100, tenant: bytes = A) -> Row:
    return Row(kind, key(number), size, tenant, 0)


def names(*numbers: int) -> list[Name]:
    return [Name(PayloadKind.BLOCK, key(number)) for number in numbers]


def directory(bytes_max: int = 10_000, epoch: int = 3, **limits: int) -> Directory:
    return Directory(epoch, bytes_max, times=TIMES, **limits)


def put(of: Directory, segment: str, *numbers: int, tenant: bytes = A, now_ns: int = 0) -> bool:
    rows = [row(number, tenant=tenant) for number in numbers]
    write, granted = of.begin(rows, now_ns)
    assert granted == list(range(len(rows)))
    return of.complete(write, segment, 100 * len(rows))


def test_a_match_ends_at_a_state() -> None:
    of = directory()
    put(of, "s", 1, 2, 3)
    keys = [key(n) for n in (1, 2, 3, 4)]
    assert of.match(keys, 0, 0, 0) == (0, 3)
    of.announce("t", [row(2, PayloadKind.STATE)], 100)
    assert of.match(keys, 0, 0, 0) == (2, 3)
    # No more than what is there already, or from the middle on.
    assert of.match(keys, 0, 2, 0) == (0, 3) and of.match(keys, 2, 1, 0) == (2, 3)
    assert of.match([key(9), *keys], 0, 0, 0) == of.match([], 0, 0, 0) == (0, 0)
    assert of.counts.num_matches == 6 and of.counts.num_matched_blocks == 4


def test_of_two_who_write_the_same_one_may() -> None:
    of = directory()
    first, granted = of.begin([row(1), row(2)], 0)
    assert granted == [0, 1]
    second, others = of.begin([row(2), row(3)], 0)
    assert others == [1] and of.num_writes == 2
    assert of.complete(second, "s", 100) and of.contains(names(1, 2, 3), 0) == [False, False, True]
    assert of.complete(first, "t", 200) and of.contains(names(1, 2, 3), 0) == [True] * 3
    assert of.begin([row(1)], 0)[1] == [] and of.num_writes == 0


def test_a_late_completion_of_an_abandoned_write_is_refused() -> None:
    of = directory()
    late, _ = of.begin([row(1)], 0)
    of.tick(0, 9)
    assert of.begin([row(1)], 9)[1] == []
    of.tick(0, 10)
    again, granted = of.begin([row(1)], 10)
    assert granted == [0]
    assert not of.complete(late, "old", 100) and of.contains(names(1), 0) == [False]
    assert of.complete(again, "new", 100)
    # Nor does it count twice, nor under the name of another segment.
    assert not of.complete(again, "new", 100)
    other, _ = of.begin([row(2)], 10)
    assert not of.complete(other, "new", 100) and of.contains(names(2), 0) == [False]
    assert of.counts.num_refused == 3 and of.counts.num_given_up == 1 and of.num_writes == 0


def test_no_number_of_one_directory_is_known_to_the_next() -> None:
    before = directory(epoch=3)
    write, _ = before.begin([row(1)], 0)
    lease, _ = before.locate(names(1), 0, 0)
    after = directory(epoch=4)
    other, _ = after.begin([row(1)], 0)
    assert not after.complete(write, "s", 100) and not after.release(lease)
    assert after.complete(other, "s", 100)


def test_what_is_leased_stays() -> None:
    of = directory(300)
    put(of, "s", 1)
    put(of, "t", 2)
    lease, (place, missing) = of.locate(names(1, 9), 0, 0)
    assert place is not None and place.segment == "s" and missing is None
    put(of, "u", 3)
    put(of, "v", 4)
    assert of.contains(names(1, 2, 3, 4), 0) == [True, False, True, True]
    assert of.take_doomed(0) == ["t"] and of.take_doomed(9) == [] and of.take_doomed(10) == ["t"]
    of.remove(["t"])
    # Forgotten while it is read: its bytes stay until the reader has gone.
    of.forget(names(1))
    assert of.num_doomed == 1 and of.take_doomed(20) == []
    assert of.release(lease) and not of.release(lease)
    assert of.take_doomed(20) == ["s"] and of.num_leases == 0
    of.remove(["s"])
    assert of.num_doomed == 0


def test_a_lease_ends_by_itself() -> None:
    of = directory(100)
    put(of, "s", 1)
    of.locate(names(1), 0, 0)
    # There is no room but that of a payload in use, which is given once it is not.
    assert of.begin([row(2)], 0)[1] == []
    of.tick(0, 10)
    assert of.num_leases == 0 and of.counts.num_leases_expired == 1
    put(of, "u", 2, now_ns=10)
    assert of.contains(names(1, 2), 0) == [False, True]


def test_a_pinned_payload_outlives_others_until_it_is_let_go() -> None:
    of = directory(300)
    put(of, "s", 1)
    assert of.pin(names(1, 9), True, 0) == 1 and of.pin(names(1), True, 0) == 1
    for number in range(2, 9):
        put(of, str(number), number)
    assert of.contains(names(1, 2, 8), 0) == [True, False, True]
    of.pin(names(1), False, 0)
    put(of, "all", 10, 11, 12)
    assert of.contains(names(1), 0) == [False]


def test_a_segment_with_a_pinned_payload_stays_whole() -> None:
    of = directory(600)
    put(of, "s", 1, 2, 3, 4)
    of.pin(names(1), True, 0)
    for number in range(10, 14):
        put(of, str(number), number)
    # The rest of "s" is evicted one by one, and it is not removed for being mostly empty.
    assert of.contains(names(1), 0) == [True] and "s" not in of.take_doomed(0)


def test_a_tenant_makes_room_from_its_own() -> None:
    of = directory(1000, tenant_bytes_max=200)
    put(of, "s", 1, tenant=B)
    put(of, "t", 2, 3)
    put(of, "u", 4)
    assert of.contains(names(1, 2, 3, 4), 0) == [True, True, False, True]
    # What is being written counts too.
    of.begin([row(5), row(6)], 0)
    assert of.begin([row(7)], 0)[1] == []


def test_purging_a_tenant_tells_which_segments_hold_bytes_of_it() -> None:
    of = directory()
    of.announce("mixed", [row(1), row(2, tenant=B)], 200)
    put(of, "own", 3)
    count, touched = of.purge(A, 0)
    assert count == 2 and touched == ["mixed"] and of.take_doomed(0) == ["own"]
    assert of.contains(names(1, 2, 3), 0) == [False, True, False]
    assert of.purge(None, 0) == (1, [])


def test_changes_say_what_has_to_be_written_down() -> None:
    of = directory(300)
    put(of, "s", 1, 2)
    changes = of.take_changes()
    assert list(changes.come) == ["s"] and changes.come["s"][0] == 200 and changes.gone == []
    put(of, "t", 3, 4)
    changes = of.take_changes()
    assert list(changes.come) == ["t"] and changes.gone == ["s"]
    # An announcement after a start says the same, once.
    again = directory()
    again.announce("t", [row(3), row(4)], 200)
    again.announce("t", [row(3), row(4)], 200)
    assert again.contains(names(3, 4), 0) == [True, True] and again.counts.num_announced == 1
    assert again.unknown(["s", "t"]) == ["s"]
