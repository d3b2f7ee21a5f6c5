"""Goal: the queue is in the order in which sequences are to start, and no priority starves in it.

Method: small queues by hand; a stream of urgent arrivals against a few that are not.
"""

from collections import Counter

from serving.core.request import PRIORITY_MAX, Request, SamplingParams
from serving.core.sequence import Sequence, lowest_rank
from serving.core.waiting_queue import OUTRANKED_MAX, WaitingQueue
from tests.serving.core.test_prefill_scheduler import make_sequence


def waiting(
    sequence_id: int, priority: int = 0, num_preemptions: int = 0, owner: str = ""
) -> Sequence:
    sequence = make_sequence(sequence_id, 4)
    sequence.request = Request("r", (1,), SamplingParams(), priority=priority, cache_owner=owner)
    sequence.num_preemptions = num_preemptions
    return sequence


def queue_of(*sequences: Sequence) -> WaitingQueue[Sequence]:
    queue = WaitingQueue[Sequence](lambda _: 0)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def ids(queue: WaitingQueue[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in queue]


def test_order_is_by_priority_then_resumed_before_new_then_by_arrival() -> None:
    queue = queue_of(
        waiting(0, 1), waiting(1), waiting(2, -5), waiting(3, num_preemptions=1), waiting(4),
        waiting(5, num_preemptions=2), waiting(6, 1, num_preemptions=1),
    )  # fmt: skip
    assert ids(queue) == [2, 3, 5, 1, 4, 6, 0]
    assert len(queue) == 7


def test_sequences_leave_from_anywhere() -> None:
    sequences = [waiting(0), waiting(1, 2), waiting(2, -1)]
    queue = queue_of(*sequences)
    for sequence, left in zip(sequences, ([2, 1], [2], []), strict=True):
        queue.remove(sequence)
        assert ids(queue) == left
    assert len(queue) == 0


def test_one_of_a_priority_goes_first_after_so_many_more_urgent_starts() -> None:
    first, second, least = waiting(0, 3), waiting(1, 3), waiting(2, 4)
    queue = queue_of(first, second, least)
    places: list[int] = []
    for num_starts in range(1, 3 * OUTRANKED_MAX):
        queue.add(waiting(2 + num_starts))
        started = next(iter(queue))
        queue.remove(started)
        queue.count_starts([started])
        if started in (first, second, least):
            places.append(num_starts)
    # 32 urgent ones, then the first of either priority; for the rest these count as well.
    assert places == [OUTRANKED_MAX + 1, OUTRANKED_MAX + 2, 2 * OUTRANKED_MAX + 1]
    assert first.is_promoted and least.is_promoted and second.is_promoted


def test_starts_of_equals_and_of_lower_priorities_do_not_count() -> None:
    queue = queue_of(waiting(0, 3))
    for sequence_id in range(1, 3 * OUTRANKED_MAX):
        queue.count_starts([waiting(sequence_id, 3), waiting(sequence_id, 4)])
    assert not next(iter(queue)).is_promoted


def test_a_promoted_sequence_stays_before_all_others() -> None:
    promoted = waiting(7, PRIORITY_MAX)
    promoted.is_promoted = True
    assert ids(queue_of(waiting(0, -PRIORITY_MAX), promoted)) == [7, 0]
    assert promoted.rank < waiting(0, -PRIORITY_MAX).rank < lowest_rank(PRIORITY_MAX)


def test_ranks_order_all_sequences() -> None:
    ordered = [waiting(9, -PRIORITY_MAX), waiting(3, -1), waiting(4, -1), waiting(2), waiting(0, 1)]
    ranks = [sequence.rank for sequence in ordered]
    assert ranks == sorted(set(ranks))
    last = waiting(2**47 - 1, PRIORITY_MAX).rank
    assert ranks[0] >= 0 and last < 2**63
    assert lowest_rank(0) <= waiting(2).rank < lowest_rank(1) <= waiting(0, 1).rank


def test_owners_take_turns_however_urgent_one_calls_its_own() -> None:
    num_running: Counter[str] = Counter()
    queue = WaitingQueue[Sequence](num_running.__getitem__)
    for sequence_id in range(7):
        queue.add(waiting(sequence_id, -PRIORITY_MAX, owner="a"))
    for sequence in (waiting(7, 5, owner="b"), waiting(8, owner="b"), waiting(9, owner="c")):
        queue.add(sequence)
    # Within a line by priority, between lines by who came first.
    assert ids(queue) == [0, 8, 9, 1, 7, 2, 3, 4, 5, 6]
    # Whoever runs fewer comes first.
    num_running.update({"a": 2, "c": 1})
    assert ids(queue) == [8, 7, 9, 0, 1, 2, 3, 4, 5, 6]
    del num_running["a"]
    assert ids(queue) == [0, 8, 1, 7, 9, 2, 3, 4, 5, 6]


def test_without_anything_running_the_oldest_goes_first() -> None:
    num_running: Counter[str] = Counter()
    queue = WaitingQueue[Sequence](num_running.__getitem__)
    for sequence_id in range(4):
        queue.add(waiting(sequence_id, owner="ab"[sequence_id > 1]))
    order: list[int] = []
    while len(queue):
        started = next(iter(queue))
        queue.remove(started)
        order.append(started.sequence_id)
    assert order == [0, 1, 2, 3]


def test_urgent_starts_of_others_outrank_nobody() -> None:
    queue = queue_of(waiting(0, 3, owner="b"), waiting(1, 3, owner="a"))
    for sequence_id in range(2, OUTRANKED_MAX + 2):
        queue.count_starts([waiting(sequence_id, owner="a")])
    assert [sequence.is_promoted for sequence in queue] == [False, True]
