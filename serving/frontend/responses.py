"""The Responses dialect. Nothing is stored here, so a call has to bring all that came before it."""

from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from serving.clock import Clock
from serving.frontend import fields
from serving.frontend.conversations import ConversationCall
from serving.frontend.conversion import (
    SentSchemas,
    ServedModel,
    constraint_of,
    conversion_options,
    convert,
    encode,
    tokens_left,
)
from serving.frontend.errors import (
    RESPONSES_FIELDS,
    ApiError,
    bad_request,
    decode_body,
    recipe_errors,
)
from serving.frontend.protocols import make_call_id

_PARAMS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
"""What deepseek-recipe and the shared code call by the names of the chat dialect."""

_LOGPROBS = "message.output_text.logprobs"

_HOSTED_TOOLS = ("file_search", "code_interpreter", "image_generation", "mcp", "computer")


class ResponsesCall(ConversationCall):
    """A Responses call.

    Raises:
        ApiError: 400, the body is not acceptable.
    """

    def __init__(self, raw: bytes, model: ServedModel, clock: Clock) -> None:
        body = decode_body(raw)
        fields.refuse_unsupported(body, fields.RESPONSES_NEUTRAL)
        _refuse_what_is_elsewhere(body)
        call_id = make_call_id("resp")
        try:
            with recipe_errors(body, RESPONSES_FIELDS):
                changes = fields.without_thinking(body, "reasoning", {"effort": "none"})
                request = recipe.ResponsesRequest(body | changes if changes else raw)
                echo = request.echo()
                spaces = request.namespace_tool_map(conversion_options(model))
                converted = convert(request, model)
                prompt = encode(converted, model, "input")
                max_tokens = tokens_left(converted, prompt, model, "input")
                constraint = constraint_of(body, converted, _sent_schemas(body))
            _check_logprobs(body)
        except ApiError as error:
            error.param = _PARAMS.get(error.param or "", error.param)
            raise
        generator = recipe.ResponsesRequest.chunk_generator(converted, call_id, model.name)
        super().__init__(
            body,
            call_id,
            converted,
            prompt,
            max_tokens,
            constraint,
            generator.with_namespace_tool_map(spaces).with_echo(echo),
            recipe.ResponsesResponse,
            ("response.completed", "response.incomplete"),
            model,
            clock,
        )

    def _correct_usage(self, holder: dict[str, Any]) -> None:
        prompt = len(self.requests[0].prompt_token_ids)
        usage = holder["usage"] = holder.get("usage") or {}
        usage["input_tokens"] = prompt
        usage["input_tokens_details"] = {"cached_tokens": self.tokens.num_cached}
        usage["output_tokens"] = self.tokens.num_generated
        usage["output_tokens_details"] = {"reasoning_tokens": self.tokens.num_reasoning}
        usage["total_tokens"] = prompt + self.tokens.num_generated

    def _error_object(self, error: ApiError) -> dict[str, Any]:
        found = error.fields()
        return {
            "type": "error",
            "code": found["code"] or found["type"],
            "message": found["message"],
            "param": found["param"],
            "sequence_number": self.num_events,
        }


def _check_logprobs(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for likeliest tokens in a report that is not asked for."""
    wanted, include = body.get("top_logprobs"), body.get("include")
    if include is not None and not isinstance(include, list):
        raise bad_request("include is no list; expected a list of names, or nothing", "include")
    if wanted and _LOGPROBS not in (include or ()):
        raise bad_request(
            f"top_logprobs is {wanted}, but include does not ask for {_LOGPROBS!r}; name it there "
            "or leave top_logprobs out",
            "top_logprobs",
        )


def _refuse_what_is_elsewhere(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for references to what a server without a store does not have."""
    items = body.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise bad_request(
                f"input[{index}] refers to a stored item; expected the item itself, because "
                "nothing is stored",
                "input",
            )
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED_TOOLS):
            raise bad_request(
                f"tools[{index}] is of type {kind}, which runs on a server; expected functions, "
                "which the client runs",
                "tools",
            )


def _sent_schemas(body: Mapping[str, Any]) -> SentSchemas:
    wanted = (body.get("text") or {}).get("format") or {}
    tools = {
        tool["name"]: tool.get("parameters")
        for tool in body.get("tools") or ()
        if tool.get("type") == "function"
    }
    has_form = wanted.get("type", "text") != "text"
    return SentSchemas(wanted.get("schema"), tools, "text", has_form)
