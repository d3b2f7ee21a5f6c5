"""Goal: the official client gets what the Responses protocol promises, whole and streamed, and a
refusal names the field at fault.

Method: the client over loopback against a scripted executor; calls fed by hand where the text has
to be a tool call or of a given form.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving.core.request import ConstraintKind, FinishReason
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.responses import ResponsesCall
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import THINK_END, letter_at, letters
from tests.serving.frontend.test_app_images import png
from tests.serving.frontend.test_protocols import CALLED, MODEL, TOOL, model_with_tools
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

NO_THINKING: Any = {"effort": "none"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def create(client: openai.OpenAI, **changes: Any) -> Any:
    settings = {"model": "tiny-v41", "input": "Hello", "max_output_tokens": 5} | changes
    return client.responses.create(**settings)


def test_whole_answer(client: openai.OpenAI) -> None:
    answer = create(client, reasoning=NO_THINKING, instructions="Be brief", temperature=0.5)
    usage = answer.usage
    assert answer.output_text == letters(usage.input_tokens, 5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (usage.output_tokens, usage.total_tokens) == (5, usage.input_tokens + 5)
    assert answer.id.startswith("resp-") and answer.temperature == 0.5
    assert answer.instructions == "Be brief" and answer.max_output_tokens == 5


def test_stream_ends_with_the_whole_answer(client: openai.OpenAI) -> None:
    events = list(create(client, reasoning=NO_THINKING, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.output_text == letters(last.usage.input_tokens, 5)
    assert last.usage.output_tokens == 5 and len(deltas) > 1


def test_thinking_is_an_item_of_its_own() -> None:
    call = make_call(reasoning={"effort": "high"})
    call.opening()
    call.feed(Update(0, [*MODEL.codec.encode_text("ab"), THINK_END]))
    call.feed(Update(0, [*MODEL.codec.encode_text("cd"), 1], FinishReason.STOP, 2))
    answer = json.loads(call.answer())
    thought, message = answer["output"]
    assert thought["content"][0]["text"] == "ab" and message["content"][0]["text"] == "cd"
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens"] == 6, "the end of sequence counts"
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 2}


def test_image_and_logprobs(client: openai.OpenAI) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(42, 42)).decode()
    parts = [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": url}]
    plain = create(client, input=[{"role": "user", "content": parts[:1]}], reasoning=NO_THINKING)
    answer = create(
        client,
        input=[{"role": "user", "content": parts}],
        reasoning=NO_THINKING,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    assert answer.usage.input_tokens > plain.usage.input_tokens
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 5 and len(entries[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "other"}, "model"),
        ({"input": 3}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_output_tokens": 500}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"stop": ["a"]}, "stop"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "include": ["reasoning.encrypted_content"]}, "top_logprobs"),
        ({"top_logprobs": 2, "include": 5}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"guided_regex": "a", "stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
def test_refusals(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, extra_body=changes)
    assert caught.value.param == param, caught.value


def test_what_does_not_matter_is_ignored(client: openai.OpenAI) -> None:
    harmless = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"}
    assert create(client, **harmless).usage.output_tokens == 5


def make_call(model: Any = MODEL, **changes: object) -> ResponsesCall:
    body = {"model": "tiny", "input": "Hello", "reasoning": {"effort": "none"}} | changes
    return ResponsesCall(json.dumps(body).encode(), model, SystemClock())


def test_tool_call() -> None:
    model, grammars = model_with_tools()
    tool = {"type": "function"} | TOOL["function"]
    call = make_call(model, tools=[tool], tool_choice="required")
    (request,) = call.requests
    assert request.constraint is not None
    assert request.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    assert request.constraint.param == "tool_choice"
    ids = [*model.codec.tokenizer.encode(CALLED), 1]
    assert grammars.compile(request.constraint).start().num_legal(ids) == len(ids)
    call.opening()
    call.feed(Update(0, ids, FinishReason.STOP))
    (item,) = json.loads(call.answer())["output"]
    assert (item["type"], item["name"]) == ("function_call", "f")
    assert json.loads(item["arguments"]) == {"x": 7, "s": 'a "b"'}


def test_limits_of_strict_schemas_are_kept() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 2}}}
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    constraint = make_call(text={"format": form}).requests[0].constraint
    assert constraint is not None and constraint.param == "text"
    assert json.loads(constraint.text) == schema
    with pytest.raises(ApiError, match="at most one"):
        make_call(text={"format": form}, guided_regex="a")


def test_priority_reaches_the_engine() -> None:
    assert make_call(priority=-1).requests[0].priority == -1


def test_cache_salt_reaches_the_engine() -> None:
    assert make_call(cache_salt="mine").requests[0].cache_salt == "mine"
    assert make_call().requests[0].cache_salt == ""


def test_fault_is_an_event_that_the_client_raises() -> None:
    with (
        RunningService(ScriptedExecutor(letter_at, failing_step=4)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        events: list[Any] = []
        try:
            events.extend(create(client, max_output_tokens=100, stream=True))
        except openai.APIError as error:
            assert "the log has more under resp-" in str(error)
        else:
            assert events[-1].type == "error" and "the log has more" in events[-1].message
            assert events[-1].sequence_number == len(events) - 1
