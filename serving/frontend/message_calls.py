"""The Messages dialect, and the counting of its tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepseek_recipe as recipe
import msgspec

from serving.clock import Clock
from serving.core.request import ConstraintKind, OutputConstraint
from serving.frontend import fields
from serving.frontend.conversations import ConversationCall
from serving.frontend.conversion import (
    SentSchemas,
    ServedModel,
    constraint_of,
    convert,
    encode,
    starts_thinking,
    tokens_left,
)
from serving.frontend.errors import (
    MESSAGES_FIELDS,
    ApiError,
    bad_request,
    decode_body,
    recipe_errors,
)
from serving.frontend.images import EncodedPrompt
from serving.frontend.protocols import make_call_id, refuse_stop_strings


class MessagesCall(ConversationCall):
    """A Messages call.

    Raises:
        ApiError: 400, the body is not acceptable.
    """

    def __init__(self, raw: bytes, model: ServedModel, clock: Clock) -> None:
        body = decode_body(raw)
        if body.get("max_tokens") is None:
            raise bad_request("max_tokens is missing; expected an integer", "max_tokens")
        call_id = make_call_id("msg")
        converted, prompt = _prompt(raw, body, model)
        with _renamed_errors(body):
            max_tokens = tokens_left(converted, prompt, model, "messages")
            constraint = _constraint(body, converted)
            refuse_stop_strings(converted.parsing_options.stop_sequences, constraint)
        super().__init__(
            body,
            call_id,
            converted,
            prompt,
            max_tokens,
            constraint,
            recipe.MessagesRequest.chunk_generator(converted, call_id, model.name),
            recipe.MessagesResponse,
            ("message_delta",),
            model,
            clock,
        )

    def _correct_usage(self, holder: dict[str, Any]) -> None:
        usage = holder["usage"] = holder.get("usage") or {}
        # In this dialect input tokens are those that were computed.
        usage["input_tokens"] = len(self.requests[0].prompt_token_ids) - self.tokens.num_cached
        usage["cache_read_input_tokens"] = self.tokens.num_cached
        usage["output_tokens"] = self.tokens.num_generated

    def _error_object(self, error: ApiError) -> dict[str, Any]:
        return error.message_fields()


def count_tokens(raw: bytes, model: ServedModel) -> dict[str, Any]:
    """The tokens that a Messages request would have in its prompt.

    Raises:
        ApiError: 400, the body is not acceptable.
    """
    body = decode_body(raw)
    _, prompt = _prompt(raw, body, model)
    return {"input_tokens": len(prompt.token_ids)}


def _prompt(
    raw: bytes, body: Mapping[str, Any], model: ServedModel
) -> tuple[recipe.ConversationRequest, EncodedPrompt]:
    fields.refuse_unsupported(body, fields.MESSAGES_NEUTRAL)
    with _renamed_errors(body):
        changes = _with_named_tool(body)
        changes |= fields.without_thinking(body, "thinking", fields.NO_THINKING)
        converted = convert(recipe.MessagesRequest({**body, **changes} if changes else raw), model)
        fields.check_tool_choice(body)
        return converted, encode(converted, model, "messages")


@contextmanager
def _renamed_errors(body: Mapping[str, Any]) -> Iterator[None]:
    """What deepseek-recipe and the shared code raise, by the names of this dialect."""
    try:
        with recipe_errors(body, MESSAGES_FIELDS):
            yield
    except ApiError as error:
        error.param = "stop_sequences" if error.param == "stop" else error.param
        raise


def _with_named_tool(body: Mapping[str, Any]) -> dict[str, Any]:
    """What to change so that the only tool is named, where any tool has to be called.

    deepseek-recipe takes `any` for `auto`, and only a named tool is enforced.

    Raises:
        ApiError: 400, any of several tools.
    """
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not isinstance(choice, dict) or choice.get("type") != "any" or not isinstance(tools, list):
        return {}
    if len(tools) != 1 or not isinstance(tools[0], dict):
        raise bad_request(
            f"tool_choice is any of {len(tools)} tools, which cannot be enforced; expected auto, "
            "or one tool by its name",
            "tool_choice",
        )
    return {"tool_choice": choice | {"type": "tool", "name": tools[0].get("name")}}


def _constraint(
    body: Mapping[str, Any], converted: recipe.ConversationRequest
) -> OutputConstraint | None:
    """The form that the answer must have. Raises ApiError 400 for two of them."""
    wanted = _format(body, starts_thinking(converted))
    other = constraint_of(body, converted, _sent_schemas(body))
    if wanted is not None and other is not None:
        raise bad_request(
            f"received {other.param} and {wanted.param}; expected at most one of them", other.param
        )
    return wanted or other


def _format(body: Mapping[str, Any], after_thinking: bool) -> OutputConstraint | None:
    """The JSON schema that the answer must have, under either of its names; None for none."""
    found: list[OutputConstraint] = []
    for param in ("output_config", "output_format"):
        wanted = body.get(param)
        if param == "output_config" and isinstance(wanted, dict):
            wanted = wanted.get("format")
        if wanted is None:
            continue
        if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
            raise bad_request(
                f'{param} has no JSON schema; expected {{"type": "json_schema", "schema": ...}}',
                param,
            )
        text = msgspec.json.encode(wanted["schema"]).decode()
        found.append(OutputConstraint(ConstraintKind.JSON, text, after_thinking, param))
    if len(found) > 1:
        raise bad_request(
            "received output_config.format and output_format; expected at most one of them",
            "output_format",
        )
    return found[0] if found else None


def _sent_schemas(body: Mapping[str, Any]) -> SentSchemas:
    tools = {tool["name"]: tool.get("input_schema") for tool in body.get("tools") or ()}
    return SentSchemas(None, tools, "")
