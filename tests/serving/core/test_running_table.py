"""Goal: memory goes to older sequences first, and comes back exactly when no step uses it.

Method: small tables in which a few sequences take, lose and return blocks by hand.
"""

import numpy as np
import pytest

from serving.core.request import Request, SamplingParams
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus


def make_table(num_blocks: int = 7, num_slots: int = 4) -> RunningTable:
    return RunningTable(num_slots, num_blocks, block_size=4, context_blocks_max=8)


def enter(table: RunningTable, sequence_id: int, stop_token_ids: tuple[int, ...] = ()) -> int:
    sampling = SamplingParams(temperature=0.5, top_k=3, top_p=0.25)
    request = Request(f"request-{sequence_id}", (1,) * 5, sampling)
    prompt = np.ones(5, np.int32)
    sequence = Sequence(sequence_id, request, prompt, 2**40, stop_token_ids, length_limit=30)
    table.enter(sequence)
    return sequence.row


def test_entering_fills_the_columns_and_leaving_returns_everything() -> None:
    table = make_table()
    row = enter(table, 6, stop_token_ids=(4, 9))
    other = enter(table, 7, stop_token_ids=(2,))
    assert table.prefilling_rows.tolist() == [row, other]
    assert table.sequence_ids[[row, other]].tolist() == [6, 7]
    assert (table.num_tokens[row], table.num_scheduled[row], table.length_limits[row]) == (5, 0, 30)
    assert (table.temperatures[row], table.top_ks[row], table.top_ps[row]) == (0.5, 3, 0.25)
    assert table.seeds[row] == 2**40
    assert table.stop_tokens[[row, other]].tolist() == [[4, 9], [2, -2]]
    assert table.claim(row, 9)
    assert table.num_blocks[row] == 3
    assert (table.block_tables[row] > 0).tolist() == [True] * 3 + [False] * 5
    table.begin_decoding(row)
    assert (table.prefilling_rows.tolist(), table.decoding_rows.tolist()) == ([other], [row])
    table.last_steps[row] = 3
    table.settle(3)
    table.leave(row, SequenceStatus.FINISHED)
    assert table.blocks.num_free == 6
    assert table.slots.num_free == 2
    assert not table.block_tables[row].any()
    again = enter(table, 8)
    assert again == row
    assert table.last_steps[row] == -1
    assert table.stop_tokens[row].tolist() == [-2, -2]


def test_claims_grow_and_never_shrink() -> None:
    table = make_table()
    row = enter(table, 0)
    for num_tokens, num_blocks in [(1, 1), (4, 1), (5, 2), (2, 2), (24, 6)]:
        assert table.claim(row, num_tokens)
        assert table.num_blocks[row] == num_blocks
    assert not table.claim(row, 25)
    assert table.num_blocks[row] == 6


def test_an_older_sequence_preempts_the_youngest_and_the_youngest_waits() -> None:
    table = make_table()
    rows = [enter(table, sequence_id) for sequence_id in (0, 1, 2)]
    sequences = [table.sequences[row] for row in rows]
    for row in rows:
        assert table.claim(row, 8)
    table.begin_decoding(rows[1])
    assert not table.claim(rows[2], 9)
    assert table.num_blocks[rows[2]] == 2
    assert table.claim(rows[1], 9)
    assert [sequence.status for sequence in sequences if sequence] == [
        SequenceStatus.PREFILLING,
        SequenceStatus.DECODING,
        SequenceStatus.WAITING,
    ]
    assert table.claim(rows[0], 16)
    preempted = table.take_preempted()
    assert preempted == [sequences[2], sequences[1]]
    assert [sequence.num_preemptions for sequence in preempted] == [1, 1]
    assert table.take_preempted() == []
    assert table.num_blocks.sum() == 4


def test_memory_of_a_step_in_flight_is_kept_until_it_is_settled() -> None:
    table = make_table()
    row, idle = enter(table, 0), enter(table, 1)
    assert table.claim(row, 8)
    assert table.claim(idle, 4)
    table.last_steps[row] = 5
    table.leave(row, SequenceStatus.FINISHED)
    table.leave(idle, SequenceStatus.FINISHED)
    assert table.is_retiring
    assert (table.blocks.num_free, table.slots.num_free) == (4, 2)
    table.settle(4)
    assert table.blocks.num_free == 4
    table.settle(5)
    assert not table.is_retiring
    assert (table.blocks.num_free, table.slots.num_free) == (6, 3)


def test_nothing_is_preempted_while_memory_is_on_its_way_back() -> None:
    table = make_table()
    rows = [enter(table, sequence_id) for sequence_id in (0, 1, 2)]
    for row in rows:
        assert table.claim(row, 8)
    table.last_steps[rows[2]] = 3
    assert not table.claim(rows[0], 9)
    assert [sequence.sequence_id for sequence in table.take_preempted()] == [2]
    assert not table.claim(rows[0], 9)
    assert table.take_preempted() == []
    table.settle(3)
    assert table.claim(rows[0], 9)


def test_an_empty_row_cannot_leave_or_decode() -> None:
    table = make_table()
    with pytest.raises(AssertionError, match="row 1 is empty"):
        table.leave(1, SequenceStatus.FINISHED)
    with pytest.raises(AssertionError, match="row 1 is empty"):
        table.begin_decoding(1)


# --- sharing ------------------------------------------------------------------


def make_sharing_table() -> RunningTable:
    return RunningTable(4, 12, block_size=4, context_blocks_max=8, num_snapshots=2)


def compute(table: RunningTable, row: int, num_tokens: int) -> None:
    assert table.claim(row, num_tokens)
    table.add_computed(np.array([row]), np.array([num_tokens]))


def start(table: RunningTable, sequence_id: int, length: int = 13) -> int:
    prompt = np.arange(length, dtype=np.int32)
    request = Request(f"request-{sequence_id}", tuple(prompt.tolist()), SamplingParams())
    sequence = Sequence(sequence_id, request, prompt, 1, (), length_limit=30)
    table.enter(sequence, table.num_usable_blocks(sequence))
    return sequence.row


def keep_snapshot(table: RunningTable, row: int, num_blocks: int) -> int:
    sequence, slot = table.sequences[row], table.prefixes.reserve_slot()
    assert sequence is not None and slot is not None
    assert table.prefixes.keep_snapshot(sequence.keys(num_blocks, 4)[-1], slot)
    return slot


def test_a_usable_prefix_is_held_and_its_state_restored() -> None:
    table = make_sharing_table()
    first = start(table, 0)
    compute(table, first, 13)
    assert (table.num_named[first], table.num_computed[first]) == (3, 13)
    slot = keep_snapshot(table, first, 2)
    second = start(table, 1)
    shared = table.block_tables[first, :2].tolist()
    assert table.block_tables[second].tolist() == [*shared, 0, 0, 0, 0, 0, 0]
    assert table.blocks.num_holders[shared].tolist() == [2, 2]
    columns = (table.num_blocks, table.num_scheduled, table.num_computed, table.num_named)
    assert [int(column[second]) for column in columns] == [2, 8, 8, 2]
    # Three blocks are present, so a state is wanted there, which is the last boundary too.
    assert table.cuts[second].tolist() == [12, 0, 12]
    assert table.take_restores().tolist() == [[slot, second]]
    assert table.take_restores().tolist() == []
    table.leave(first, SequenceStatus.FINISHED)
    assert table.blocks.num_holders[shared].tolist() == [1, 1]
    third = start(table, 2)
    table.leave(third, SequenceStatus.FINISHED)
    assert table.take_restores().tolist() == [], "nobody is left to restore"


def test_equal_blocks_become_one_when_no_step_uses_the_second_any_more() -> None:
    table = make_sharing_table()
    rows = [start(table, 0), start(table, 1)]
    compute(table, rows[0], 8)
    assert table.claim(rows[1], 8)
    own = table.block_tables[rows[1], :2].tolist()
    table.last_steps[rows[1]] = 6
    compute(table, rows[1], 8)
    assert (table.block_tables[rows[0]] == table.block_tables[rows[1]]).all()
    assert table.blocks.num_holders[own].tolist() == [1, 1]
    assert table.is_retiring
    table.settle(5)
    assert table.blocks.num_free == 7
    table.settle(6)
    assert table.blocks.num_free == 9
    assert not table.is_retiring


def test_what_is_needed_again_leaves_the_free_blocks() -> None:
    table = make_sharing_table()
    row = start(table, 0)
    compute(table, row, 13)
    keep_snapshot(table, row, 3)
    table.leave(row, SequenceStatus.FINISHED)
    assert (table.blocks.num_free, table.blocks.num_free_named) == (11, 3)
    prompt = np.arange(13, dtype=np.int32)
    waiting = Sequence(1, Request("b", tuple(range(13)), SamplingParams()), prompt, 1, (), 30)
    assert table.num_usable_blocks(waiting) == 3
    assert table.num_held_blocks(waiting, 3) == 0
    again = start(table, 1)
    assert (table.blocks.num_free, table.blocks.num_free_named) == (8, 0)
    assert table.num_held_blocks(waiting, 3) == 3
    table.leave(again, SequenceStatus.FINISHED)
    table.forget_prefixes()
    assert table.num_usable_blocks(waiting) == 0
    assert (table.blocks.num_free, table.blocks.num_free_named) == (11, 0)


def test_blocks_of_many_rows_are_claimed_at_once_or_not_at_all() -> None:
    table = make_table(num_blocks=10)
    rows = np.array([enter(table, sequence_id) for sequence_id in range(3)])
    assert table.claim(int(rows[1]), 5)
    assert table.claim_all(rows, np.array([9, 8, 0]))
    assert table.num_blocks[rows].tolist() == [3, 2, 0]
    held = table.block_tables[rows, :3][table.block_tables[rows, :3] > 0]
    assert len(set(held.tolist())) == 5 == table.blocks.num_usable - table.blocks.num_free
    assert (table.block_tables[rows[1], :2] > 0).all()
    before = table.block_tables.copy()
    assert not table.claim_all(rows, np.array([13, 16, 8]))
    np.testing.assert_array_equal(table.block_tables, before)
    assert table.claim_all(rows, np.array([13, 12, 8]))
    assert table.blocks.num_free == 0
