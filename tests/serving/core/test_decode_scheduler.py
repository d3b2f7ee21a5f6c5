"""Goal: every sequence that is ready decodes, in turn when no bucket holds all of them.

Method: tables of decoding sequences with given lengths and last steps; the chosen rows by hand.
"""

import numpy as np
import pytest

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.decode_scheduler import DecodeCosts, choose_lengths, choose_rows
from serving.core.request import Request, SamplingParams
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence


def make_buckets(*decode: Bucket) -> BucketTable:
    return BucketTable({StepKind.PREFILL: [Bucket(1, 1, 64)], StepKind.DECODE: decode})


def make_table(lengths: list[int], num_blocks: int = 257, num_drafts: int = 0) -> RunningTable:
    """Sequences 0, 1, ... in rows 1, 2, ..., with all tokens but the last computed."""
    table = RunningTable(9, num_blocks, block_size=4, context_blocks_max=64, num_drafts=num_drafts)
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


# --- drafts -------------------------------------------------------------------

WIDE = Bucket(8, 48, 64)


def lengths_of(
    table: RunningTable, *decode: Bucket, step_ms: dict[Bucket, float] | None = None
) -> list[int]:
    buckets = make_buckets(*decode)
    rows = choose_rows(table, buckets)
    return choose_lengths(table, DecodeCosts(buckets, step_ms or {}), rows).tolist()


def test_without_drafts_every_row_has_one_token() -> None:
    assert lengths_of(make_table([5, 9]), WIDE) == [1, 1]


def test_all_drafts_are_verified_while_nothing_was_measured() -> None:
    assert lengths_of(make_table([5, 9], num_drafts=5), WIDE) == [6, 6]


def test_no_draft_stands_where_a_sequence_has_ended() -> None:
    table = make_table([5, 9, 7], num_drafts=5)
    # Ends with its next token, with the one after that, and after three more.
    table.length_limits[1:4] = [6, 11, 10]
    assert lengths_of(table, WIDE) == [1, 2, 3]


def test_drafts_take_free_blocks_and_no_others() -> None:
    # Blocks of four tokens: two rows of 7 tokens hold two blocks each, and one more is left.
    table = make_table([7, 7], num_blocks=6, num_drafts=5)
    assert lengths_of(table, WIDE) == [6, 2]
    assert table.num_blocks[1:3].tolist() == [3, 2]
    assert table.take_preempted() == []


def test_the_largest_bucket_bounds_the_total() -> None:
    table = make_table([5, 9, 7], num_drafts=5)
    table.num_rounds[1:4] = 2
    table.confidences[1:4] = [[0.8] * 5, [0.9] * 5, [0.1] * 5]
    assert lengths_of(table, Bucket(4, 4, 64), Bucket(4, 7, 64), Bucket(2, 40, 64)) == [2, 4, 1]


def test_rows_that_are_not_worth_their_time_are_not_verified() -> None:
    table = make_table([5, 9], num_drafts=5)
    small, large = Bucket(2, 2, 64), Bucket(2, 12, 64)
    buckets = (small, large)
    # Until the host has heard of two rounds, drafts count as certain.
    assert lengths_of(table, *buckets, step_ms={small: 1.0, large: 5.9}) == [6, 6]
    assert lengths_of(table, *buckets, step_ms={small: 1.0, large: 6.1}) == [1, 1]
    table.num_rounds[1:3] = 2
    table.confidences[1:3] = table.confidences_before[1:3] = 0.5
    assert lengths_of(table, *buckets, step_ms={small: 1.0, large: 1.1}) == [6, 6]
    assert lengths_of(table, *buckets, step_ms={small: 1.0, large: 2.1}) == [1, 1]


def test_a_correction_makes_larger_steps_dearer() -> None:
    table = make_table([5, 9], num_drafts=5)
    table.num_rounds[1:3] = 2
    table.confidences[1:3] = table.confidences_before[1:3] = 0.5
    small, large = Bucket(2, 2, 64), Bucket(2, 12, 64)
    buckets = make_buckets(small, large)
    rows = choose_rows(table, buckets)
    costs = DecodeCosts(buckets, {small: 1.0, large: 1.1})
    for slope_ms, expected in ((0.0, [6, 6]), (-1.0, [6, 6]), (1.0, [1, 1])):
        assert choose_lengths(table, costs, rows, slope_ms).tolist() == expected


def test_the_total_comes_from_the_round_before_and_the_shares_from_the_newest() -> None:
    table = make_table([5, 9], num_drafts=5)
    table.num_rounds[1:3] = 2
    table.confidences_before[1:3] = [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    table.confidences[1:3] = [[0.1] * 5, [0.9] * 5]
    sizes = [Bucket(2, size, 64) for size in range(2, 13)]
    step_ms = {bucket: 1.0 + 0.1 * bucket.num_tokens for bucket in sizes}
    assert lengths_of(table, *sizes, step_ms=step_ms) == [1, 4]


def test_a_grammar_cuts_the_drafts_of_its_row() -> None:
    table = make_table([5, 9], num_drafts=5)
    table.num_usable_drafts[1] = 2
    assert lengths_of(table, WIDE) == [3, 6]
    small, large = Bucket(2, 2, 64), Bucket(2, 12, 64)
    assert lengths_of(table, small, large, step_ms={small: 1.0, large: 1.1}) == [3, 6]


@pytest.mark.parametrize("num_usable", [1, 3, 5])
def test_where_a_grammar_cuts_decides_nothing_about_the_drafts_before(num_usable: int) -> None:
    table = make_table([5, 9], num_drafts=5)
    table.num_rounds[1:3] = 2
    table.confidences[1:3] = table.confidences_before[1:3] = [[0.9] * 5, [0.7] * 5]
    sizes = [Bucket(2, size, 64) for size in range(2, 13)]
    step_ms = {bucket: 1.0 + 0.3 * bucket.num_tokens for bucket in sizes}
    uncut = lengths_of(table, *sizes, step_ms=step_ms)
    assert uncut == [6, 2]
    table.num_usable_drafts[1] = num_usable
    cut = lengths_of(table, *sizes, step_ms=step_ms)
    # What is saved goes to the other row; a draft before the cut is verified as it was.
    assert cut[0] == min(uncut[0], 1 + num_usable) and sum(cut) == sum(uncut)


def test_drafts_fit_the_width_of_the_bucket() -> None:
    # A context of two blocks of four tokens, of which row 1 fills all but one token.
    table = make_table([7, 3], num_drafts=5)
    assert lengths_of(table, Bucket(4, 24, 2)) == [2, 6]
