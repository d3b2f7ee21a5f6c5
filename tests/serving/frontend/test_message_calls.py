"""Goal: the official client gets what the Messages protocol promises, whole, streamed and counted,
and errors in the shape that it understands.

Method: the client over loopback against a scripted executor; calls fed by hand where the text has
to be a tool call or of a given form.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from serving.core.request import ConstraintKind, FinishReason
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.message_calls import MessagesCall
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import HELLO, THINK_END, letter_at, letters
from tests.serving.frontend.test_app_images import png
from tests.serving.frontend.test_protocols import CALLED, MODEL, TOOL, model_with_tools
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

NO_THINKING: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, **changes: Any) -> Any:
    settings = {
        "model": "tiny-v41",
        "messages": HELLO,
        "max_tokens": 5,
        "thinking": NO_THINKING,
    }
    return client.messages.create(**(settings | changes))


def test_whole_answer(client: anthropic.Anthropic) -> None:
    answer = create(client, system="Be brief", extra_body={"temperature": 0.5, "top_k": 3})
    assert answer.content[0].text == letters(answer.usage.input_tokens, 5)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 5)
    assert answer.id.startswith("msg-") and answer.role == "assistant"


def test_stream_adds_up_to_the_whole_answer(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="tiny-v41", messages=HELLO, max_tokens=5, thinking=NO_THINKING
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("text") > 1, "tokens came one by one"
    (block,) = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == letters(message.usage.input_tokens, 5)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)


def test_counted_tokens_are_those_of_the_answer(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(
        model="tiny-v41", messages=HELLO, system="Be brief", thinking=NO_THINKING
    )
    answer = create(client, system="Be brief")
    assert counted.input_tokens == answer.usage.input_tokens > 5
    # A prompt that does not fit can still be counted: clients decide by it what to leave out.
    many: Any = [{"role": "user", "content": "Hello " * 400}]
    assert client.messages.count_tokens(model="tiny-v41", messages=many).input_tokens > 512


def test_image(client: anthropic.Anthropic) -> None:
    data = base64.b64encode(png(42, 42)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]
    plain = create(client, messages=[{"role": "user", "content": parts[:1]}])
    answer = create(client, messages=[{"role": "user", "content": parts}])
    assert answer.usage.input_tokens > plain.usage.input_tokens


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_k": -3}, "top_k"),
        ({"stop_sequences": [""]}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "f"}, {"name": "g"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"guided_regex": "a", "stop_sequences": ["a"]}, "stop_sequences"),
        ({"guided_regex": "a", "stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
def test_refusals(client: anthropic.Anthropic, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, extra_body=changes)
    error: Any = caught.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]


def test_errors_of_other_kinds_have_the_shape_too(service: RunningService) -> None:
    answer = httpx.get(f"{service.url}/v1/messages")
    assert answer.status_code == 405 and answer.json()["type"] == "error"
    answer = httpx.post(f"{service.url}/v1/messages", content=b"[" * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_fault_is_an_event_that_the_client_raises() -> None:
    with (
        RunningService(ScriptedExecutor(letter_at, failing_step=4)) as running,
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIError, match="the log has more under msg-"),
    ):
        list(create(client, max_tokens=100, stream=True))


def make_call(model: Any = MODEL, **changes: object) -> MessagesCall:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 50, "thinking": NO_THINKING}
    return MessagesCall(json.dumps(body | changes).encode(), model, SystemClock())


def test_thinking_and_cached_tokens() -> None:
    call = make_call(thinking={"type": "enabled", "budget_tokens": 1024})
    call.opening()
    call.feed(Update(0, [*MODEL.codec.encode_text("ab"), THINK_END]))
    call.feed(Update(0, [*MODEL.codec.encode_text("cd"), 1], FinishReason.STOP, 2))
    answer = json.loads(call.answer())
    thought, text = answer["content"]
    assert (thought["thinking"], text["text"]) == ("ab", "cd")
    assert answer["stop_reason"] == "end_turn"
    num_prompt = len(call.requests[0].prompt_token_ids)
    assert answer["usage"]["input_tokens"] == num_prompt - 2
    assert answer["usage"]["cache_read_input_tokens"] == 2
    assert answer["usage"]["output_tokens"] == 6, "the end of sequence counts"


def test_tool_use() -> None:
    model, grammars = model_with_tools()
    function = TOOL["function"]
    tool = {"name": "f", "input_schema": function["parameters"]}
    call = make_call(model, tools=[tool], tool_choice={"type": "any"})
    (request,) = call.requests
    assert request.constraint is not None
    assert request.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    ids = [*model.codec.tokenizer.encode(CALLED), 1]
    assert grammars.compile(request.constraint).start().num_legal(ids) == len(ids)
    call.opening()
    call.feed(Update(0, ids, FinishReason.STOP))
    answer = json.loads(call.answer())
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "f", "tool_use")
    assert block["input"] == {"x": 7, "s": 'a "b"'}


@pytest.mark.parametrize("is_nested", [False, True])
def test_json_schema_is_enforced(is_nested: bool) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 2}}}
    form = {"type": "json_schema", "schema": schema}
    changes = {"output_config": {"format": form}} if is_nested else {"output_format": form}
    constraint = make_call(**changes).requests[0].constraint
    assert constraint is not None and constraint.kind is ConstraintKind.JSON
    assert json.loads(constraint.text) == schema and not constraint.after_thinking
    with pytest.raises(ApiError, match="stop together with"):
        make_call(stop_sequences=["a"], **changes)
    assert make_call(output_config={"effort": "low"}).requests[0].constraint is None
