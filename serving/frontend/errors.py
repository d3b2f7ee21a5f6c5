"""Errors as clients see them: a status code and an OpenAI-shaped body.

deepseek-recipe reports bad input through several exception types, mostly without the name of the
field at fault. This module turns each of them into one `ApiError`, naming the field where the
message or the request itself gives it away.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import deepseek_recipe
import msgspec

from serving.core.request import RequestError

JSON_DEPTH_MAX = 100
"""Levels of objects and lists in a body."""


class ApiError(Exception):
    """An answer other than success. `param` is the request field at fault, where known.

    `headers` are sent along with it.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        param: str | None = None,
        *,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers: list[tuple[bytes, bytes]] = []

    def body(self) -> bytes:
        """The JSON object `{"error": {...}}`."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, Any]:
        """What stands under `error`."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"message": self.detail, "type": kind, "param": self.param, "code": self.code}

    def message_fields(self) -> dict[str, Any]:
        """The whole body as the Messages dialect spells it."""
        kind = _MESSAGES_KINDS.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "overloaded_error" if self.status == 503 else "api_error"
        # This shape has no place for the name of a field.
        is_named = not self.param or self.param in self.detail
        message = self.detail if is_named else f"{self.param}: {self.detail}"
        return {"type": "error", "error": {"type": kind, "message": message}}


_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def bad_request(detail: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, detail, param, code=code)


def internal_error() -> ApiError:
    """A 500 that says nothing of its cause: that is for the log alone."""
    return ApiError(500, "The server met an internal error; its log has the details")


def unavailable(detail: str) -> ApiError:
    """A 503: the service cannot take requests now."""
    return ApiError(503, detail, code="unavailable", retry_after_s=5)


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body.

    Raises:
        ApiError: 400, it is not JSON or not an object.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(
            f"The body is not valid JSON: {error}", _field_out_of_range(raw, str(error))
        ) from None
    if not isinstance(body, dict):
        raise bad_request("The body is JSON but not an object; expected {...} with the request")
    if raw.count(b"{") + raw.count(b"[") > JSON_DEPTH_MAX:
        _check_depth(body)
    return body


def _field_out_of_range(raw: bytes, detail: str) -> str | None:
    """The field whose number is too large to be read, if `detail` says that one is."""
    if "out of range" not in detail:
        return None
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            try:
                msgspec.json.decode(value)
            except msgspec.DecodeError:
                return name
    return None


def _check_depth(body: object) -> None:
    """Raises ApiError 400 for what is nested deeper than what comes after may have to walk."""
    level: list[Any] = [body]
    for _ in range(JSON_DEPTH_MAX):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise bad_request(f"The body is nested deeper than {JSON_DEPTH_MAX} levels")


@contextmanager
def recipe_errors(body: Mapping[str, Any], known: "FieldTypes | None" = None) -> Iterator[None]:
    """Turns what deepseek-recipe raises for the request `body` into an `ApiError`.

    `known` are the fields of its dialect; those of chats if nothing is given.
    """
    known = known or CHAT_FIELDS
    try:
        yield
    except deepseek_recipe.ConversionError as error:
        raise _of_conversion(error, known) from None
    except RequestError as error:
        raise bad_request(str(error), error.param) from None
    except RuntimeError as error:
        raise _of_rendering(str(error)) from None
    except (ValueError, OverflowError, TypeError) as error:
        # UnicodeEncodeError, for lone surrogates, is a ValueError too.
        raise bad_request(
            str(error),
            _mistyped_field(body, known)
            or _unreadable_field(body, known)
            or _named_field(str(error), known),
        ) from None


def _of_conversion(error: deepseek_recipe.ConversionError, known: "FieldTypes") -> ApiError:
    fields: dict[str, Any] = {}
    with suppress(msgspec.DecodeError, AttributeError):
        fields = msgspec.json.decode(error.body).get("error", {})
    detail = str(fields.get("message") or error)
    code = fields.get("code")
    if "maximum context" in detail:
        # Prompts that are too long by themselves are refused before this can be raised.
        return bad_request(detail, "max_tokens", "context_length_exceeded")
    if "Invalid json schema" in detail:
        return bad_request(detail, "response_format", code)
    if "no function named" in detail:
        return bad_request(detail.replace("'tool_call'", "tool_choice"), "tool_choice", code)
    if " function " in detail:
        return bad_request(detail, "tools", code)
    if "model names are" in detail:
        return bad_request(detail, "model", "model_not_found")
    return ApiError(error.status_code, detail, _named_field(detail, known), code=code)


def _of_rendering(detail: str) -> ApiError:
    """The prompt needs a special token that this model's tokenizer does not have."""
    match = re.search(r'special token "([^"]+)"', detail)
    if match is None:
        return bad_request(detail, "messages")
    token = match.group(1)
    if "DSML" in token:
        return bad_request(f"This model does not support tools: it has no {token} token", "tools")
    if "image" in token:
        return bad_request(f"This model does not take images: it has no {token} token", "messages")
    return bad_request(f"This model's tokenizer has no {token} token", "messages")


_INTEGER, _NUMBER = (int,), (int, float)


@dataclass(frozen=True, slots=True)
class FieldTypes:
    """The fields that a dialect has, by name, and those that no request can do without.

    `read` raises for a body that is not of the dialect, and `smallest` is one that is.
    """

    required: tuple[str, ...]
    types: Mapping[str, tuple[type, ...]]
    read: Callable[[Any], object]
    smallest: Mapping[str, Any]


_SHARED_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "max_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": _INTEGER,
    "n": _INTEGER,
    "top_logprobs": _INTEGER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logprobs": (bool,),
    "stream": (bool,),
    "stop": (str, list),
    "tools": (list,),
    "tool_choice": (str, dict),
    "response_format": (dict,),
    "stream_options": (dict,),
    "thinking": (dict,),
    "reasoning_effort": (str,),
}
CHAT_FIELDS = FieldTypes(
    ("model", "messages"),
    {"messages": (list,)} | _SHARED_TYPES,
    deepseek_recipe.ChatCompletionRequest,
    {"model": "-", "messages": []},
)
RESPONSES_FIELDS = FieldTypes(
    ("model",),
    _SHARED_TYPES
    | {
        "input": (str, list),
        "instructions": (str,),
        "max_output_tokens": _INTEGER,
        "text": (dict,),
        "reasoning": (dict,),
    },
    deepseek_recipe.ResponsesRequest,
    {"model": "-", "input": ""},
)
MESSAGES_FIELDS = FieldTypes(
    ("model", "messages"),
    {"messages": (list,), "system": (str, list), "stop_sequences": (list,)}
    | _SHARED_TYPES
    | {"tool_choice": (dict,)},
    deepseek_recipe.MessagesRequest,
    {"model": "-", "messages": [], "max_tokens": 1},
)
_UNSIGNED_MAX = {
    "max_tokens": 2**32 - 1,
    "max_output_tokens": 2**32 - 1,
    "seed": 2**64 - 1,
}


def _mistyped_field(body: Mapping[str, Any], known: FieldTypes) -> str | None:
    """The first field whose value cannot be of the type that the protocol gives it."""
    for name in known.required:
        if body.get(name) is None:
            return name
    for name, types in known.types.items():
        value = body.get(name)
        if value is None:
            continue
        is_bool = isinstance(value, bool) and bool not in types
        if is_bool or not isinstance(value, types):
            return name
        if name in _UNSIGNED_MAX and not 0 <= value <= _UNSIGNED_MAX[name]:
            return name
    return None


def _unreadable_field(body: Mapping[str, Any], known: FieldTypes) -> str | None:
    """The first field that makes a request unreadable which would be fine without it."""
    for name, value in body.items():
        try:
            known.read({**known.smallest, name: value})
        except (ValueError, OverflowError, TypeError):
            return name
    return None


def _named_field(detail: str, known: FieldTypes) -> str | None:
    """The field that a message speaks of, by the first word in it that is a field's name."""
    for word in re.findall(r"[a-z_]+", detail.lower()):
        if word in known.types and word != "model":
            return word
    return None
