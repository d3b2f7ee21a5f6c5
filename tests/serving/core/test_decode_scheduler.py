"""Goal: every sequence that is ready decodes, in turn when no bucket holds all of them.

Method: tables of decoding sequences with given lengths and last steps; the chosen rows by hand.
"""

import numpy as np

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.decode_scheduler import choose_rows
from serving.core.request import Request, SamplingParams
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence


def make_buckets(*decode: Bucket) -> BucketTable:
    return BucketTable({StepKind.PREFILL: [Bucket(1, 1, 64)], StepKind.DECODE: decode})


def make_table(lengths: list[int], num_blocks: int = 257) -> RunningTable:
    """Sequences 0, 1, ... in rows 1, 2, ..., with all tokens but the last computed."""
    table = RunningTable(9, num_blocks, block_size=4, context_blocks_max=64)
    for sequence_id, length in enumerate(lengths):
        request = Request(f"request-{sequence_id}", (1,) * length, SamplingParams())
        prompt = np.ones(length, np.int32)
        table.enter(Sequence(sequence_id, request, prompt, 0, (), length_limit=256))
        row = sequence_id + 1
        assert table.claim(row, length - 1)
        table.num_scheduled[row] = length - 1
        table.last_steps[row] = 10
        table.begin_decoding(row)
    table.settle(10)
    return table


def test_every_ready_row_is_chosen_and_has_its_blocks() -> None:
    table = make_table([5, 9, 7, 6])
    # One token ahead of what is known, and one whose last token a step in flight samples.
    table.num_scheduled[1] = 5
    table.length_limits[4] = 6
    rows = choose_rows(table, make_buckets(Bucket(8, 8, 64)))
    assert rows.tolist() == [1, 2, 3]
    assert table.num_blocks.tolist()[1:5] == [2, 3, 2, 2]


def test_no_row_is_chosen_from_an_empty_table() -> None:
    assert len(choose_rows(make_table([]), make_buckets(Bucket(8, 8, 64)))) == 0


def test_rows_last_served_longest_ago_go_first_when_not_all_fit() -> None:
    table = make_table([3] * 5)
    table.last_steps[1:6] = [7, 3, 7, 5, 7]
    assert choose_rows(table, make_buckets(Bucket(3, 3, 64))).tolist() == [1, 2, 4]
    assert choose_rows(table, make_buckets(Bucket(1, 1, 64))).tolist() == [2]


def test_a_long_context_takes_the_narrower_batch_when_it_is_its_turn() -> None:
    buckets = make_buckets(Bucket(4, 4, 2), Bucket(2, 2, 64))
    table = make_table([3, 3, 100, 3])
    assert choose_rows(table, buckets).tolist() == [1, 2]
    table.last_steps[1:5] = [12, 12, 11, 11]
    assert choose_rows(table, buckets).tolist() == [3, 4]
    table.last_steps[1:5] = [11, 11, 12, 11]
    assert choose_rows(table, buckets).tolist() == [1, 2, 4]


def test_the_oldest_grows_first_and_preempts_the_youngest() -> None:
    table = make_table([5, 5, 5], num_blocks=4)
    rows = choose_rows(table, make_buckets(Bucket(8, 8, 64)))
    assert rows.tolist() == [1]
    assert [sequence.sequence_id for sequence in table.take_preempted()] == [2]
    assert table.num_blocks.tolist()[1:4] == [2, 1, 0]


def test_a_row_without_a_block_does_not_take_a_turn() -> None:
    table = make_table([3, 5], num_blocks=3)
    table.last_steps[1:3] = [9, 4]
    assert choose_rows(table, make_buckets(Bucket(1, 1, 64))).tolist() == [1]
    assert table.take_preempted() == []
