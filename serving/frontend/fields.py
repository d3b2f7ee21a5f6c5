"""Reading the request fields that deepseek-recipe leaves to us, and refusing what we do not do.

A field that would change the answer and that we cannot honour is refused with a 400 that names
it; a field without influence on the answer (`user`, `metadata`, ...) is ignored.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from serving.core.forking import SAMPLES_MAX
from serving.core.lark_text import lark_literal
from serving.core.request import (
    PRIORITY_MAX,
    ConstraintKind,
    OutputConstraint,
    RequestError,
    SamplingParams,
)
from serving.frontend.errors import bad_request

STOP_STRINGS_MAX = 16
CACHE_SALT_CHARS_MAX = 256

_Body = Mapping[str, Any]

_FORMS: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "text": ({},),
    "output_format": (),
    "output_config": ({},),
}
"""Where the dialects ask for a form of the answer; each refuses what it does not know of them."""

# Values under which each field has no effect, so that a client that spells out defaults is served.
FOREIGN_NEUTRAL: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "lora_path": (),
}
"""Fields of vLLM and SGLang that change answers there; refused in every dialect."""

CHAT_NEUTRAL: dict[str, tuple[object, ...]] = {
    **{name: neutral for name, neutral in _FORMS.items() if name != "response_format"},
    "stop_sequences": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}

COMPLETIONS_NEUTRAL = CHAT_NEUTRAL | {
    "response_format": _FORMS["response_format"],
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}

RESPONSES_NEUTRAL: dict[str, tuple[object, ...]] = {
    **{name: neutral for name, neutral in _FORMS.items() if name != "text"},
    "stop_sequences": ([],),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "stop": (),
    "n": (1,),
}

MESSAGES_NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": _FORMS["response_format"],
    "text": _FORMS["text"],
    "stop": ([],),
    "mcp_servers": ([],),
    "container": (),
    "context_management": ({},),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
}


def refuse_unsupported(body: _Body, neutral_values: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ApiError 400 for the first field that asks for what is not supported.

    `neutral_values` are those of the dialect, `CHAT_NEUTRAL` or another.
    """
    for name, neutral in chain(neutral_values.items(), FOREIGN_NEUTRAL.items()):
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
    return _as_float(value, name)


def _as_float(value: float, name: str) -> float:
    """A number of JSON, whose integers have no bound. Raises ApiError 400."""
    try:
        return float(value)
    except OverflowError:
        raise bad_request(f"{name} is {_shown(value)}; expected a smaller number", name) from None


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


def continuous_usage(body: _Body) -> bool:
    """Whether every chunk is to carry the usage up to it. Raises ApiError 400."""
    return boolean(body.get("stream_options") or {}, "continuous_usage_stats")


def cache_salt(body: _Body) -> str:
    """What separates the cached prefixes of this request from those of others.

    Raises ApiError 400.
    """
    value = body.get("cache_salt")
    if value is None:
        return ""
    if not isinstance(value, str) or not value or len(value) > CACHE_SALT_CHARS_MAX:
        raise bad_request(
            f"cache_salt is {_shown(value)}; expected 1 to {CACHE_SALT_CHARS_MAX} characters",
            "cache_salt",
        )
    return value


def priority(body: _Body) -> int:
    """Who has a smaller number is served first; 0 when it is absent. Raises ApiError 400."""
    value = integer(body, "priority")
    if value is None:
        return 0
    if abs(value) > PRIORITY_MAX:
        raise bad_request(
            f"priority is {value}; expected -{PRIORITY_MAX} to {PRIORITY_MAX} (smaller ones are "
            "served first)",
            "priority",
        )
    return value


NO_THINKING = {"type": "disabled"}
"""What leaves out thinking, as the value of `thinking`."""


def check_tool_choice(body: _Body) -> None:
    """Raises ApiError 400 for a call that is demanded of tools that are not there."""
    if demands_call(body) and not body.get("tools"):
        raise bad_request(
            f"tool_choice is {_shown(body['tool_choice'])} without tools; expected tools, or auto "
            "or none",
            "tool_choice",
        )


def demands_call(body: _Body) -> bool:
    """Whether the answer must call a tool, in the words of any dialect."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind not in (None, "auto", "none")


def without_thinking(body: _Body, named: str, value: Mapping[str, str]) -> dict[str, Any]:
    """What to change so that a demanded call is made at once; nothing if none is demanded.

    The model makes demanded calls only when it does not think. Thinking is the default, so that a
    client which says nothing about it would never have one; who asks for both is refused.

    Args:
        named: the field that rules thinking in this dialect, and `value` what leaves it out.
    """
    config = body.get("output_config")
    efforts = body.get("reasoning_effort"), isinstance(config, dict) and config.get("effort")
    is_asked_for = body.get(named) is not None or any(efforts)
    return {} if is_asked_for or not demands_call(body) else {named: value}


def wants_one_call(body: _Body) -> bool:
    """Whether an answer may call one tool at most, in the words of any dialect.

    Raises ApiError 400.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and boolean(choice, "disable_parallel_tool_use"):
        return True
    return body.get("parallel_tool_calls") is not None and not boolean(body, "parallel_tool_calls")


def num_samples(body: _Body) -> int:
    """How many answers to each prompt are wanted, 1 when `n` is absent. Raises ApiError 400.

    All samples are answered, none is chosen from others; so `best_of` can only be the same number.
    """
    value = integer(body, "n")
    if value is None:
        value = 1
    if not 1 <= value <= SAMPLES_MAX:
        raise bad_request(f"n is {value}; expected 1 to {SAMPLES_MAX}", "n")
    best_of = integer(body, "best_of")
    if best_of not in (None, value):
        raise bad_request(
            f"best_of is {best_of}, which is not supported; expected {value}, as n, or nothing",
            "best_of",
        )
    return value


def sampling_params(
    body: _Body,
    *,
    max_tokens: int,
    vocab_size: int,
    seed: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling settings in the body.

    `logprobs` are read by the caller, since each dialect asks for them in its own way. `top_k` of
    -1 and 0 both keep every token. Raises ApiError 400.
    """
    neutral = SamplingParams()
    numbers = {
        name: number(body, name)
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    }
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
            logit_bias=_logit_bias(body, vocab_size),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{
                name: getattr(neutral, name) if value is None else value
                for name, value in numbers.items()
            },
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


def _logit_bias(body: _Body, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Pairs of token and bias of an object `{"token id": bias}`."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_request(
            f'logit_bias is {_shown(value)}; expected an object such as {{"50": -100}}',
            "logit_bias",
        )
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        # Python refuses to read integers of thousands of digits.
        is_id = key.isascii() and key.isdecimal() and len(key) <= len(str(vocab_size))
        token = int(key) if is_id else None
        if not is_token_id(token, vocab_size):
            raise bad_request(
                f"logit_bias names token {_shown(key)}; expected ids from 0 to {vocab_size - 1}",
                "logit_bias",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise bad_request(
                f"logit_bias of token {key} is {_shown(bias)}; expected a number from -100 to 100",
                "logit_bias",
            )
        pairs.append((int(key), _as_float(bias, "logit_bias")))
    return tuple(pairs)


def guided_constraint(body: _Body, *, after_thinking: bool) -> OutputConstraint | None:
    """The constraint that a field beyond the public protocol asks for, None if none does.

    These are `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`, or an object
    `structured_outputs` with one of `json`, `regex`, `choice` and `grammar`. Raises ApiError 400.
    """
    found = [
        (f"guided_{name}", name, body[f"guided_{name}"])
        for name in GUIDES
        if body.get(f"guided_{name}") is not None
    ]
    nested = body.get("structured_outputs")
    if nested is not None:
        if not isinstance(nested, dict) or not nested.keys() <= GUIDES.keys():
            raise bad_request(
                f"structured_outputs is {_shown(nested)}; expected an object with one of "
                f"{', '.join(GUIDES)}",
                "structured_outputs",
            )
        found += [("structured_outputs", name, nested[name]) for name in nested]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(
            f"{param}.{name}" if param == "structured_outputs" else param
            for param, name, _ in found
        )
        raise bad_request(f"received {names}; expected at most one of them", found[1][0])
    param, name, value = found[0]
    kind, text = _guide(param, name, value)
    return OutputConstraint(kind, text, after_thinking, param)


GUIDES = {
    "json": ConstraintKind.JSON,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.GRAMMAR,
    "grammar": ConstraintKind.GRAMMAR,
}


def _guide(param: str, name: str, value: object) -> tuple[ConstraintKind, str]:
    """Kind and text of a constraint."""
    if name == "json":
        if not isinstance(value, dict | str):
            raise bad_request(f"{param} is {_shown(value)}; expected a JSON schema", param)
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return ConstraintKind.JSON, text
    if name == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(item, str) for item in value)
        ):
            raise bad_request(f"{param} is {_shown(value)}; expected a list of texts", param)
        literals = (lark_literal(item) for item in value)
        return ConstraintKind.GRAMMAR, f"start: {' | '.join(literals)}"
    if not isinstance(value, str) or not value:
        raise bad_request(f"{param} is {_shown(value)}; expected a text", param)
    return GUIDES[name], value


def is_token_id(value: object, vocab_size: int) -> bool:
    """Whether a JSON value is an id of the vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _kind(value: object) -> type:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
