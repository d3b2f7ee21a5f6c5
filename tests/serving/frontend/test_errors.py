"""Goal: every exception of deepseek-recipe becomes a client error with the field where it is known.

Method: real conversions that fail in each way, and bodies that are not JSON objects.
"""

from typing import Any

import deepseek_recipe as recipe
import msgspec
import pytest

from serving.core.request import RequestError
from serving.frontend.errors import ApiError, decode_body, recipe_errors, unavailable

OPTIONS = recipe.ConversionOptions().with_model_versions_by_name(
    {"tiny": recipe.ModelVersion.DeepseekV41Flash}
)


def converted(**changes: object) -> ApiError:
    """The error that a chat body leads to."""
    message = {"role": "user", "content": "x"}
    body: dict[str, Any] = {"model": "tiny", "messages": [message]} | changes
    with pytest.raises(ApiError) as caught, recipe_errors(body):
        recipe.ChatCompletionRequest(body).convert(OPTIONS)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "much"}, "top_p"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_conversion_errors_name_the_field(changes: dict[str, Any], param: str | None) -> None:
    error = converted(**changes)
    assert (error.status, error.param) == (400, param)
    assert error.detail


def test_unknown_model_has_the_code_that_clients_look_for() -> None:
    assert converted(model="other").code == "model_not_found"


def test_missing_special_tokens_say_what_is_not_supported() -> None:
    for token, word in (("｜DSML｜", "tools"), ("<｜image｜>", "images"), ("<x>", "<x>")):
        with pytest.raises(ApiError, match=word) as caught, recipe_errors({}):
            raise RuntimeError(f'failed: special token "{token}" is not in the added vocabulary')
        assert caught.value.status == 400


def test_own_request_errors_keep_their_field() -> None:
    with pytest.raises(ApiError) as caught, recipe_errors({}):
        raise RequestError("top_k is -5", "top_k")
    assert caught.value.param == "top_k"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"3", b"null"])
def test_bodies_that_are_no_objects(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(raw)
    assert caught.value.status == 400


def test_body_of_an_error_is_openai_shaped() -> None:
    body = msgspec.json.decode(ApiError(400, "no", "seed", code="c").body())
    assert body == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "seed", "code": "c"}
    }
    assert unavailable("x").fields()["type"] == "server_error"
    assert ApiError(429, "x").fields()["type"] == "rate_limit_error"


def test_bodies_nested_too_deep_are_refused() -> None:
    fits = b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert decode_body(fits)["a"]
    for raw in (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"a":' * 101 + b"1" + b"}" * 101):
        with pytest.raises(ApiError, match="nested deeper than 100 levels"):
            decode_body(raw)
    assert len(decode_body(b'{"a": [' + b"[]," * 500 + b"[]]}")["a"]) == 501, "wide is not deep"
