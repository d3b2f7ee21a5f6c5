"""Goal: states are copied where a step ends at a boundary that was asked for, and a copy becomes a
snapshot only of a sequence that still runs.

Method: a small table whose sequences are moved by hand.
"""

import numpy as np

from serving.core.request import Request, SamplingParams
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.snapshots import SnapshotCopies


def make_table(num_snapshots: int = 3) -> RunningTable:
    return RunningTable(4, 20, block_size=4, context_blocks_max=8, num_snapshots=num_snapshots)


def enter(table: RunningTable, sequence_id: int, length: int = 14, tail_start: int = 0) -> int:
    prompt = np.arange(sequence_id, sequence_id + length, dtype=np.int32)
    request = Request(f"request-{sequence_id}", tuple(prompt.tolist()), SamplingParams())
    sequence = Sequence(sequence_id, request, prompt, 1, (), 30, tail_start=tail_start)
    table.enter(sequence, table.num_usable_blocks(sequence))
    assert table.claim(sequence.row, length)
    return sequence.row


def advance(table: RunningTable, row: int, num_tokens: int) -> None:
    table.num_scheduled[row] = num_tokens
    table.add_computed(np.array([row]), np.array([num_tokens]))


def plan(
    copies: SnapshotCopies, step: int, rows: list[int], ends: list[int], is_prefill: bool
) -> list[list[int]]:
    starts = np.array(ends) - 1
    return copies.plan(step, np.array(rows), starts, np.array(ends), is_prefill).tolist()


def test_prompts_are_copied_at_their_cuts_and_output_at_every_boundary() -> None:
    table = make_table()
    copies = SnapshotCopies(table)
    rows = [enter(table, 0), enter(table, 50)]
    assert table.cuts[rows].tolist() == [[0, 0, 12], [0, 0, 12]]
    assert plan(copies, 0, rows, [8, 11], True) == []
    assert plan(copies, 1, rows, [12, 12], True) == [[rows[0], 4], [rows[1], 5]]
    assert plan(copies, 2, rows, [15, 16], False) == [[rows[1], 6]]
    # Every slot waits for its step.
    assert plan(copies, 3, rows, [16, 20], False) == []


def test_a_prompt_with_a_tail_is_cut_before_it_too() -> None:
    table = make_table()
    copies = SnapshotCopies(table)
    row = enter(table, 0, tail_start=7)
    assert table.cuts[row].tolist() == [0, 4, 12]
    for step, end in enumerate((4, 12)):
        assert len(plan(copies, step, [row], [end], True)) == 1
        advance(table, row, end)
        copies.settle(step)
    sequence = table.sequences[row]
    assert sequence is not None
    keys = sequence.keys(3, 4)
    # The first state has nothing of the tail, the second one is for equal tails and later ones.
    assert table.prefixes.num_usable(keys, 5, 1) == 1
    assert table.prefixes.num_usable(keys, 7, 1) == 3
    # A prompt that parts inside its tail is cut before that.
    assert table.cuts[enter(table, 0, tail_start=6)].tolist() == [4, 4, 12]


def test_without_slots_nothing_is_copied() -> None:
    table = make_table(num_snapshots=0)
    copies = SnapshotCopies(table)
    row = enter(table, 0)
    assert table.cuts[row].tolist() == [0, 0, 0]
    assert plan(copies, 0, [row], [12], True) == plan(copies, 0, [row], [16], False) == []


def test_a_copy_becomes_a_snapshot_when_its_step_is_over() -> None:
    table = make_table()
    copies = SnapshotCopies(table)
    row = enter(table, 0)
    sequence = table.sequences[row]
    assert sequence is not None
    plan(copies, 3, [row], [12], True)
    copies.settle(2)
    assert table.prefixes.num_used_snapshots == 0
    advance(table, row, 12)
    copies.settle(3)
    assert table.prefixes.snapshot(sequence.keys(3, 4)[-1]) == 4


def test_a_copy_of_a_sequence_that_left_frees_its_slot() -> None:
    table = make_table(num_snapshots=1)
    copies = SnapshotCopies(table)
    for sequence_id, is_over in enumerate([True, True, False]):
        row = enter(table, sequence_id)
        assert len(plan(copies, sequence_id, [row], [12], True)) == 1
        if is_over:
            table.leave(row, SequenceStatus.FINISHED)
        # The last one still runs, but was not computed that far.
        copies.settle(sequence_id)
    assert table.prefixes.num_used_snapshots == 0
    assert table.prefixes.reserve_slot() == 4


def test_of_what_is_generated_only_the_newest_snapshot_stays() -> None:
    table = make_table()
    copies = SnapshotCopies(table)
    row = enter(table, 0)
    sequence = table.sequences[row]
    assert sequence is not None
    sequence.output_token_ids[:] = list(range(20))
    assert table.claim(row, 28)
    for step, end in enumerate((12, 16, 20, 24)):
        plan(copies, step, [row], [end], end == 12)
        advance(table, row, end)
        copies.settle(step)
    keys = sequence.keys(6, 4)
    kept = [table.prefixes.snapshot(key) is not None for key in keys]
    assert kept == [False, False, True, False, False, True]


def test_a_boundary_that_drafts_may_pass_is_kept_only_if_they_do() -> None:
    """Between 13 and 15 tokens before the step, and at most 18 after it."""
    table = make_table()
    copies = SnapshotCopies(table)
    row = enter(table, 0)
    sequence = table.sequences[row]
    assert sequence is not None
    sequence.output_token_ids[:] = list(range(10))
    assert table.claim(row, 20)
    advance(table, row, 13)
    for step, (start, end, is_kept) in enumerate([(13, 15, False), (15, 17, True)]):
        taken = copies.plan(step, np.array([row]), np.array([13]), np.array([18]), False)
        assert len(taken) == 1
        assert table.num_computed[row] == start
        advance(table, row, end)
        copies.settle(step)
        assert (table.prefixes.num_used_snapshots == 1) is is_kept
    # The next step may pass no boundary, and one that was passed before is of no use.
    assert copies.plan(2, np.array([row]), np.array([17]), np.array([19]), False).tolist() == []
    table.prefixes.drop_unused_snapshot(sequence.keys(4, 4)[-1])
    sequence.tail_key = None
    assert len(copies.plan(3, np.array([row]), np.array([13]), np.array([19]), False)) == 1
    advance(table, row, 18)
    copies.settle(3)
    assert table.prefixes.num_used_snapshots == 0
