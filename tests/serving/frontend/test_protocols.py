"""Goal: a chat body becomes the right engine request, and tokens become the right chunks, however
the engine cuts them into updates.

Method: calls fed with updates by hand; texts and counts known beforehand.
"""

import dataclasses
import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from serving.core.grammar import DSML, GrammarCompiler
from serving.core.request import ConstraintKind, FinishReason, SamplingParams
from serving.frontend.conversion import ServedModel
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.protocols import (
    DONE_EVENT,
    ChatCall,
    event,
    failing_events,
)
from serving.frontend.text import TextCodec
from serving.transport.driver import SystemClock
from tests.serving.running_service import MODEL_DIR

CODEC = TextCodec.load(MODEL_DIR)
MODEL = ServedModel("tiny", CODEC, vocab_size=320, context_max=256, eos_token_id=1)
EOS = 1


def make_call(**changes: object) -> ChatCall:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "thinking": {"type": "disabled"},
        "stream": True,
    }
    return ChatCall(json.dumps(body | changes).encode(), MODEL, SystemClock())


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    parts = data.removesuffix(DONE_EVENT).split(b"\n\n")
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if part]


def text_of(chunks: list[dict[str, Any]]) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_request_has_the_prompt_and_the_sampling_of_the_body() -> None:
    call = make_call(max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=2**62)
    (request,) = call.requests
    assert request.sampling == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=2**62
    )
    assert CODEC.decode(request.prompt_token_ids).count("Hello") == 1
    assert request.request_id.startswith("chatcmpl-")
    assert make_call().requests[0].request_id != request.request_id


def test_a_priority_reaches_the_request() -> None:
    assert make_call().requests[0].priority == 0
    assert make_call(priority=-3).requests[0].priority == -3


def test_explicit_sampling_holds_while_thinking_too() -> None:
    # The converter fixes the temperature at 1 while the model thinks; a client that says 0 means 0.
    call = make_call(thinking={"type": "enabled"}, temperature=0, top_p=0.5)
    assert call.requests[0].sampling.temperature == 0
    assert call.requests[0].sampling.top_p == 0.5


def test_limit_of_tokens_defaults_to_the_room_that_is_left() -> None:
    call = make_call()
    prompt = len(call.requests[0].prompt_token_ids)
    assert call.requests[0].sampling.max_tokens == 256 - prompt
    assert make_call(max_completion_tokens=7).requests[0].sampling.max_tokens == 7
    both = make_call(max_completion_tokens=7, max_tokens=7)
    assert both.requests[0].sampling.max_tokens == 7
    with pytest.raises(ApiError, match="expected one of them") as caught:
        make_call(max_completion_tokens=7, max_tokens=9)
    assert caught.value.param == "max_completion_tokens"


NINES = "9" * 400


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("logit_bias", '{"' + "9" * 5000 + '": 1}'),
        ("logit_bias", '{"5": ' + NINES + "}"),
        ("temperature", "1e400"),
        ("temperature", NINES),
        ("min_p", NINES),
        ("seed", "9" * 5000),
        ("stop_token_ids", f"[{NINES}]"),
        ("repetition_penalty", "1e-320"),
        ("response_format", '{"type": "junk"}'),
        ("response_format", '{"type": "json_schema"}'),
        (
            "response_format",
            '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}',
        ),
        ("top_logprobs", '-1, "logprobs": true'),
        ("tool_choice", '"required"'),
        ("tool_choice", '{"type": "function", "function": {"name": "f"}}'),
        (
            "tool_choice",
            '{"type": "function", "function": {"name": "f"}}, "tools": [{"type": "function", '
            '"function": {"name": "g", "parameters": {"type": "object"}}}]',
        ),
    ],
)
def test_refusals_name_the_field(param: str, text: str) -> None:
    start = '{"model": "tiny", "messages": [], "thinking": {"type": "disabled"}, '
    raw = f'{start}"{param}": {text}}}'.replace("[]", '[{"role": "user", "content": "Hi"}]', 1)
    with pytest.raises(ApiError) as caught:
        ChatCall(raw.encode(), MODEL, SystemClock())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_prompt_over_the_context_names_the_messages() -> None:
    with pytest.raises(ApiError) as caught:
        make_call(messages=[{"role": "user", "content": "x" * 300}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("size", [1, 2, 7])
def test_text_does_not_depend_on_the_cut(size: int) -> None:
    call = make_call(stream_options={"include_usage": True})
    ids = list(CODEC.encode_text("Grüße, 😀 world")) + [EOS]
    chunks = chunks_of(call.opening())
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        reason = FinishReason.STOP if start + size >= len(ids) else None
        assert not call.is_over(0)
        chunks += chunks_of(call.feed(Update(0, part, reason, 2)))
    assert call.is_over(0)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(chunks) == "Grüße, 😀 world"
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (last,) = chunks_of(call.closing())
    prompt = len(call.requests[0].prompt_token_ids)
    assert last["choices"] == [] and last["id"] == chunks[0]["id"]
    assert last["usage"]["completion_tokens"] == len(ids), "the end token was sampled too"
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["usage"]["prompt_cache_miss_tokens"] == prompt - 2


def test_tokens_after_a_stop_string_are_ignored() -> None:
    call = make_call(stop=["wor"])
    call.opening()
    chunks = chunks_of(call.feed(Update(0, list(CODEC.encode_text("hello world")))))
    assert call.is_over(0)
    assert text_of(chunks) == "hello "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert call.feed(Update(0, [40], FinishReason.LENGTH)) == b""


def test_whole_answer_counts_what_an_unfinished_character_hides() -> None:
    call = make_call(stream=False)
    assert call.opening() == b""
    ids = [*CODEC.encode_text("ab"), CODEC.encode_text("é")[0]]
    if len(CODEC.encode_text("é")) == 1:
        ids[-1] = CODEC.encode_text("😀")[0]
    assert call.feed(Update(0, ids, FinishReason.LENGTH)) == b""
    answer = json.loads(call.answer())
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["object"] == "chat.completion"


def test_reasoning_tokens_never_exceed_the_answer() -> None:
    call = make_call(stream=False, thinking={"type": "enabled"})
    call.opening()
    half = CODEC.encode_text("😀")[0]
    for _ in range(5):
        call.feed(Update(0, [half, half]))
    call.feed(Update(0, [40], FinishReason.LENGTH))
    usage = json.loads(call.answer())["usage"]
    assert usage["completion_tokens"] == 11
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 11


def test_events() -> None:
    assert event('{"a": 1}') == b'data: {"a": 1}\n\n'
    lines = failing_events(ApiError(500, "lost")).split(b"\n")
    assert lines[0] == b"event: error"
    assert json.loads(lines[1].removeprefix(b"data: "))["error"]["message"] == "lost"


def model_with_tools() -> tuple[ServedModel, GrammarCompiler]:
    """The small tokenizer with a DSML token in place of one that no chat uses."""
    text = (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    text = text.replace("<｜noise｜>", DSML)
    codec = TextCodec(recipe.Tokenizer.from_str(text))
    # The description of tools is long in so small a vocabulary.
    model = dataclasses.replace(MODEL, codec=codec, context_max=4096)
    return model, GrammarCompiler(text, 320, 1)


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "s": {"type": "string"}},
            "required": ["x", "s"],
        },
    },
}
CALLED = (
    f'<{DSML} invoke name="f">\n<{DSML} parameter name="x" string="false">7</{DSML} parameter>\n'
    f'<{DSML} parameter name="s" string="true">a "b"</{DSML} parameter>\n</{DSML} invoke>\n'
    f"</{DSML} calls>"
)


@pytest.mark.parametrize(
    ("changes", "kind", "param", "text"),
    [
        ({}, ConstraintKind.TOOL_CALL, "tools", f"Hm.\n\n<{DSML} calls>\n{CALLED}"),
        ({"tool_choice": "required"}, ConstraintKind.TOOL_CALL_REQUIRED, "tool_choice", CALLED),
    ],
)
def test_tools_become_a_constraint_whose_texts_are_calls(
    changes: dict[str, Any], kind: ConstraintKind, param: str, text: str
) -> None:
    model, grammars = model_with_tools()
    messages = [{"role": "user", "content": "Hello"}]
    plain = {"thinking": {"type": "disabled"}}
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], **plain, **changes}
    call = ChatCall(json.dumps(body).encode(), model, SystemClock())
    (request,) = call.requests
    assert request.constraint is not None
    assert (request.constraint.kind, request.constraint.param) == (kind, param)
    assert not request.constraint.after_thinking
    state = grammars.compile(request.constraint).start()
    ids = [*model.codec.tokenizer.encode(text), 1]
    assert state.num_legal(ids) == len(ids)
    call.opening()
    call.feed(Update(0, ids, FinishReason.STOP))
    (tool_call,) = json.loads(call.answer())["choices"][0]["message"]["tool_calls"]
    assert tool_call["function"]["name"] == "f"
    assert json.loads(tool_call["function"]["arguments"]) == {"x": 7, "s": 'a "b"'}


def test_limits_of_strict_schemas_are_kept() -> None:
    model, grammars = model_with_tools()
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 2}},
        "required": ["s"],
        "additionalProperties": False,
    }
    function = {"name": "f", "strict": True, "parameters": schema}
    form = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": schema}}
    head = f'<{DSML} invoke name="f">\n<{DSML} parameter name="s" string="true">'
    tail = f"</{DSML} parameter>\n</{DSML} invoke>\n</{DSML} calls>"
    cases = [
        ({"response_format": form}, '{"s": "ab"}', '{"s": "abc"}'),
        (
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
            f"{head}ab{tail}",
            f"{head}abc{tail}",
        ),
    ]
    messages = [{"role": "user", "content": "Hello"}]
    for changes, inside, outside in cases:
        body = {"model": "tiny", "messages": messages, "thinking": {"type": "disabled"}, **changes}
        constraint = (
            ChatCall(json.dumps(body).encode(), model, SystemClock()).requests[0].constraint
        )
        assert constraint is not None
        for text, is_inside in ((inside, True), (outside, False)):
            ids = [*model.codec.tokenizer.encode(text), 1]
            state = grammars.compile(constraint).start()
            assert (state.num_legal(ids) == len(ids)) is is_inside, text


def test_a_constraint_waits_for_the_end_of_thinking() -> None:
    model, _ = model_with_tools()
    messages = [{"role": "user", "content": "json"}]
    wanted = {"type": "json_object"}
    for thinking, expected in (("enabled", True), ("disabled", False)):
        body = {"model": "tiny", "messages": messages, "response_format": wanted}
        raw = json.dumps(body | {"thinking": {"type": thinking}}).encode()
        constraint = ChatCall(raw, model, SystemClock()).requests[0].constraint
        assert constraint is not None and constraint.after_thinking is expected
        assert (constraint.kind, constraint.param) == (ConstraintKind.JSON, "response_format")


def test_every_chunk_carries_the_usage_so_far_if_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = make_call(max_tokens=9, stream_options=options)
    data = call.opening() + call.feed(Update(0, list(CODEC.encode_text("x"))))
    data += call.feed(Update(0, list(CODEC.encode_text("y")), FinishReason.LENGTH))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(data + call.closing())]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 2


def test_cache_salt_is_that_of_the_body() -> None:
    assert make_call(cache_salt="mine").requests[0].cache_salt == "mine"
    with pytest.raises(ApiError, match="cache_salt is ''"):
        make_call(cache_salt="")
