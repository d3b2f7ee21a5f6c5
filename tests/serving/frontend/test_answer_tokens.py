"""Goal: what is counted of an answer is what was delivered, in every dialect, however many tokens
come in one update, as they do with drafts; and thinking is counted token by token.

Method: calls fed by hand with several tokens at once, around a stop string.
"""

import json
from typing import Any

import pytest

from serving.core.request import FinishReason, SamplingParams
from serving.frontend.answer_tokens import AnswerTokens, visible_tokens
from serving.frontend.completions import CompletionCall
from serving.frontend.gateway import Update
from serving.frontend.message_calls import MessagesCall
from serving.frontend.protocols import ChatCall
from serving.frontend.responses import ResponsesCall
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import HELLO, LETTERS, THINK_END
from tests.serving.frontend.test_protocols import CODEC, MODEL

Call = ChatCall | MessagesCall | CompletionCall | ResponsesCall


def make_call(dialect: str, **changes: object) -> Call:
    body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 60} | changes
    clock = SystemClock()
    if dialect == "completions":
        return CompletionCall(json.dumps({"prompt": "x"} | body).encode(), MODEL, clock, 9)
    if dialect == "responses":
        return ResponsesCall(json.dumps({"input": "Hello"} | body).encode(), MODEL, clock)
    make = ChatCall if dialect == "chat" else MessagesCall
    return make(json.dumps({"messages": HELLO} | body).encode(), MODEL, clock)


def test_visible_tokens_leave_out_only_what_stopped_the_sequence() -> None:
    plain, ignoring = SamplingParams(), SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    stopped = Update(0, [5, 1], FinishReason.STOP)
    assert visible_tokens(stopped, plain, 1) == [5]
    assert visible_tokens(stopped, ignoring, 1) == [5, 1]
    assert visible_tokens(Update(0, [5, 7], FinishReason.STOP), ignoring, 1) == [5]
    assert visible_tokens(Update(0, [5, 1], FinishReason.LENGTH), plain, 1) == [5, 1]
    assert visible_tokens(Update(0, [5]), plain, 1) == [5]
    assert visible_tokens(Update(0, [], FinishReason.STOP), plain, 1) == []


def test_pieces() -> None:
    whole = AnswerTokens(SamplingParams(), 1)
    assert [piece for piece, _ in whole.pieces(Update(0, [5, 6, 1], FinishReason.STOP))] == [[5, 6]]
    assert whole.num_generated == 3, "what ended the answer was delivered as its end"
    single = AnswerTokens(SamplingParams(), 1, has_stops=True)
    taken = []
    for piece, _ in single.pieces(Update(0, [5, 6, 7, 1], FinishReason.STOP, 2)):
        taken += piece
        if 6 in piece:
            break
    assert (taken, single.num_generated, single.num_cached) == ([5, 6], 2, 2)
    assert list(single.pieces(Update(0, [], FinishReason.LENGTH))) == []


@pytest.mark.parametrize("dialect", ["chat", "completions", "messages"])
@pytest.mark.parametrize("size", [1, 6, 8])
def test_tokens_behind_a_stop_string_are_not_counted(dialect: str, size: int) -> None:
    name = "stop_sequences" if dialect == "messages" else "stop"
    call = make_call(dialect, thinking={"type": "disabled"}, **{name: ["de"]})
    call.opening()
    data = b""
    for start in range(0, 8, size):
        reason = FinishReason.LENGTH if start + size >= 8 else None
        data += call.feed(Update(0, LETTERS[start : min(start + size, 8)], reason))
    assert call.is_over(0)
    assert call.num_generated_tokens() == 5, "abc and the two of the stop string"
    data += call.closing()
    assert b"f" not in b"".join(_texts(data)) and b"c" in b"".join(_texts(data))
    counted = b'"output_tokens":5' if dialect == "messages" else b'"completion_tokens":5'
    assert counted in data or dialect == "completions"


def _texts(data: bytes) -> list[bytes]:
    events = [json.loads(part.split(b"data: ")[1]) for part in data.split(b"\n\n") if b"{" in part]
    found = []
    for event in events:
        for choice in event.get("choices", ()):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        if event.get("type") == "content_block_delta":
            found.append(event["delta"]["text"])
    return [text.encode() for text in found]


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("size", [1, 3, 20])
def test_thinking_is_counted_token_by_token(dialect: str, size: int) -> None:
    # Two tokens of the text are halves of one character, where the parser loses count.
    ids = [*LETTERS[:3], *CODEC.encode_text("é"), THINK_END, *LETTERS[:4]]
    num_thought = ids.index(THINK_END)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 50}}
    if dialect == "responses":
        thinking = {"reasoning": {"effort": "high"}}
    call = make_call(dialect, **thinking)
    call.opening()
    for start in range(0, len(ids), size):
        call.feed(Update(0, ids[start : start + size]))
        num_fed = min(start + size, len(ids))
        assert call.num_generated_tokens() == num_fed
        assert call.num_reasoning_tokens() == min(num_fed, num_thought), "known before the end"
    data = call.feed(Update(0, [1], FinishReason.STOP)) + call.closing()
    assert call.num_reasoning_tokens() == num_thought
    if dialect != "messages":
        assert f'"reasoning_tokens":{num_thought}'.encode() in data


def test_text_without_thinking_has_none() -> None:
    call = make_call("chat", thinking={"type": "disabled"})
    call.feed(Update(0, LETTERS[:3], FinishReason.LENGTH))
    assert call.num_reasoning_tokens() == 0
