"""Goal: requests and limits that can never work are refused, and those at the edge are not.

Method: values just inside and just outside of each limit. The engine's own tests go through the
same refusals from outside.
"""

from dataclasses import replace

import pytest

from serving.core.admission import EngineLimits, check_limits, check_request, length_max
from serving.core.request import (
    ConstraintKind,
    OutputConstraint,
    Request,
    RequestError,
    SamplingParams,
)
from tests.serving.engine.checked_engine import (
    BUCKETS,
    make_limits,
)
from tests.serving.engine.simulated_device import make_image

LIMITS = make_limits(num_blocks=11)


def request_of(length: int, **changes: object) -> Request:
    return Request("a", (1,) * length, SamplingParams(), **changes)  # type: ignore[arg-type]


def test_a_sequence_ends_where_context_or_pool_end() -> None:
    assert length_max(LIMITS) == 40
    assert length_max(make_limits(num_blocks=100)) == 64


def test_the_longest_prompt_leaves_room_for_a_token() -> None:
    check_request(request_of(39), LIMITS, BUCKETS)
    with pytest.raises(RequestError, match="40 tokens; expected at most 39"):
        check_request(request_of(40), LIMITS, BUCKETS)
    check_request(request_of(63), make_limits(num_blocks=100), BUCKETS)
    with pytest.raises(RequestError, match="64 tokens; expected at most 63"):
        check_request(request_of(64), make_limits(num_blocks=100), BUCKETS)


def test_an_image_must_fit_one_step() -> None:
    check_request(request_of(20, images=(make_image(2, 16),)), LIMITS, BUCKETS)
    with pytest.raises(RequestError, match="image 1 has 17 tokens; expected at most 16"):
        check_request(request_of(20, images=(make_image(2, 17),)), LIMITS, BUCKETS)


@pytest.mark.parametrize("kind", list(ConstraintKind))
def test_no_token_but_the_end_may_stop_a_constrained_text(kind: ConstraintKind) -> None:
    constraint = OutputConstraint(kind, "", param="field")
    limits = replace(LIMITS, eos_token_id=1)
    for stops in ((), (1,)):
        sampling = SamplingParams(stop_token_ids=stops)
        check_request(Request("a", (1,), sampling, constraint=constraint), limits, BUCKETS)
    sampling = SamplingParams(stop_token_ids=(1, 3))
    with pytest.raises(RequestError, match="stop_token_ids together with field"):
        check_request(Request("a", (1,), sampling, constraint=constraint), limits, BUCKETS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; expected at least 1"),
        ({"block_size": 0}, "block_size is 0; expected at least 1"),
        ({"num_snapshots": -1}, "num_snapshots is -1; expected 0 or more"),
    ],
)
def test_limits_out_of_range(changes: dict[str, int], words: str) -> None:
    check_limits(LIMITS, BUCKETS)
    limits: EngineLimits = replace(LIMITS, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        check_limits(limits, BUCKETS)
