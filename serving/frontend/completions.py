"""The completions dialect: raw prompts, as text or token ids, one or many in a call."""

from typing import Any

import msgspec

from serving.clock import Clock
from serving.core.forking import fork
from serving.core.request import Request
from serving.frontend import fields
from serving.frontend.answer_tokens import PlainAnswer
from serving.frontend.conversion import ServedModel, check_room
from serving.frontend.errors import ApiError, bad_request, decode_body
from serving.frontend.gateway import Update
from serving.frontend.images import refuse_placeholders
from serving.frontend.protocols import (
    DONE_EVENT,
    event,
    failing_events,
    make_call_id,
    refuse_stop_strings,
    usage,
)

DEFAULT_MAX_TOKENS = 16
"""What the public protocol fixes for calls that do not say."""


class CompletionCall:
    """A Completions call with one or several prompts; each sample of each is an engine request.

    `prompts_max` bounds the prompts, and all samples together.

    Raises:
        ApiError: 400, the body is not acceptable.
    """

    def __init__(self, raw: bytes, model: ServedModel, clock: Clock, prompts_max: int) -> None:
        body = decode_body(raw)
        check_model(body, model)
        fields.refuse_unsupported(body, fields.COMPLETIONS_NEUTRAL)
        self.is_streamed = fields.boolean(body, "stream")
        self._includes_usage = fields.include_usage(body, self.is_streamed)
        self._continuous_usage = fields.continuous_usage(body)
        self._model = model
        self._created = clock.unix_s()
        self.call_id = make_call_id("cmpl")
        now_ns, seed = clock.now_ns(), fields.integer(body, "seed")
        logprobs, salt = _logprobs(body), fields.cache_salt(body)
        constraint = fields.guided_constraint(body, after_thinking=False)
        self.requests: list[Request] = []
        prompts = _prompts(body, model, prompts_max)
        self._num_samples = _num_samples(body, len(prompts), prompts_max)
        for index, prompt in enumerate(prompts):
            sampling = fields.sampling_params(
                body,
                max_tokens=_max_tokens(body, len(prompt), model),
                vocab_size=model.vocab_size,
                seed=seed,
                logprobs=logprobs,
            )
            request = Request(
                f"{self.call_id}-{index}",
                prompt,
                sampling,
                now_ns,
                cache_salt=salt,
                constraint=constraint,
                priority=fields.priority(body),
            )
            self.requests += fork(request, self._num_samples)
        stop = fields.stop_strings(body)
        refuse_stop_strings(stop, constraint)
        echoes = fields.boolean(body, "echo")
        self._texts = [_Text(model, request, stop, echoes) for request in self.requests]

    def opening(self) -> bytes:
        """Nothing: this dialect has no roles."""
        return b""

    def feed(self, update: Update) -> bytes:
        """Decodes the tokens of one update."""
        text = self._texts[update.index]
        if text.finish_reason is not None:
            return b""
        new = text.take(update)
        if not self.is_streamed or (not new and text.finish_reason is None):
            return b""
        logprobs = text.take_logprobs()
        return self._chunk([_choice(update.index, new, text.finish_reason, logprobs)])

    def is_over(self, index: int) -> bool:
        """Whether the text of a sample has ended."""
        return self._texts[index].finish_reason is not None

    def closing(self) -> bytes:
        """The chunk with the usage, where it is wanted, and the mark of the end."""
        return (self._chunk([], self._usage()) if self._includes_usage else b"") + DONE_EVENT

    def failing(self, error: ApiError) -> bytes:
        """The error and the mark of the end."""
        return failing_events(error)

    def num_generated_tokens(self) -> int:
        """The tokens of all samples that were delivered."""
        return sum(text.tokens.num_generated for text in self._texts)

    def num_reasoning_tokens(self) -> int:
        """None: raw text is not told apart."""
        return 0

    def answer(self) -> bytes:
        """The `text_completion` object."""
        choices = [
            _choice(index, text.text, text.finish_reason, text.take_logprobs())
            for index, text in enumerate(self._texts)
        ]
        return msgspec.json.encode(self._object(choices) | {"usage": self._usage()})

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = self._object(choices)
        if self._continuous_usage:
            chunk["usage"] = self._usage()
        elif self._includes_usage:
            chunk["usage"] = usage
        return event(msgspec.json.encode(chunk))

    def _usage(self) -> dict[str, Any]:
        # Prompts count once; what later samples reuse of them was computed for the first.
        firsts = slice(None, None, self._num_samples)
        return usage(
            sum(len(request.prompt_token_ids) for request in self.requests[firsts]),
            self.num_generated_tokens(),
            sum(text.tokens.num_cached for text in self._texts[firsts]),
        )


class _Text(PlainAnswer):
    """The text of one sample so far, behind its prompt if that is echoed."""

    def __init__(
        self, model: ServedModel, request: Request, stop: tuple[str, ...], echoes: bool
    ) -> None:
        super().__init__(model.codec, request.sampling, model.eos_token_id, stop)
        self._unsent = model.codec.decode(request.prompt_token_ids) if echoes else ""
        self._codec = model.codec
        self._has_logprobs = False
        self._offset = 0

    def take(self, update: Update) -> str:
        """Adds an update; returns the text that it made certain."""
        echo, self._unsent = self._unsent, ""
        self._has_logprobs |= bool(update.logprobs)
        self.text += echo
        return echo + super().take(update)

    def take_logprobs(self) -> dict[str, Any] | None:
        """The log probabilities since the last call, None if they are not wanted."""
        if not self._has_logprobs:
            return None
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, entry in self.entries:
            text = self._codec.decode([token])
            found["tokens"].append(text)
            found["token_logprobs"].append(entry.logprob)
            tops = {self._codec.decode([top]): value for top, value in reversed(entry.top)}
            found["top_logprobs"].append(tops or None)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        self.entries.clear()
        return found


def _choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(body: dict[str, Any]) -> int | None:
    """How many of the most likely tokens are wanted beside each token; None for no report."""
    if body.get("top_logprobs") is not None:
        raise bad_request(
            "top_logprobs belongs to chats; for completions logprobs is the number of tokens",
            "top_logprobs",
        )
    wanted = fields.integer(body, "logprobs")
    if wanted is not None and fields.boolean(body, "echo"):
        raise bad_request(
            "logprobs together with echo are not supported: the prompt has none; leave one out",
            "logprobs",
        )
    return wanted


def check_model(body: dict[str, Any], model: ServedModel) -> None:
    """Raises ApiError 400 for another model than the one that is served."""
    name = body.get("model")
    if not isinstance(name, str):
        raise bad_request(f"model is {name!r}; expected {model.name!r}", "model")
    if name != model.name:
        raise bad_request(
            f"The model {name!r} does not exist; expected {model.name!r}",
            "model",
            "model_not_found",
        )


def _num_samples(body: dict[str, Any], num_prompts: int, samples_max: int) -> int:
    """How many samples of each prompt are wanted."""
    num_samples = fields.num_samples(body)
    if num_samples * num_prompts > samples_max:
        raise bad_request(
            f"n is {num_samples} for {num_prompts} prompts; expected at most {samples_max} "
            "samples of all prompts together",
            "n",
        )
    return num_samples


def _prompts(body: dict[str, Any], model: ServedModel, prompts_max: int) -> list[tuple[int, ...]]:
    """The token ids of each prompt."""
    value = body.get("prompt")
    expected = "expected text, token ids, or a list of either"
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], str | list)
    ):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_request(f"prompt is missing or empty; {expected}", "prompt")
    if len(value) > prompts_max:
        raise bad_request(f"{len(value)} prompts; expected at most {prompts_max}", "prompt")
    return [_prompt(item, model, expected) for item in value]


def _prompt(value: object, model: ServedModel, expected: str) -> tuple[int, ...]:
    if isinstance(value, str):
        check_room(model.codec.fewest_tokens(len(value)), model, "prompt", "at least ")
        try:
            prompt = model.codec.encode_text(value)
        except ValueError as error:
            raise bad_request(f"prompt cannot be encoded: {error}", "prompt") from None
    elif isinstance(value, list):
        for index, token in enumerate(value):
            if not fields.is_token_id(token, model.vocab_size):
                raise bad_request(
                    f"token {index} of the prompt is {token!r}; expected an id from 0 to "
                    f"{model.vocab_size - 1}",
                    "prompt",
                )
        prompt = tuple(value)
    else:
        raise bad_request(f"prompt holds {value!r}; {expected}", "prompt")
    if not prompt:
        raise bad_request("prompt has no tokens; expected at least one", "prompt")
    refuse_placeholders(prompt, model.images.geometry, "prompt")
    return prompt


def _max_tokens(body: dict[str, Any], num_prompt_tokens: int, model: ServedModel) -> int:
    """The limit of generated tokens, checked against the room that the prompt leaves."""
    check_room(num_prompt_tokens, model, "prompt")
    left = model.context_max - num_prompt_tokens
    wanted = fields.integer(body, "max_tokens")
    if wanted is None:
        return min(DEFAULT_MAX_TOKENS, left)
    if not 1 <= wanted <= left:
        raise bad_request(
            f"max_tokens is {wanted}; expected 1 to {left}: the context holds "
            f"{model.context_max} tokens and the prompt has {num_prompt_tokens}",
            "max_tokens",
        )
    return wanted
