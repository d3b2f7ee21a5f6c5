"""Goal: sampling settings outside their range are refused, naming the field.

Method: each limit with the last value inside and the first outside.
"""

import math

import pytest

from serving.core.request import (
    LOGIT_BIASES_MAX,
    SEED_MAX,
    STOP_TOKEN_IDS_MAX,
    TOP_LOGPROBS_MAX,
    FinishReason,
    QueueFullError,
    RequestError,
    SamplingParams,
    TokenDelta,
)


@pytest.mark.parametrize(
    ("param", "good", "bad"),
    [
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31]),
        ("temperature", [0.0, 2.0], [-0.1, 2.1, math.nan, math.inf]),
        ("top_k", [0, 10**6, 2**31 - 1], [-1, 2**31]),
        ("top_p", [1e-6, 1.0], [0.0, 1.01, math.nan]),
        ("seed", [0, SEED_MAX, None], [-1, SEED_MAX + 1]),
        (
            "stop_token_ids",
            [(), (1,) * STOP_TOKEN_IDS_MAX, (0, 2**31 - 1)],
            [(1,) * (STOP_TOKEN_IDS_MAX + 1), (-1,), (2**31,)],
        ),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.01, 2.0], [0.0, 1e-320, 1e-30, 2.1, math.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("logprobs", [None, 0, TOP_LOGPROBS_MAX], [-1, TOP_LOGPROBS_MAX + 1]),
        ("prompt_logprobs", [None, 0, TOP_LOGPROBS_MAX], [-1, TOP_LOGPROBS_MAX + 1]),
        (
            "logit_bias",
            [(), ((1, -100.0), (2, 100.0)), tuple((t, 1.0) for t in range(LOGIT_BIASES_MAX))],
            [
                ((1, 100.5),),
                ((1, math.nan),),
                ((1, 1.0), (1, 2.0)),
                tuple((t, 1.0) for t in range(LOGIT_BIASES_MAX + 1)),
            ],
        ),
    ],
)
def test_ranges(param: str, good: list, bad: list) -> None:
    for value in good:
        assert getattr(SamplingParams(**{param: value}), param) == value
    for value in bad:
        with pytest.raises(RequestError, match="expected") as caught:
            SamplingParams(**{param: value})
        assert caught.value.param == param


def test_a_full_queue_says_how_full() -> None:
    error = QueueFullError(num_waiting=7, waiting_max=5)
    assert "7 requests wait" in str(error)
    assert "limit is 5" in str(error)


def test_deltas_are_values() -> None:
    delta = TokenDelta("a", (1, 2), FinishReason.STOP, 3, 1)
    assert delta == TokenDelta("a", (1, 2), FinishReason.STOP, 3, 1)
    assert delta != TokenDelta("a", (1, 2), FinishReason.LENGTH, 3, 1)
    with pytest.raises(AttributeError):
        delta.token_ids = ()  # pyright: ignore[reportAttributeAccessIssue]
