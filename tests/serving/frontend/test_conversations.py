"""Goal: however updates cut the tokens, the events of a stream carry the same text and the counts
of the engine, and only the last one counts.

Method: a call fed by hand, at once and token by token; its events read back.
"""

import json
from typing import Any

import pytest

from serving.core.request import FinishReason
from serving.frontend.conversations import ConversationCall
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.message_calls import MessagesCall
from serving.frontend.responses import ResponsesCall
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import HELLO
from tests.serving.frontend.test_protocols import MODEL

# The last token is the first byte of a character that never comes.
IDS = [*MODEL.codec.encode_text("abc"), MODEL.codec.encode_text("é")[0]]


def make_calls(is_streamed: bool) -> list[ConversationCall]:
    common = {"model": "tiny", "stream": is_streamed}
    messages = {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}
    responses = {"input": "Hello", "reasoning": {"effort": "none"}}
    return [
        MessagesCall(json.dumps(common | messages).encode(), MODEL, SystemClock()),
        ResponsesCall(json.dumps(common | responses).encode(), MODEL, SystemClock()),
    ]


def events_of(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, text = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(text.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dialect", [0, 1])
def test_events_carry_text_and_counts(size: int, dialect: int) -> None:
    call = make_calls(True)[dialect]
    data = call.opening()
    for start in range(0, len(IDS), size):
        is_last = start + size >= len(IDS)
        reason = FinishReason.LENGTH if is_last else None
        data += call.feed(Update(0, IDS[start : start + size], reason, 3))
    assert call.is_over(0) and call.closing() == b""
    assert call.feed(Update(0, [5])) == b"", "nothing comes after the end"
    events = events_of(data)
    assert all(name == value["type"] for name, value in events)
    text = "".join(
        value["delta"] if isinstance(value["delta"], str) else value["delta"].get("text", "")
        for name, value in events
        if name in ("response.output_text.delta", "content_block_delta")
    )
    assert text.startswith("abc")
    holder = dict(events)["message_delta"] if dialect == 0 else events[-1][1]["response"]
    assert holder["usage"]["output_tokens"] == len(IDS)


@pytest.mark.parametrize("dialect", [0, 1])
def test_fault_is_an_event(dialect: int) -> None:
    call = make_calls(True)[dialect]
    num_events = len(events_of(call.opening()))
    ((name, value),) = events_of(call.failing(ApiError(500, "lost", "x")))
    assert name == value["type"] == "error"
    if dialect == 0:
        assert value["error"]["message"] == "x: lost", "this dialect has no place for a field"
    else:
        assert (value["message"], value["param"]) == ("lost", "x")
        assert value["sequence_number"] == num_events
