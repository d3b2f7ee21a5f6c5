"""Goal: prompts start when they fit, and the tokens of a prefill step are shared out fairly.

Method: tables with a few prompts; which start, and how many tokens each gets, written out by hand;
random prompts and buckets for what must always hold.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.cost import PrefillCost
from serving.core.prefill_scheduler import (
    OVERTAKES_MAX,
    PrefillBudget,
    choose_chunks,
    start_waiting,
)
from serving.core.request import Request, RequestImage, SamplingParams
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.waiting_queue import WaitingQueue

DECODE = [Bucket(1, 1, 64)]


def make_sequence(
    sequence_id: int, num_tokens: int, length_limit: int = 256, priority: int = 0
) -> Sequence:
    name = f"request-{sequence_id}"
    request = Request(name, (1,) * num_tokens, SamplingParams(), priority=priority)
    return Sequence(
        sequence_id, request, np.ones(num_tokens, np.int32), 0, (), length_limit=length_limit
    )


def make_table(lengths: list[int], num_blocks: int = 257, num_slots: int = 17) -> RunningTable:
    table = RunningTable(num_slots, num_blocks, block_size=4, context_blocks_max=64)
    for sequence_id, length in enumerate(lengths):
        table.enter(make_sequence(sequence_id, length))
    return table


def make_queue(*sequences: Sequence) -> WaitingQueue[Sequence]:
    queue = WaitingQueue[Sequence](lambda _: 0)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def shares(
    lengths: list[int], buckets: list[Bucket], shortest_first: bool = False, **sizes: int
) -> dict[int, int]:
    """Tokens for each sequence id."""
    table = make_table(lengths, **sizes)
    rows, num_tokens = choose_chunks(table, bucket_table(buckets), shortest_first)
    return dict(zip(table.sequence_ids[rows].tolist(), num_tokens.tolist(), strict=True))


def bucket_table(prefill: list[Bucket]) -> BucketTable:
    return BucketTable({StepKind.PREFILL: prefill, StepKind.DECODE: DECODE})


# --- starting --------------------------------------------------------------------


def test_prompts_start_in_order_while_slots_last() -> None:
    table = make_table([], num_slots=3)
    sequences = [make_sequence(sequence_id, 4) for sequence_id in range(4)]
    queue = make_queue(*sequences)
    start_waiting(queue, table)
    assert list(queue) == sequences[2:]
    assert [sequence.status for sequence in sequences[:2]] == [SequenceStatus.PREFILLING] * 2


def test_blocks_promised_to_running_sequences_are_not_given_away() -> None:
    # 10 blocks: the prompt of 20 needs 6 of them, its first output token included.
    table = make_table([20], num_blocks=11)
    queue = make_queue(make_sequence(1, 16), make_sequence(2, 15))
    start_waiting(queue, table)
    assert [sequence.sequence_id for sequence in queue] == [1]
    # One that decodes is promised a single block more, and none if it will not need it.
    for length_limit, num_started in [(9, 1), (10, 0)]:
        table = make_table([], num_blocks=6)
        table.enter(make_sequence(0, 8, length_limit=length_limit))
        table.claim(1, 8)
        table.begin_decoding(1)
        queue = make_queue(make_sequence(1, 11))
        start_waiting(queue, table)
        assert len(queue) == 1 - num_started


def test_prompts_that_start_together_do_not_get_the_same_blocks() -> None:
    queue = make_queue(make_sequence(0, 15), make_sequence(1, 15), make_sequence(2, 15))
    start_waiting(queue, make_table([], num_blocks=11))
    assert [sequence.sequence_id for sequence in queue] == [2]


def test_a_prompt_that_fills_the_pool_to_its_limit_starts_in_an_empty_one() -> None:
    table = make_table([], num_blocks=6)
    queue = make_queue(make_sequence(0, 19, length_limit=20))
    start_waiting(queue, table)
    assert len(queue) == 0


def test_a_prompt_without_room_is_overtaken_a_bounded_number_of_times() -> None:
    large = make_sequence(0, 40)
    queue = make_queue(large)
    table = make_table([], num_blocks=9, num_slots=9)
    for sequence_id in range(1, OVERTAKES_MAX + 1):
        queue.add(make_sequence(sequence_id, 3, length_limit=4))
        start_waiting(queue, table)
        assert list(queue) == [large]
        table.leave(1, SequenceStatus.FINISHED)
    assert large.num_overtakes == OVERTAKES_MAX
    queue.add(make_sequence(99, 3, length_limit=4))
    start_waiting(queue, table)
    assert len(queue) == 2


def test_a_preempted_prompt_without_room_is_not_overtaken() -> None:
    preempted = make_sequence(0, 40)
    preempted.num_preemptions = 1
    queue = make_queue(preempted, make_sequence(1, 3))
    start_waiting(queue, make_table([], num_blocks=9))
    assert len(queue) == 2


# --- priorities ------------------------------------------------------------------


def running_table(num_blocks: int, *running: tuple[int, int]) -> RunningTable:
    """A table in which sequences of (priority, tokens) have all their blocks, and decode."""
    table = make_table([], num_blocks=num_blocks, num_slots=5)
    for sequence_id, (priority, num_tokens) in enumerate(running):
        table.enter(make_sequence(sequence_id, num_tokens, num_tokens + 1, priority))
        assert table.claim(sequence_id + 1, num_tokens)
        table.begin_decoding(sequence_id + 1)
    return table


def preempted(table: RunningTable) -> list[int]:
    return [sequence.sequence_id for sequence in table.take_preempted()]


def test_prompts_start_by_priority() -> None:
    table = make_table([], num_slots=3)
    queue = make_queue(*(make_sequence(i, 4, priority=p) for i, p in enumerate((2, 0, -1, 0))))
    start_waiting(queue, table)
    assert [sequence.sequence_id for sequence in queue] == [3, 0]


@pytest.mark.parametrize(
    ("priority", "num_tokens", "expected"),
    [
        # Three blocks are free, and four held by each of the three that run.
        (0, 11, []),
        (0, 12, [2]),
        (0, 27, [2]),
        (0, 28, [2, 1]),
        (0, 43, [2, 1]),
        # Nobody gives way to an equal, nor in vain.
        (1, 27, []),
        (0, 44, []),
        (-1, 44, [2, 1, 0]),
        (-1, 60, []),
    ],
)
def test_less_urgent_sequences_give_way_if_that_is_enough(
    priority: int, num_tokens: int, expected: list[int]
) -> None:
    table = running_table(16, (0, 16), (1, 16), (1, 16))
    queue = make_queue(make_sequence(9, num_tokens, priority=priority))
    start_waiting(queue, table)
    assert preempted(table) == expected
    assert len(queue) == (num_tokens > 11 and not expected)


def test_a_slot_is_made_free_for_an_urgent_prompt() -> None:
    table = running_table(99, (0, 4), (2, 4), (1, 4), (2, 4))
    queue = make_queue(make_sequence(9, 4), make_sequence(10, 4))
    start_waiting(queue, table)
    # One slot is enough for the first in line; the next one in line gets its turn afterwards.
    assert preempted(table) == [3]
    assert len(queue) == 1
    start_waiting(queue, table)
    assert preempted(table) == [1]


def test_nobody_else_takes_the_room_that_was_made() -> None:
    table = running_table(9, (1, 16), (1, 12))
    table.last_steps[1:3] = 8, 7
    queue = make_queue(make_sequence(8, 20), make_sequence(9, 2, priority=1))
    start_waiting(queue, table)
    # Its memory comes back with the step in flight, and the small one that would fit waits.
    assert (preempted(table), len(queue)) == ([1], 2)
    table.settle(7)
    start_waiting(queue, table)
    assert (preempted(table), len(queue)) == ([0], 2)
    table.settle(8)
    start_waiting(queue, table)
    assert [sequence.sequence_id for sequence in queue] == []


def test_a_promoted_prompt_costs_nobody_their_memory() -> None:
    table = running_table(9, (0, 16), (1, 12))
    starved = make_sequence(8, 20, priority=1)
    starved.is_promoted = True
    queue = make_queue(starved)
    start_waiting(queue, table)
    assert (preempted(table), len(queue)) == ([], 1)


def test_chunks_are_given_by_priority() -> None:
    table = make_table([], num_slots=5)
    for sequence_id, priority in enumerate((1, 0)):
        table.enter(make_sequence(sequence_id, 100, priority=priority))
    rows, num_tokens = choose_chunks(table, bucket_table([Bucket(2, 16, 64)]), False)
    # The half of the first in rank; the rest goes to the shortest rest, which it has too now.
    assert table.sequence_ids[rows].tolist() == [1] and num_tokens.tolist() == [16]


# --- sharing a step --------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], {0: 5}),
        ([3, 4], {0: 3, 1: 4}),
        ([100], {0: 16}),
        # Half to the oldest, the rest to the shortest.
        ([100, 100], {0: 16}),
        ([100, 50], {0: 8, 1: 8}),
        ([100, 50, 3, 2], {0: 8, 1: 3, 2: 3, 3: 2}),
        ([2, 100, 3], {0: 2, 1: 11, 2: 3}),
        # Four rows at most, one of them kept for the shortest.
        ([9, 9, 9, 9, 1], {0: 9, 1: 6, 4: 1}),
        ([1, 1, 1, 9, 2], {0: 1, 1: 1, 2: 1, 4: 2}),
    ],
)
def test_tokens_are_shared_between_the_oldest_and_the_shortest(
    lengths: list[int], expected: dict[int, int]
) -> None:
    assert shares(lengths, [Bucket(4, 16, 64)]) == expected


def test_a_single_row_goes_to_the_oldest_or_the_shortest() -> None:
    assert shares([30, 5], [Bucket(1, 16, 64)]) == {0: 16}
    assert shares([30, 5], [Bucket(1, 16, 64)], shortest_first=True) == {1: 5}


def test_a_chunk_keeps_to_the_buckets_that_reach_its_context() -> None:
    buckets = [Bucket(2, 16, 2), Bucket(2, 6, 64)]
    assert shares([30], buckets) == {0: 8}
    table = make_table([30])
    table.num_scheduled[1] = 8
    rows, num_tokens = choose_chunks(table, bucket_table(buckets), False)
    assert (rows.tolist(), num_tokens.tolist()) == ([1], [6])
    # The two share a bucket, so the short context gets no more than the long one leaves.
    table = make_table([13, 30])
    table.num_scheduled[1] = 8
    rows, num_tokens = choose_chunks(table, bucket_table(buckets), False)
    assert (rows.tolist(), num_tokens.tolist()) == ([1, 2], [5, 1])


def test_chunks_are_cut_to_the_free_blocks_oldest_first() -> None:
    assert shares([20, 20], [Bucket(4, 64, 64)], num_blocks=5) == {0: 12, 1: 4}
    table = make_table([20, 20], num_blocks=5)
    rows, _ = choose_chunks(table, bucket_table([Bucket(4, 64, 64)]), False)
    assert table.num_blocks[rows].tolist() == [3, 1]
    table.num_scheduled[rows] = [12, 4]
    rows, num_tokens = choose_chunks(table, bucket_table([Bucket(4, 64, 64)]), False)
    assert (table.sequence_ids[rows].tolist(), num_tokens.tolist()) == ([0], [4])
    assert [sequence.sequence_id for sequence in table.take_preempted()] == [1]


def test_nothing_is_chosen_when_nothing_is_left_to_compute() -> None:
    assert shares([], [Bucket(4, 16, 64)]) == {}
    table = make_table([7])
    table.num_scheduled[1] = 7
    rows, num_tokens = choose_chunks(table, bucket_table([Bucket(4, 16, 64)]), False)
    assert len(rows) == len(num_tokens) == 0


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    more=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.integers(1, 16)), max_size=3),
    num_blocks=st.integers(2, 40),
    shortest_first=st.booleans(),
)
def test_every_choice_fits_a_bucket_and_its_blocks(
    lengths: list[int], more: list[tuple[int, int, int]], num_blocks: int, shortest_first: bool
) -> None:
    buckets = bucket_table(
        [Bucket(1, 8, 16), *(Bucket(rows, rows + extra, width) for rows, extra, width in more)]
    )
    table = make_table(lengths, num_blocks)
    rows, num_tokens = choose_chunks(table, buckets, shortest_first)
    assert len(rows) > 0
    assert (num_tokens >= 1).all()
    assert (num_tokens <= table.num_tokens[rows]).all()
    assert (table.num_blocks[rows] * 4 >= num_tokens).all()
    need = int(table.blocks_for(num_tokens).max())
    assert buckets.smallest(StepKind.PREFILL, len(rows), int(num_tokens.sum()), need) is not None


# --- time ------------------------------------------------------------------------

SIZES = [Bucket(2, 2, 64), Bucket(4, 16, 64), Bucket(4, 32, 64)]
LINEAR = PrefillCost(base_ms=4.0, token_ms=1.0, pair_ms=0.0)


def shares_in(
    time_ms: float, cost: PrefillCost, lengths: list[int], done: int = 0
) -> dict[int, int]:
    """Tokens for each sequence id, the first of which has `done` tokens behind it."""
    table = make_table(lengths)
    table.num_scheduled[1] = done
    budget = PrefillBudget(time_ms, cost)
    rows, num_tokens = choose_chunks(table, bucket_table(SIZES), False, budget)
    return dict(zip(table.sequence_ids[rows].tolist(), num_tokens.tolist(), strict=True))


def test_a_step_whose_padding_takes_too_long_is_not_taken() -> None:
    assert shares_in(36.0, LINEAR, [200]) == {0: 32}
    # 30 tokens would be in time, but the step that holds them computes 32.
    assert shares_in(34.0, LINEAR, [200]) == {0: 16}
    assert shares_in(19.9, LINEAR, [200]) == {0: 2}
    # The smallest one is always taken.
    assert shares_in(0.1, LINEAR, [200]) == {0: 2}


def test_half_of_the_time_goes_to_the_oldest_and_half_to_the_shortest() -> None:
    # 16 ms beside the base, 8 of them for the oldest.
    assert shares_in(20.0, LINEAR, [200, 50]) == {0: 8, 1: 8}
    # Behind 100 tokens each of the oldest costs 2 ms and a little more for itself.
    steep = PrefillCost(base_ms=4.0, token_ms=1.0, pair_ms=0.01)
    assert shares_in(20.0, LINEAR, [200, 50], done=100) == {0: 8, 1: 8}
    # 16 tokens of padding leave 4 ms for pairs: 3 * 100 + 4.5, then 9 * 0 + 40.5.
    assert shares_in(24.0, steep, [200, 50], done=100) == {0: 3, 1: 13}
    assert shares_in(23.5, steep, [200, 50], done=100) == {0: 3, 1: 9}


def test_long_contexts_get_shorter_chunks() -> None:
    cost = PrefillCost(base_ms=0.0, token_ms=0.1, pair_ms=0.01)
    sizes = [shares_in(9.0, cost, [250], done=done)[0] for done in (0, 20, 80, 180)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def test_the_smallest_step_that_reaches_the_context_is_always_taken() -> None:
    sizes = [Bucket(1, 2, 2), Bucket(1, 8, 64), Bucket(1, 16, 64)]
    table = make_table([200])
    table.num_scheduled[1] = 100
    _, counts = choose_chunks(table, bucket_table(sizes), False, PrefillBudget(0.1, LINEAR))
    assert counts.tolist() == [8]


def test_an_image_is_computed_whatever_it_costs() -> None:
    table = make_table([])
    sequence = make_sequence(0, 40)
    image = RequestImage(0, 30, 1, 1, b"", np.zeros((1, 588), np.uint8))
    sequence.request = replace(sequence.request, images=(image,))
    table.enter(sequence)
    _, counts = choose_chunks(table, bucket_table(SIZES), False, PrefillBudget(1.0, LINEAR))
    assert counts.tolist() == [30]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    done=st.lists(st.integers(0, 150), min_size=8, max_size=8),
    time_ms=st.floats(0.1, 60),
    pair_ms=st.floats(0, 0.1),
)
def test_steps_keep_within_their_time_and_never_stand_still(
    lengths: list[int], done: list[int], time_ms: float, pair_ms: float
) -> None:
    cost = PrefillCost(1.0, 0.5, pair_ms)
    table = make_table(lengths)
    for row, (length, before) in enumerate(zip(lengths, done, strict=False), 1):
        table.num_scheduled[row] = min(before, length - 1)
    starts = table.num_scheduled.copy()
    rows, counts = choose_chunks(table, bucket_table(SIZES), False, PrefillBudget(time_ms, cost))
    assert counts.sum() >= 1
    if counts.sum() > 2:
        size = next(size.num_tokens for size in SIZES if size.num_tokens >= counts.sum())
        pairs = sum(
            n * starts[row] + n * n / 2 for row, n in zip(rows, counts.tolist(), strict=True)
        )
        assert 1.0 + 0.5 * size + pair_ms * pairs <= time_ms * (1 + 1e-9)


def test_a_time_has_to_be_above_nothing() -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        PrefillBudget(0.0, LINEAR)


# --- images ----------------------------------------------------------------------


def shares_of_image(start: int, num_tokens: int, num_blocks: int, bucket_tokens: int = 16) -> int:
    """Tokens that a prompt of 20 with one image gets next to an older prompt of 4."""
    table = make_table([4], num_blocks=num_blocks)
    sequence = make_sequence(1, 20)
    image = RequestImage(start, num_tokens, 1, 1, b"", np.zeros((1, 588), np.uint8))
    sequence.request = replace(sequence.request, images=(image,))
    table.enter(sequence)
    buckets = bucket_table([Bucket(2, bucket_tokens, 64)])
    rows, counts = choose_chunks(table, buckets, False)
    assert (counts > 0).all()
    return dict(zip(table.sequence_ids[rows].tolist(), counts.tolist(), strict=True)).get(1, 0)


def test_an_image_is_not_cut_by_the_end_of_a_step() -> None:
    assert shares_of_image(0, 12, num_blocks=99) == 12
    assert shares_of_image(0, 13, num_blocks=99) == 0
    assert shares_of_image(2, 11, num_blocks=99) == 2
    assert shares_of_image(12, 8, num_blocks=99) == 12


def test_an_image_is_not_cut_by_the_end_of_the_pool() -> None:
    # One block is for padding, one for the older prompt, so two blocks of four are left.
    assert shares_of_image(0, 8, num_blocks=4) == 8
    assert shares_of_image(0, 9, num_blocks=4) == 0
    assert shares_of_image(3, 6, num_blocks=4) == 3
