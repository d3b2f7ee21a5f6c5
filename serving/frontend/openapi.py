"""The OpenAPI document of the service, at `/openapi.json`.

It names every route and the fields that are read, with their types and ranges; fields that it does
not name are ignored or refused as the README says. What is refused beyond that needs the model.
"""

from collections.abc import Mapping
from typing import Any

from serving.core.forking import SAMPLES_MAX
from serving.core.request import PRIORITY_MAX, TOP_LOGPROBS_MAX
from serving.frontend.fields import CACHE_SALT_CHARS_MAX, STOP_STRINGS_MAX

_Schema = dict[str, Any]

_STRING: _Schema = {"type": "string"}
_BOOLEAN: _Schema = {"type": "boolean"}
_OBJECT: _Schema = {"type": "object"}
_COUNT: _Schema = {"type": "integer", "minimum": 1}
_TOKEN: _Schema = {"type": "integer", "minimum": 0}
_PENALTY: _Schema = {"type": "number", "minimum": -2, "maximum": 2}


def _list(items: _Schema, **limits: int) -> _Schema:
    return {"type": "array", "items": items, **limits}


def _object(required: tuple[str, ...], **properties: _Schema) -> _Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _one_of(*values: str) -> _Schema:
    return {"type": "string", "enum": list(values)}


_STOP: _Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _list({"type": "string", "minLength": 1}, maxItems=STOP_STRINGS_MAX),
    ]
}
_STREAM: dict[str, _Schema] = {
    "stream": _BOOLEAN,
    "stream_options": _object((), include_usage=_BOOLEAN, continuous_usage_stats=_BOOLEAN),
}
_SAMPLING: dict[str, _Schema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    "stop_token_ids": _list(_TOKEN),
    "ignore_eos": _BOOLEAN,
    "priority": {"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX},
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": CACHE_SALT_CHARS_MAX},
    "guided_json": {"anyOf": [_OBJECT, _STRING]},
    "guided_regex": _STRING,
    "guided_choice": _list(_STRING, minItems=1),
    "guided_grammar": _STRING,
    "structured_outputs": _OBJECT,
}
_SAMPLES: _Schema = {"type": "integer", "minimum": 1, "maximum": SAMPLES_MAX}
_TOPS: _Schema = {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MAX}

_PART = _object(
    ("type",),
    type=_one_of("text", "image_url"),
    text=_STRING,
    image_url=_object(("url",), url=_STRING, detail=_one_of("auto", "low", "high")),
)
_CONTENT: _Schema = {"anyOf": [_STRING, _list(_PART)]}
_FUNCTION = _object(("name",), name=_STRING, description=_STRING, parameters=_OBJECT)
_THINKING = _object(("type",), type=_one_of("enabled", "disabled"))

_CHAT = _object(
    ("model", "messages"),
    model=_STRING,
    messages=_list(
        _object(
            ("role", "content"),
            role=_one_of("system", "user", "assistant", "tool"),
            content=_CONTENT,
            reasoning_content=_STRING,
            tool_calls=_list(_OBJECT),
            tool_call_id=_STRING,
        ),
        minItems=1,
    ),
    max_tokens=_COUNT,
    max_completion_tokens=_COUNT,
    n=_SAMPLES,
    stop=_STOP,
    logprobs=_BOOLEAN,
    top_logprobs=_TOPS,
    tools=_list(_object(("type", "function"), type=_one_of("function"), function=_FUNCTION)),
    tool_choice={"anyOf": [_one_of("auto", "none", "required"), _OBJECT]},
    response_format=_object(
        ("type",), type=_one_of("text", "json_object", "json_schema"), json_schema=_OBJECT
    ),
    thinking=_THINKING,
    reasoning_effort=_STRING,
    **_STREAM,
    **_SAMPLING,
)
_PROMPT: _Schema = {
    "anyOf": [_STRING, _list(_TOKEN, minItems=1), _list(_STRING), _list(_list(_TOKEN, minItems=1))]
}
_COMPLETION = _object(
    ("model", "prompt"),
    model=_STRING,
    prompt=_PROMPT,
    max_tokens=_COUNT,
    n=_SAMPLES,
    best_of=_SAMPLES,
    stop=_STOP,
    logprobs=_TOPS,
    echo=_BOOLEAN,
    **_STREAM,
    **_SAMPLING,
)
_RESPONSES = _object(
    ("model", "input"),
    model=_STRING,
    input={"anyOf": [_STRING, _list(_OBJECT)]},
    instructions=_STRING,
    max_output_tokens=_COUNT,
    reasoning=_object((), effort=_STRING),
    text=_object((), format=_OBJECT),
    tools=_list(_OBJECT),
    tool_choice={"anyOf": [_one_of("auto", "none", "required"), _OBJECT]},
    top_logprobs=_TOPS,
    include=_list(_STRING),
    stream=_BOOLEAN,
    **_SAMPLING,
)
_MESSAGES_PROMPT: dict[str, _Schema] = {
    "model": _STRING,
    "messages": _list(
        _object(
            ("role", "content"),
            role=_one_of("user", "assistant"),
            content={"anyOf": [_STRING, _list(_OBJECT)]},
        ),
        minItems=1,
    ),
    "system": {"anyOf": [_STRING, _list(_OBJECT)]},
    "tools": _list(_object(("name",), name=_STRING, description=_STRING, input_schema=_OBJECT)),
    "tool_choice": _object(("type",), type=_one_of("auto", "any", "tool", "none"), name=_STRING),
    "thinking": _THINKING,
}
_MESSAGES = _object(
    ("model", "messages", "max_tokens"),
    **_MESSAGES_PROMPT,
    max_tokens=_COUNT,
    stop_sequences=_list(_STRING),
    stream=_BOOLEAN,
    output_config=_OBJECT,
    **_SAMPLING,
)
_TOKENIZE = _object(
    ("model",),
    model=_STRING,
    prompt=_STRING,
    messages=_list(_OBJECT),
    add_special_tokens=_BOOLEAN,
    return_token_strs=_BOOLEAN,
)

_ROUTES: Mapping[tuple[str, str], tuple[str, _Schema | None, str]] = {
    ("post", "/v1/chat/completions"): ("Answer a chat", _CHAT, "use"),
    ("post", "/v1/completions"): ("Go on from raw prompts", _COMPLETION, "use"),
    ("post", "/v1/responses"): ("Answer in the Responses dialect", _RESPONSES, "use"),
    ("post", "/v1/messages"): ("Answer in the Messages dialect", _MESSAGES, "use"),
    ("post", "/v1/messages/count_tokens"): (
        "Count the tokens of a Messages request",
        _object(("model", "messages"), **_MESSAGES_PROMPT),
        "use",
    ),
    ("post", "/tokenize"): ("Text or messages to tokens", _TOKENIZE, "use"),
    ("post", "/detokenize"): (
        "Tokens to text",
        _object(("model", "tokens"), model=_STRING, tokens=_list(_TOKEN)),
        "use",
    ),
    ("get", "/v1/models"): ("The one model that is served", None, "use"),
    ("get", "/v1/models/{name}"): ("That model", None, "use"),
    ("get", "/health"): ("Whether the engine can serve", None, ""),
    ("get", "/ready"): ("Whether new requests are taken", None, ""),
    ("get", "/metrics"): ("Prometheus text", None, "admin"),
    ("get", "/cluster"): ("The workers of a cluster and what they hold", None, "admin"),
    ("get", "/status"): ("What the engine holds", None, "admin"),
    ("get", "/admin/cache"): ("What the KV tiers hold and have done", None, "admin"),
    ("post", "/admin/cache"): (
        "Pin, unpin or warm a prompt, purge a tenant, or write what waits",
        _object(
            ("action",),
            action=_one_of("pin", "unpin", "warm", "purge", "flush"),
            model=_STRING,
            prompt=_STRING,
            messages=_list(_OBJECT),
            tenant=_STRING,
            cache_salt={"type": "string", "minLength": 1, "maxLength": CACHE_SALT_CHARS_MAX},
        ),
        "admin",
    ),
    ("post", "/profile"): (
        "Trace the next steps",
        _object((), num_steps=_COUNT, timeout_s={"type": "number"}),
        "admin",
    ),
}

_ERROR = _object(
    ("error",),
    error=_object(
        ("message", "type"),
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    ),
)
_STATUS_TEXTS = {
    "400": "The body cannot be used; the error names the field",
    "401": "No key, or one that is not in force",
    "403": "The key lacks the scope",
    "404": "There is no such thing",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "429": "A quota is used up or the queue is full; see Retry-After",
    "503": "Stopping, or the engine is lost",
}


def document(version: str) -> _Schema:
    """The whole document, OpenAPI 3.1."""
    paths: dict[str, _Schema] = {}
    for (method, path), (summary, body, scope) in _ROUTES.items():
        paths.setdefault(path, {})[method] = _operation(path, summary, body, scope)
    return {
        "openapi": "3.1.0",
        "info": {"title": "deepinfer-jax", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, summary: str, body: _Schema | None, scope: str) -> _Schema:
    content = {"application/json": {}}
    if body is not None and "stream" in body["properties"]:
        content = {"application/json": {}, "text/event-stream": {}}
    if path == "/metrics":
        content = {"text/plain": {}}
    # The Messages dialect spells its errors in its own way.
    error: _Schema = {"schema": {"$ref": "#/components/schemas/Error"}}
    if path.startswith("/v1/messages"):
        error = {"schema": _OBJECT}
    operation: _Schema = {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": content}}
        | {
            status: {"description": text, "content": {"application/json": error}}
            for status, text in _STATUS_TEXTS.items()
        },
    }
    if scope:
        # Keys are needed only once there are any.
        operation["security"] = [{"bearer": []}, {"header": []}, {}]
        operation["description"] = f"Needs the scope {scope}."
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": _STRING}
        ]
    return operation
