"""Goal: a sequence's controls say what the next token may be and what the device must be told,
from nothing but the tokens that are known.

Method: one control at a time, with grammars over the small vocabulary; counts of tokens are kept
in a mirror of the device and compared with counting the text anew after each change.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.controls import (
    COUNT_MAX,
    IN_PROMPT,
    LogprobColumns,
    SequenceControls,
    controls_of,
)
from serving.core.grammar import DSML, mask_words
from serving.core.request import (
    ConstraintKind,
    OutputConstraint,
    Request,
    RequestImage,
    SamplingParams,
    TokenLogprob,
)
from tests.serving.core.vocabularies import SMALL, SMALL_VOCAB, ids_of, large

WORDS = mask_words(SMALL_VOCAB)


def request_of(
    sampling: SamplingParams,
    prompt: tuple[int, ...] = (5, 6, 5),
    constraint: OutputConstraint | None = None,
    images: tuple[RequestImage, ...] = (),
) -> Request:
    return Request("r", prompt, sampling, constraint=constraint, images=images)


def controls_with(sampling: SamplingParams, **changes: object) -> SequenceControls:
    controls = controls_of(request_of(sampling, **changes), None)  # type: ignore[arg-type]
    assert controls is not None
    return controls


def constrained(
    pattern: str, *, after_thinking: bool = False, temperature: float = 1.0
) -> SequenceControls:
    constraint = OutputConstraint(ConstraintKind.REGEX, pattern, after_thinking)
    request = request_of(SamplingParams(temperature=temperature), constraint=constraint)
    controls = controls_of(request, SMALL.compile(constraint))
    assert controls is not None
    return controls


@pytest.mark.parametrize(
    ("sampling", "adjusts"),
    [
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(logit_bias=((3, 1.0),)), True),
        (SamplingParams(logprobs=0), False),
        (SamplingParams(prompt_logprobs=0), False),
    ],
)
def test_what_needs_controls(sampling: SamplingParams, adjusts: bool) -> None:
    assert controls_with(sampling).adjusts is adjusts


def test_most_requests_have_no_controls() -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, seed=1, stop_token_ids=(3,))
    assert controls_of(request_of(plain), None) is None
    with pytest.raises(AssertionError, match="needs its grammar"):
        controls_of(request_of(plain, constraint=OutputConstraint(ConstraintKind.JSON, "")), None)


def test_a_grammar_adjusts_unless_anything_may_come_next() -> None:
    assert constrained("ab").adjusts
    # The answer may not end in its thinking.
    assert constrained("ab", after_thinking=True).adjusts
    tools = OutputConstraint(ConstraintKind.TOOL_CALL, '[{"function": {"name": "f"}}]')
    grammar = large().compile(tools)
    free = SequenceControls(request_of(SamplingParams(), constraint=tools), grammar.start())
    assert not free.adjusts
    free.advance([large()._added[DSML]])
    assert free.adjusts


def test_masks_and_drafts_follow_the_grammar() -> None:
    controls = constrained("ab|ac")
    a, b, c = (ids_of(SMALL, letter)[0] for letter in "abc")
    assert controls.take_drafts([a, b, b]) == 3 and controls.drafts == [a, b]
    masks = np.zeros((2, WORDS), np.int32)
    controls.fill_masks(1, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[a], [b, c]]
    masks = np.zeros((4, WORDS), np.int32)
    controls.fill_masks(3, masks)
    # After the whole text only its end may come, and what follows an illegal draft is not kept.
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert bits[2].sum() == 1 and (masks[3] == -1).all()
    controls.advance([a, c])
    assert controls.failure is None and controls.take_drafts([b]) == 1 and controls.drafts == []


@pytest.mark.parametrize(("temperature", "num_usable"), [(0.0, [2, 1, 0, 0]), (0.7, [2, 2, 1, 0])])
def test_the_first_illegal_draft_is_verified_where_tokens_are_drawn(
    temperature: float, num_usable: list[int]
) -> None:
    controls = constrained("ab|ac", temperature=temperature)
    a, b, c = (ids_of(SMALL, letter)[0] for letter in "abc")
    found = [controls.take_drafts(drafts) for drafts in ([a, b], [a, a], [c, a, b], [])]
    assert found == num_usable
    controls.advance([c])
    assert controls.failure is not None and controls.take_drafts([a]) == 0


def test_without_a_grammar_everything_is_legal() -> None:
    controls = controls_with(SamplingParams(logprobs=1))
    masks = np.zeros((3, WORDS), np.int32)
    controls.fill_masks(2, masks)
    assert (masks == -1).all()
    controls.advance([7])
    assert controls.failure is None


def test_a_failure_is_remembered_and_not_raised() -> None:
    controls = constrained("ab")
    controls.advance(ids_of(SMALL, "b"))
    assert controls.failure is not None and "grammar" in controls.failure
    masks = np.zeros((1, WORDS), np.int32)
    controls.fill_masks(0, masks)
    assert (masks == -1).all(), "a failed grammar must still leave something to sample"
    complex_one = constrained("((a{1,100}){1,100}){1,100}")
    for _ in range(50):
        complex_one.advance(ids_of(SMALL, "a"))
        complex_one.fill_masks(0, masks)
    assert complex_one.failure is not None and "complex" in complex_one.failure
    assert (masks == -1).all()


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 3)), max_size=8))
def test_counts_on_the_device_equal_counting_anew(turns: list[tuple[list[int], int]]) -> None:
    controls = controls_with(SamplingParams(presence_penalty=1.0))
    slots = np.full((4, 10), 99)  # What other sequences left there.
    output: list[int] = []
    for tokens, slot in turns:
        output += tokens
        clears, edits = controls.count_edits((slot, 0), output)
        if clears:
            slots[slot] = 0
        for token, value in edits.items():
            slots[slot, token] = value
        expected = np.bincount(output, minlength=10)
        expected[[5, 6]] += IN_PROMPT
        assert slots[slot].tolist() == expected.tolist()


def test_only_changes_are_sent_and_a_new_stay_sends_all() -> None:
    controls = controls_with(SamplingParams(presence_penalty=1.0))
    assert controls.count_edits((3, 0), [8]) == (True, {5: IN_PROMPT, 6: IN_PROMPT, 8: 1})
    assert controls.count_edits((3, 0), [8, 5, 5]) == (False, {5: IN_PROMPT + 2})
    assert controls.count_edits((3, 0), [8, 5, 5]) == (False, {})
    # Preempted and back in the same slot, which others had meanwhile.
    everything = {5: IN_PROMPT + 2, 6: IN_PROMPT, 8: 1}
    assert controls.count_edits((3, 1), [8, 5, 5]) == (True, everything)


def test_counts_stay_below_the_bit_of_the_prompt() -> None:
    controls = controls_with(SamplingParams(presence_penalty=1.0))
    output = [5] * (COUNT_MAX + 7) + [8] * (COUNT_MAX + 7)
    assert controls.count_edits((1, 0), output)[1] == {
        5: IN_PROMPT + COUNT_MAX,
        6: IN_PROMPT,
        8: COUNT_MAX,
    }


def columns(first: int, count: int, num_top: int = 3) -> LogprobColumns:
    """Column i says -(first + i), and that tokens 100 i, 100 i + 1, ... are the likeliest."""
    at = np.arange(first, first + count)
    top = -at[:, None] / 10 - np.arange(num_top)
    return LogprobColumns(
        -at.astype(np.float32), 100 * at[:, None] + np.arange(num_top), top.astype(np.float32)
    )


def test_an_entry_has_as_many_top_tokens_as_were_asked_for() -> None:
    found = columns(20, 2)
    assert found.entry(1, 0) == TokenLogprob(-21.0, ())
    entry = found.entry(1, 2)
    assert [token for token, _ in entry.top] == [2100, 2101]
    assert [value for _, value in entry.top] == pytest.approx([-2.1, -3.1])


def test_prompt_logprobs_in_chunks() -> None:
    prompt = tuple(range(10, 18))
    image = RequestImage(5, 2, 1, 1, b"", np.zeros((1, 3), np.uint8))
    controls = controls_with(SamplingParams(prompt_logprobs=1), prompt=prompt, images=(image,))
    assert controls.next_prompt_token(3) == 13
    # The chunk of tokens 0 to 2 stands at 4 of its step: column i is about position i - 4 + 1.
    controls.add_prompt_logprobs(columns(0, 9), 4, 0, 3)
    assert controls.prompt_logprobs[0] is None
    assert [e and e.logprob for e in controls.prompt_logprobs[1:]] == [-4.0, -5.0, -6.0]
    assert controls.next_prompt_token(8) == 0
    controls.add_prompt_logprobs(columns(0, 9), 0, 3, 5)
    assert [e and e.logprob for e in controls.prompt_logprobs[4:]] == [-0.0, None, None, -3.0]
    assert len(controls.prompt_logprobs) == len(prompt)
    # After a preemption the prompt is computed again, but was reported already.
    assert controls.next_prompt_token(3) == -1
    controls.add_prompt_logprobs(columns(50, 9), 0, 0, 8)
    assert len(controls.prompt_logprobs) == len(prompt)


def test_who_wants_no_prompt_logprobs_gets_none() -> None:
    controls = controls_with(SamplingParams(logprobs=2))
    assert controls.next_prompt_token(1) == -1
    controls.add_prompt_logprobs(columns(0, 3), 0, 0, 3)
    assert controls.prompt_logprobs == [None]
