"""Goal: prompts that leave no room are refused by the name of their field, before they are encoded
where that is possible; limits come out as asked for.

No constraint is passed over: of two that cannot hold together one is refused, in every dialect.

Method: conversations through each request type of deepseek-recipe, at the edges of a small context;
bodies with every pair of forms.
"""

import itertools
import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from serving.frontend.conversion import check_room, convert, encode, tokens_left
from serving.frontend.errors import ApiError
from serving.frontend.message_calls import MessagesCall
from serving.frontend.protocols import ChatCall
from serving.frontend.responses import ResponsesCall
from serving.transport.driver import SystemClock
from tests.serving.frontend.test_protocols import MODEL, model_with_tools


def converted(text: str, **changes: object) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "thinking": {"type": "disabled"}} | changes
    return convert(recipe.ChatCompletionRequest(json.dumps(body)), MODEL)


def test_room_is_what_the_prompt_leaves() -> None:
    conversation = converted("Hello")
    prompt = encode(conversation, MODEL, "messages")
    assert tokens_left(conversation, prompt, MODEL, "messages") == 256 - len(prompt.token_ids)
    asking = converted("Hello", max_tokens=7)
    assert tokens_left(asking, prompt, MODEL, "messages") == 7
    with pytest.raises(recipe.ConversionError):
        tokens_left(converted("Hello", max_tokens=256), prompt, MODEL, "messages")


def test_refusals_name_the_field() -> None:
    with pytest.raises(ApiError, match="has at least 257 tokens") as caught:
        encode(converted("x" * (256 * 21 + 1)), MODEL, "input")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    long = converted("Hello " * 100)
    prompt = encode(long, MODEL, "input")
    with pytest.raises(ApiError, match=f"has {len(prompt.token_ids)} tokens"):
        tokens_left(long, prompt, MODEL, "input")
    check_room(255, MODEL, "input")
    with pytest.raises(ApiError, match="The input has 256 tokens"):
        check_room(256, MODEL, "input")


FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
MESSAGES = {"messages": [{"role": "user", "content": "json"}], "max_tokens": 9}
NO_THINKING = {"thinking": {"type": "disabled"}}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
DIALECTS: dict[type[ChatCall | MessagesCall | ResponsesCall], tuple[dict[str, Any], ...]] = {
    ChatCall: (
        MESSAGES | NO_THINKING,
        {"response_format": {"type": "json_schema", "json_schema": FORM}},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": FUNCTION}]},
    ),
    ResponsesCall: (
        {"input": "json", "reasoning": {"effort": "none"}},
        {"text": {"format": FORM}},
        {"tools": [{"type": "function"} | FUNCTION]},
    ),
    MessagesCall: (
        MESSAGES | NO_THINKING,
        {"output_format": FORM},
        {"output_config": {"format": FORM}},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_may_want_one_tool_call_at_most(dialect: type[ChatCall]) -> None:
    model, _ = model_with_tools()
    base, *_, tools = DIALECTS[dialect]
    choice: dict[str, Any] = {"type": "auto"} if dialect is MessagesCall else {}

    def is_single(changes: dict[str, Any]) -> bool:
        raw = json.dumps({"model": "tiny"} | base | tools | changes).encode()
        constraint = dialect(raw, model, SystemClock()).requests[0].constraint
        assert constraint is not None
        return constraint.has_one_call

    def changes(wanted: object) -> dict[str, Any]:
        if dialect is MessagesCall:
            return {"tool_choice": choice | {"disable_parallel_tool_use": wanted}}
        return {"parallel_tool_calls": None if wanted is None else not wanted}

    assert is_single(changes(True))
    assert not any(map(is_single, ({}, changes(False), changes(None))))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_of_two_forms_none_is_passed_over(dialect: type[ChatCall]) -> None:
    model, _ = model_with_tools()
    base, *forms = DIALECTS[dialect]
    forms += [{"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}]

    def make(*changes: dict[str, Any]) -> ChatCall:
        body = {"model": "tiny"} | base
        for change in changes:
            body |= change
        return dialect(json.dumps(body).encode(), model, SystemClock())

    for form in forms:
        (param,) = form
        (request,) = make(form).requests
        assert request.constraint is not None and request.constraint.param == param
    for one, other in itertools.combinations(forms, 2):
        if one.keys() != other.keys():
            with pytest.raises(ApiError, match="expected at most one of them") as caught:
                make(one, other)
            assert caught.value.status == 400 and caught.value.param in {**one, **other}
    for one in forms[:-3]:
        choice = {"type": "none"} if dialect is MessagesCall else "none"
        assert make(one, forms[-3], {"tool_choice": choice}).requests[0].constraint is not None


@pytest.mark.parametrize("dialect", [ChatCall, MessagesCall, ResponsesCall])
def test_a_demanded_call_is_made_without_thinking(dialect: Any) -> None:
    model, _ = model_with_tools()
    demand: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]} | MESSAGES
    demand |= {"tool_choice": "required"}
    asking: dict[str, Any] = {"reasoning_effort": "high"}
    if dialect is MessagesCall:
        tools = [{"name": "f", "input_schema": FUNCTION["parameters"]}]
        demand |= {"tools": tools, "tool_choice": {"type": "any"}}
        asking = {"output_config": {"effort": "high"}}
    if dialect is ResponsesCall:
        demand = {"input": "x", "tools": [{"type": "function"} | FUNCTION]}
        demand |= {"tool_choice": "required"}
        asking = {"reasoning": {"effort": "high"}}

    def make(body: dict[str, Any]) -> Any:
        return dialect(json.dumps({"model": "tiny"} | body).encode(), model, SystemClock())

    (request,) = make(demand).requests
    assert request.constraint is not None and not request.constraint.after_thinking
    # Who asks for both has neither; who demands nothing thinks as before.
    with pytest.raises(ApiError, match="Thinking mode does not support this tool_choice"):
        make(demand | asking)
    free = {"type": "auto"} if dialect is MessagesCall else "auto"
    (request,) = make(demand | {"tool_choice": free}).requests
    assert request.constraint is None or request.constraint.after_thinking
