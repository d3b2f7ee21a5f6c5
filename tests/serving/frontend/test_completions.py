"""Goal: prompts of every form become engine requests, and their texts are kept apart.

Method: calls fed with updates by hand.
"""

import json
from typing import Any

import pytest

from serving.core.request import FinishReason
from serving.frontend.completions import CompletionCall
from serving.frontend.conversion import ServedModel
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.protocols import DONE_EVENT
from serving.frontend.text import TextCodec
from serving.transport.driver import SystemClock
from tests.serving.running_service import MODEL_DIR

CODEC = TextCodec.load(MODEL_DIR)
MODEL = ServedModel("tiny", CODEC, vocab_size=320, context_max=64, eos_token_id=1)


def make_call(prompt: object, prompts_max: int = 4, **changes: object) -> CompletionCall:
    body = {"model": "tiny", "prompt": prompt} | changes
    return CompletionCall(json.dumps(body).encode(), MODEL, SystemClock(), prompts_max)


def ids(text: str) -> list[int]:
    return list(CODEC.encode_text(text))


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    parts = data.removesuffix(DONE_EVENT).split(b"\n\n")
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if part]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [tuple(ids("ab"))]),
        (["ab", "c"], [tuple(ids("ab")), tuple(ids("c"))]),
        ([3, 4, 5], [(3, 4, 5)]),
        ([[3], [4, 5]], [(3,), (4, 5)]),
        (["ab", [3]], [tuple(ids("ab")), (3,)]),
    ],
)
def test_forms_of_prompts(prompt: object, expected: list[tuple[int, ...]]) -> None:
    call = make_call(prompt)
    assert [request.prompt_token_ids for request in call.requests] == expected
    assert len({request.request_id for request in call.requests}) == len(expected)


def test_all_prompts_of_a_call_have_its_priority() -> None:
    call = make_call(["ab", "c"], priority=4)
    assert [request.priority for request in call.requests] == [4, 4]


def test_limit_of_tokens() -> None:
    assert make_call([3] * 60).requests[0].sampling.max_tokens == 4, "what the context leaves"
    assert make_call([3]).requests[0].sampling.max_tokens == 16
    assert make_call([3], max_tokens=63).requests[0].sampling.max_tokens == 63
    for max_tokens in (64, 0, -1, 2**31):
        with pytest.raises(ApiError, match="expected 1 to 63") as caught:
            make_call([3], max_tokens=max_tokens)
        assert caught.value.param == "max_tokens"
    with pytest.raises(ApiError) as caught:
        make_call([3] * 64)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_more_prompts_than_allowed() -> None:
    assert len(make_call(["a"] * 4).requests) == 4
    with pytest.raises(ApiError, match="5 prompts; expected at most 4"):
        make_call(["a"] * 5)


def test_whole_answer_keeps_prompts_apart() -> None:
    call = make_call(["a", "bc"], echo=True)
    call.feed(Update(1, ids("two")))
    call.feed(Update(0, ids("one"), FinishReason.LENGTH, 1))
    assert call.is_over(0) and not call.is_over(1)
    call.feed(Update(1, [*ids(" more"), 1], FinishReason.STOP))
    answer = json.loads(call.answer())
    assert [choice["text"] for choice in answer["choices"]] == ["aone", "bctwo more"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert answer["usage"]["completion_tokens"] == len(ids("one") + ids("two") + ids(" more")) + 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert answer["object"] == "text_completion"


def test_streamed_chunks_have_no_empty_text_but_the_last() -> None:
    call = make_call("a", stream=True, stream_options={"include_usage": True})
    half = ids("😀")
    assert len(half) > 1
    assert call.opening() == b""
    assert call.feed(Update(0, half[:1])) == b"", "half a character is nothing to show"
    (chunk,) = chunks_of(call.feed(Update(0, half[1:])))
    assert chunk["choices"][0]["text"] == "😀" and chunk["usage"] is None
    (last,) = chunks_of(call.feed(Update(0, [1], FinishReason.STOP)))
    assert last["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }
    (usage,) = chunks_of(call.closing())
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(half) + 1


def test_stop_string_cuts_the_text() -> None:
    call = make_call("a", stop="lo w")
    call.feed(Update(0, ids("hello world")))
    assert call.is_over(0)
    assert call.feed(Update(0, [40], FinishReason.LENGTH)) == b""
    choice = json.loads(call.answer())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hel", "stop")


def test_without_usage_option_chunks_carry_none() -> None:
    call = make_call("a", stream=True)
    (chunk,) = chunks_of(call.feed(Update(0, ids("x"), FinishReason.LENGTH)))
    assert "usage" not in chunk and call.closing() == DONE_EVENT


def test_every_chunk_carries_the_usage_so_far_if_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = make_call("a", stream=True, stream_options=options)
    data = call.feed(Update(0, ids("x"))) + call.feed(Update(0, ids("y"), FinishReason.LENGTH))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(data + call.closing())]
    assert counts == [1, 2, 2]
