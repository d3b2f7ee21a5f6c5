"""Goal: images are computed whole, exactly once per prefill, and stop nobody for ever.

Method: a device on which an image counts like large tokens, so that a cut, shifted or missing one
gives wrong tokens; chunks written out by hand; random requests under shortage of memory.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.buckets import StepKind
from serving.core.request import RequestError, RequestImage, SamplingParams
from serving.core.step_plan import StepPlan
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_buckets,
    make_limits,
)
from tests.serving.engine.simulated_device import (
    VOCAB_SIZE,
    make_image,
)

_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def _prefills(engine: CheckedEngine, num_steps: int = 50) -> list[StepPlan]:
    """Runs to the end; the prefill steps on the way."""
    plans = []
    for _ in range(num_steps):
        plan = engine.plan()
        if plan is not None and plan.kind is StepKind.PREFILL:
            plans.append(plan)
        engine.commit()
    engine.drain()
    return plans


def _spans(plan: StepPlan) -> list[tuple[int, int]]:
    return [(place.token_index, place.image.num_tokens) for place in plan.images]


def test_a_chunk_ends_before_an_image_that_it_would_cut() -> None:
    engine = CheckedEngine(make_limits(), BUCKETS)
    engine.admit([1] * 40, _ONE, (make_image(3, 4), make_image(10, 14, 1)))
    plans = _prefills(engine)
    # Steps of 16: text, image and text to position 10; the image of 14 and 2; the last 14.
    assert [plan.num_tokens.tolist() for plan in plans] == [[10], [16], [14]]
    assert [_spans(plan) for plan in plans] == [[(3, 4)], [(0, 14)], []]


def test_images_of_rows_that_share_a_step_stand_at_their_places() -> None:
    engine = CheckedEngine(make_limits(), BUCKETS)
    engine.admit([1] * 7, _ONE, (make_image(1, 4),))
    engine.admit([2] * 8, _ONE, (make_image(4, 4, 1),))
    plans = _prefills(engine)
    assert [_spans(plan) for plan in plans] == [[(1, 4), (11, 4)]]


def test_an_image_larger_than_half_a_step_is_not_starved() -> None:
    engine = CheckedEngine(make_limits(num_slots=9), BUCKETS)
    engine.admit([1] * 20, _ONE, (make_image(2, 15),))
    for _ in range(6):
        engine.admit([2] * 9, _ONE)
    num_before = [index for index, plan in enumerate(_prefills(engine)) if plan.images]
    assert num_before == [1], "the image was computed in the step after the text before it"


def test_an_image_that_waits_for_blocks_is_computed_when_they_come() -> None:
    # 8 blocks of 4: the first one holds 5 of them until it ends.
    engine = CheckedEngine(make_limits(num_blocks=9), BUCKETS)
    engine.admit([1] * 16, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    engine.admit([2] * 18, _ONE, (make_image(1, 16),))
    plans = _prefills(engine)
    assert [_spans(plan) for plan in plans if plan.images] == [[(0, 16)]]


def test_a_preempted_image_is_computed_again() -> None:
    engine = CheckedEngine(make_limits(num_blocks=9), BUCKETS)
    long = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    engine.admit([1] * 8, long)
    engine.admit([2] * 8, long, (make_image(2, 5),))
    plans = _prefills(engine)
    assert engine.engine.status().num_preemptions > 0
    assert sum(len(plan.images) for plan in plans) == 2


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ((make_image(1, 17),), "image 1 has 17 tokens; expected at most 16"),
        ((make_image(30, 4),), "image 1 covers tokens 30 to 33; expected tokens from 0 to 31"),
        ((make_image(-1, 4),), "image 1 covers tokens -1 to 2"),
        ((make_image(2, 0),), "image 1 covers tokens 2 to 1"),
        ((make_image(2, 4), make_image(5, 4)), "image 2 covers tokens 5 to 8; .* from 6 to 31"),
    ],
)
def test_images_that_cannot_be_computed_are_refused(
    images: tuple[RequestImage, ...], expected: str
) -> None:
    engine = CheckedEngine(make_limits(), BUCKETS)
    with pytest.raises(RequestError, match=expected) as caught:
        engine.admit([1] * 32, _ONE, images)
    assert caught.value.param == "images"
    engine.admit([1] * 32, _ONE, (make_image(0, 16), make_image(16, 16)))
    engine.drain()


def test_the_bucket_of_an_image_must_reach_to_its_end() -> None:
    buckets = make_buckets(prefill=[(2, 16, 8), (2, 8, 16)], decode=[(1, 1, 16)])
    engine = CheckedEngine(make_limits(), buckets)
    engine.admit([1] * 40, _ONE, (make_image(20, 12), make_image(32, 8)))
    engine.drain()
    with pytest.raises(RequestError, match="image 1 has 12 tokens"):
        engine.admit([1] * 40, _ONE, (make_image(21, 12),))


@st.composite
def _requests(draw: st.DrawFn) -> tuple[int, int, tuple[RequestImage, ...]]:
    """Length of a prompt, tokens to generate, and images in the prompt."""
    images: list[RequestImage] = []
    length = draw(st.integers(0, 5))
    for name in range(draw(st.integers(0, 3))):
        images.append(make_image(length, draw(st.integers(1, 16)), draw(st.integers(0, 3)) + name))
        length = images[-1].stop + draw(st.integers(0, 5))
    return max(length, 1), draw(st.integers(1, 12)), tuple(images)


@given(
    st.lists(_requests(), min_size=1, max_size=6),
    st.sampled_from([17, 24, 65]),
    st.sampled_from([1, 2]),
    st.sampled_from(
        [
            BUCKETS,
            make_buckets([(1, 16, 16)], [(2, 2, 16)]),
            make_buckets([(2, 4, 16), (3, 24, 16)], [(4, 4, 16)]),
        ]
    ),
    st.data(),
)
def test_random_images_give_the_right_tokens(
    requests: list[tuple[int, int, tuple[RequestImage, ...]]],
    num_blocks: int,
    in_flight_max: int,
    buckets: object,
    data: st.DataObject,
) -> None:
    limits = make_limits(num_blocks=num_blocks, num_slots=4, in_flight_max=in_flight_max)
    engine = CheckedEngine(limits, buckets)  # type: ignore[arg-type]
    for number, (length, num_output, images) in enumerate(requests):
        sampling = SamplingParams(max_tokens=num_output, temperature=0)
        engine.admit([(number + i) % VOCAB_SIZE for i in range(length)], sampling, images)
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    engine.drain()
