"""Goal: an output ends where its text does, however many tokens a step brought.

Method: deltas by hand.
"""

from serving.core.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob
from serving.offline_outputs import Collected
from tests.serving.test_offline import CODEC, LETTERS


def test_tokens_of_a_step_behind_a_stop_are_left_out() -> None:
    request = Request("a", (3,), SamplingParams(max_tokens=9, logprobs=0))
    collected = Collected(request, CODEC, 1, ("bc",))
    entries = tuple(TokenLogprob(-1.0 - n, ()) for n in range(4))
    collected.add(TokenDelta("a", (LETTERS[0],), None, 1, 0, entries[:1]))
    assert not collected.is_over
    last = TokenDelta("a", tuple(LETTERS[1:4]), FinishReason.LENGTH, 1, 0, entries[1:])
    collected.add(last)
    output = collected.output()
    assert (output.text, output.finish_reason) == ("a", "stop")
    assert output.token_ids == LETTERS[:3]
    assert output.logprobs == list(entries[:3])


def test_an_end_that_comes_with_the_stop_does_not_count() -> None:
    """A grammar of tools may fail in tokens that nobody gets."""
    collected = Collected(Request("a", (3,), SamplingParams()), CODEC, 1, ("b",))
    tokens = tuple(LETTERS[:4])
    collected.add(TokenDelta("a", tokens, FinishReason.ERROR, 1, 0, error="it failed"))
    output = collected.output()
    assert (output.text, output.token_ids) == ("a", LETTERS[:2])
    assert (output.finish_reason, output.error) == ("stop", None)
