"""Goal: a sequence knows its tokens across prompt and output, and refuses illegal status changes.

Method: every slice of a short sequence against a list; every pair of statuses against a table.
"""

import itertools

import numpy as np
import pytest

from serving.core.request import FinishReason, Request, SamplingParams, TokenDelta
from serving.core.sequence import Sequence, SequenceStatus

WAITING, PREFILLING, DECODING, FINISHED = SequenceStatus


def make_sequence() -> Sequence:
    request = Request("a", (4, 5, 6), SamplingParams())
    return Sequence(0, request, np.array([4, 5, 6], np.int32), 1, (), 10)


def test_every_slice_of_tokens() -> None:
    sequence = make_sequence()
    sequence.output_token_ids.extend([7])
    sequence.news.append((8,))
    tokens = [4, 5, 6, 7, 8]
    assert sequence.num_tokens == 5
    for start, stop in itertools.combinations_with_replacement(range(6), 2):
        found = sequence.tokens(start, stop)
        assert found.tolist() == tokens[start:stop]
        assert found.dtype == np.int32
    with pytest.raises(AssertionError, match="4:6 of 5"):
        sequence.tokens(4, 6)


@pytest.mark.parametrize("before", SequenceStatus)
@pytest.mark.parametrize("after", SequenceStatus)
def test_status_changes(before: SequenceStatus, after: SequenceStatus) -> None:
    legal = {
        (WAITING, PREFILLING),
        (PREFILLING, DECODING),
        (PREFILLING, WAITING),
        (DECODING, WAITING),
        (WAITING, FINISHED),
        (PREFILLING, FINISHED),
        (DECODING, FINISHED),
    }
    sequence = make_sequence()
    sequence.status = before
    if (before, after) in legal:
        sequence.move_to(after)
        assert sequence.status is after
    else:
        with pytest.raises(AssertionError, match=f"from {before.value} to {after.value}"):
            sequence.move_to(after)


def test_a_delta_names_the_request_and_its_prompt_length() -> None:
    delta = make_sequence().delta((9,), FinishReason.STOP)
    assert delta == TokenDelta("a", (9,), FinishReason.STOP, num_prompt_tokens=3)
