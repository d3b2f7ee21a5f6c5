"""Reading the request fields that deepseek-recipe leaves to us, and refusing what we do not do.

A field that would change the answer and that we cannot honour is refused with a 400 that names
it; a field without influence on the answer (`user`, `metadata`, ...) is ignored.
"""

from collections.abc import Mapping
from typing import Any

from serving.core.request import RequestError, SamplingParams
from serving.frontend.errors import bad_request

STOP_STRINGS_MAX = 16

_Body = Mapping[str, Any]

# Values under which each field has no effect, so that a client that spells out defaults is served.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


def refuse_unsupported(body: _Body) -> None:
    """Raises ApiError 400 for the first field that asks for what is not supported."""
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is None:
            continue
        # 0 equals False in Python, so types are compared as well, numbers being one type.
        if not any(value == item and _kind(value) == _kind(item) for item in neutral):
            expected = f"expected {neutral[0]!r} or nothing" if neutral else "leave it out"
            raise bad_request(
                f"{name} is {_shown(value)}, which is not supported; {expected}", name
            )


def integer(body: _Body, name: str) -> int | None:
    """The integer under `name`, None when it is absent or null. Raises ApiError 400."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{name} is {_shown(value)}; expected an integer", name)
    return value


def number(body: _Body, name: str) -> float | None:
    """The number under `name`, None when it is absent or null. Raises ApiError 400."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name} is {_shown(value)}; expected a number", name)
    return float(value)


def boolean(body: _Body, name: str) -> bool:
    """The truth value under `name`, False when it is absent or null. Raises ApiError 400."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request(f"{name} is {_shown(value)}; expected true or false", name)
    return value


def stop_strings(body: _Body) -> tuple[str, ...]:
    """The stop strings, at most 16, none of them empty. Raises ApiError 400."""
    value = body.get("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    is_list = isinstance(strings, list) and all(isinstance(item, str) for item in strings)
    if not is_list or len(strings) > STOP_STRINGS_MAX or "" in strings:
        raise bad_request(
            f"stop is {_shown(value)}; expected a string or up to {STOP_STRINGS_MAX} strings, "
            "none of them empty",
            "stop",
        )
    return tuple(strings)


def include_usage(body: _Body, is_streamed: bool) -> bool:
    """Whether a final chunk with the usage is wanted. Raises ApiError 400."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request(
            f"stream_options is {_shown(options)}; expected an object", "stream_options"
        )
    if not is_streamed:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    return boolean(options, "include_usage")


def sampling_params(
    body: _Body, *, max_tokens: int, vocab_size: int, seed: int | None
) -> SamplingParams:
    """The sampling settings in the body.

    `top_k` of -1 and 0 both keep every token. Raises ApiError 400.
    """
    temperature, top_p = number(body, "temperature"), number(body, "top_p")
    top_k = integer(body, "top_k")
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if temperature is None else temperature,
            top_k=0 if top_k in (None, -1) else top_k,
            top_p=1.0 if top_p is None else top_p,
            seed=seed,
            stop_token_ids=_stop_token_ids(body, vocab_size),
            ignore_eos=boolean(body, "ignore_eos"),
        )
    except RequestError as error:
        raise bad_request(str(error), error.param) from None


def _stop_token_ids(body: _Body, vocab_size: int) -> tuple[int, ...]:
    value = body.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(is_token_id(item, vocab_size) for item in value):
        raise bad_request(
            f"stop_token_ids is {_shown(value)}; expected token ids from 0 to {vocab_size - 1}",
            "stop_token_ids",
        )
    return tuple(value)


def is_token_id(value: object, vocab_size: int) -> bool:
    """Whether a JSON value is an id of the vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _kind(value: object) -> type:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
