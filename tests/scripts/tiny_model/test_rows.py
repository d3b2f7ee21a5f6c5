"""Rows are packed conversations, made the same way wherever they are made.

Goal: resuming reads the row it would have read; conversations do not see each other.
Method: rows are made twice and compared; alignment, positions, classes and marks are checked
against the conversations in them.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from deepinfer_jax.engram_tables import EngramTables
from scripts.tiny_model.network import SEGMENT_ALIGNMENT
from scripts.tiny_model.rows import NUM_SPECIAL, RowSource
from scripts.tiny_model.tasks import FIRST_DRILLS
from tests.scripts.tiny_model import small_case, tokenised


def source(length: int, long_share: float = 0.0) -> RowSource:
    return RowSource(tokenised.codec(), small_case.tables(), length, 3, 8, 12, long_share, 0.5)


@pytest.mark.parametrize(("length", "long_share"), [(128, 0.0), (576, 1.0)])
def test_conversations_are_aligned_and_alone(length: int, long_share: float) -> None:
    tables: EngramTables = small_case.tables()
    for number in range(6):
        row = source(length, long_share).row(number)
        assert (row.segment > 0).mean() > 0.5
        for segment in range(1, row.segment.max() + 1):
            places = np.flatnonzero(row.segment == segment)
            assert places[0] % SEGMENT_ALIGNMENT == 0
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            assert np.array_equal(row.position[places], np.arange(len(places)))
            assert row.token_ids[places[0]] == 0
            # The first token has only padding before it, whatever lies before in the row.
            first = np.array([tables.token_classes[0], *[tables.pad_class] * 3])
            assert np.array_equal(row.engram_rows[places[0]], tables.rows(first))
        assert row.said[row.segment == 0].sum() == 0
        assert 0 < row.said.mean() < 0.85


def test_only_what_follows_a_known_token_counts_in_ngrams() -> None:
    row = dataclasses.replace(source(128), drills=FIRST_DRILLS, drill_share=1.0).row(0)
    ids = row.token_ids
    assert ids.min() >= NUM_SPECIAL
    known = {(int(a), int(b)) for a, b in itertools.pairwise(ids[: int(np.argmax(row.said))])}
    said = np.flatnonzero(row.said)
    assert len(said) > 20
    for place in said:
        known |= {(int(a), int(b)) for a, b in itertools.pairwise(ids[:place])}
        assert (int(ids[place - 1]), int(ids[place])) in known


def test_words_that_were_looked_up_weigh_more() -> None:
    plain = dataclasses.replace(source(128), drills={"recall": 1}, drill_share=1.0)
    heavy = dataclasses.replace(plain, found_weight=6.0)
    found = np.isin(plain.row(1).token_ids, plain.codec.properties)
    assert np.array_equal(
        heavy.row(1).said, plain.row(1).said * np.where(found, np.float32(6), np.float32(1))
    )
    assert 0 < (heavy.row(1).said == 6).mean() < 0.2


def test_a_row_depends_on_its_number_alone() -> None:
    one, other = source(128), source(128)
    assert all(np.array_equal(a, b) for a, b in zip(one.row(5), other.row(5), strict=True))
    assert not np.array_equal(one.row(5).token_ids, one.row(6).token_ids)


def test_batches_go_on_where_they_stopped() -> None:
    whole = list(itertools.islice(source(128).batches(2, 0), 3))
    rest = next(source(128).batches(2, 2))
    assert whole[2].token_ids.shape == (2, 128)
    assert np.array_equal(whole[2].token_ids, rest.token_ids)
