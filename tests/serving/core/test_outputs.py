"""Goal: sequences grow by what they sampled up to their ends, and clients hear exactly that.

Method: a table with a few decoding sequences, results by hand, and random results against a walk
over each row.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.core.outputs import add_tokens
from serving.core.request import FinishReason, Request, SamplingParams, TokenDelta
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence


def make_table(*sequences: tuple[int, tuple[int, ...]]) -> RunningTable:
    """Sequences of two prompt tokens with (length limit, stop tokens), in rows 1, 2, ..."""
    table = RunningTable(len(sequences) + 1, 65, block_size=4, context_blocks_max=16)
    for number, (length_limit, stops) in enumerate(sequences):
        request = Request(f"r{number}", (1, 2), SamplingParams())
        table.enter(Sequence(number, request, np.ones(2, np.int32), 0, stops, length_limit))
    return table


def add(
    table: RunningTable, rows: list[int], *tokens: list[int]
) -> tuple[list[TokenDelta], list[int]]:
    width = max(map(len, tokens))
    padded = np.array([[*some, *[-1] * (width - len(some))] for some in tokens], np.int32)
    kept = np.array([len(some) for some in tokens])
    return add_tokens(table, np.array(rows), padded, kept)


def test_every_row_gets_its_tokens() -> None:
    table = make_table((99, ()), (99, (7,)), (99, ()))
    table.num_cached_tokens[3] = 1
    deltas, over = add(table, [1, 3], [5, 6], [4])
    assert deltas == [TokenDelta("r0", (5, 6), None, 2, 0), TokenDelta("r2", (4,), None, 2, 1)]
    assert over == []
    assert table.num_tokens[1:].tolist() == [4, 2, 3]
    assert table.last_tokens[[1, 3]].tolist() == [6, 4]
    deltas, _ = add(table, [3], [9])
    assert table.sequences[3] is not None and table.sequences[3].output_token_ids == [4, 9]


def test_ends_by_token_and_by_length() -> None:
    table = make_table((4, ()), (99, (7, 3)), (3, (5,)), (99, (8,)))
    deltas, over = add(table, [1, 2, 3, 4], [5, 6], [1, 3, 7], [5], [7, 3])
    assert [delta.token_ids for delta in deltas] == [(5, 6), (1, 3), (5,), (7, 3)]
    assert [delta.finish_reason for delta in deltas] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        # The token that is the last one allowed is a stop token too.
        FinishReason.STOP,
        None,
    ]
    assert over == [1, 2, 3]
    assert table.num_tokens[2] == 4 and table.last_tokens[2] == 3


def test_no_rows() -> None:
    empty = np.zeros((0, 6), np.int32)
    assert add_tokens(make_table((9, ())), np.zeros(0, int), empty, np.zeros(0, int)) == ([], [])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=6),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_result_equals_a_walk_over_its_rows(rows: list[tuple[list[int], list[int]]]) -> None:
    table = make_table(*((99, tuple(stops)) for _, stops in rows))
    deltas, over = add(table, list(range(1, len(rows) + 1)), *(tokens for tokens, _ in rows))
    for row, (delta, (tokens, stops)) in enumerate(zip(deltas, rows, strict=True), 1):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        assert delta.token_ids == tuple(tokens[:end])
        assert (row in over) == (end is not None) == (delta.finish_reason is FinishReason.STOP)
