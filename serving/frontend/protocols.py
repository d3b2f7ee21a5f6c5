"""The API dialects: a request body in; engine requests, streamed chunks or one answer out.

deepseek-recipe converts Chat Completions, renders and encodes the prompt, and parses the tokens
that come back (reasoning, tool calls, stop strings, characters cut in two). What it does not know
of is read from the body beside it. Each other dialect has a module of its own.
"""

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import deepseek_recipe as recipe
import msgspec

from serving.clock import Clock
from serving.core.request import (
    TOOL_KINDS,
    FinishReason,
    OutputConstraint,
    Request,
    SamplingParams,
)
from serving.frontend import fields
from serving.frontend.conversion import (
    SentSchemas,
    ServedModel,
    constraint_of,
    convert,
    encode,
    tokens_left,
)
from serving.frontend.errors import ApiError, bad_request, decode_body, recipe_errors
from serving.frontend.gateway import Update
from serving.frontend.images import check_image_parts

DONE_EVENT = b"data: [DONE]\n\n"


class Call(Protocol):
    """One HTTP call, from the parsed body to the end of its answer."""

    @property
    def call_id(self) -> str:
        """What clients and records name the call by."""
        ...

    @property
    def requests(self) -> Sequence[Request]:
        """What the engine has to do."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether the answer goes out as server-sent events."""
        ...

    def opening(self) -> bytes:
        """The events that can be sent before the first token."""
        ...

    def feed(self, update: Update) -> bytes:
        """Takes news from the engine; returns the events to send for them, possibly none."""
        ...

    def is_over(self, index: int) -> bool:
        """Whether the text of request `index` has ended, by itself or by a stop string."""
        ...

    def closing(self) -> bytes:
        """The events after the last request's end."""
        ...

    def failing(self, error: ApiError) -> bytes:
        """The events that end a stream by a fault."""
        ...

    def num_reasoning_tokens(self) -> int:
        """The generated tokens that were thinking, as far as they are known by now."""
        ...

    def answer(self) -> bytes:
        """The JSON body of the whole answer, for calls that are not streamed."""
        ...


def event(json_text: str | bytes) -> bytes:
    """One server-sent event."""
    data = json_text.encode() if isinstance(json_text, str) else json_text
    return b"data: " + data + b"\n\n"


def failing_events(error: ApiError) -> bytes:
    """The events that end a stream of chunks by a fault."""
    return b"event: error\n" + event(error.body()) + DONE_EVENT


def make_call_id(prefix: str) -> str:
    """A name for one call that no other call has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def visible_tokens(update: Update, sampling: SamplingParams, eos: int | None) -> list[int]:
    """The tokens of an update that are text: all but the one that stopped the sequence."""
    tokens = update.token_ids
    if update.finish_reason is FinishReason.STOP and tokens:
        is_eos = tokens[-1] == eos and not sampling.ignore_eos
        if is_eos or tokens[-1] in sampling.stop_token_ids:
            return tokens[:-1]
    return tokens


def refuse_stop_strings(stop: Sequence[str], constraint: OutputConstraint | None) -> None:
    """Raise ApiError 400 for stop strings that could cut a constrained text short."""
    if stop and constraint is not None and constraint.kind not in TOOL_KINDS:
        raise bad_request(
            f"stop together with {constraint.param}: it could end the text before that has the "
            "wanted form; leave one of them out",
            "stop",
        )


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    """The usage object, counting every token that the engine sampled."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatCall:
    """A Chat Completions call.

    Raises:
        ApiError: 400, the body is not acceptable.
    """

    def __init__(self, raw: bytes, model: ServedModel, clock: Clock) -> None:
        body = decode_body(raw)
        fields.refuse_unsupported(body, fields.CHAT_NEUTRAL)
        renamed = _with_max_tokens(body)
        try:
            with recipe_errors(renamed):
                check_image_parts(body)
                request = recipe.ChatCompletionRequest(raw if renamed is body else renamed)
                converted = convert(request, model)
                prompt = encode(converted, model, "messages")
                max_tokens = tokens_left(converted, prompt, model, "messages")
        except ApiError as error:
            if error.param == "max_tokens" and renamed is not body:
                error.param = "max_completion_tokens"
            raise
        options = converted.inference_options
        sampling = fields.sampling_params(
            body,
            max_tokens=max_tokens,
            vocab_size=model.vocab_size,
            seed=options.seed,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )
        constraint = constraint_of(body, converted, _sent_schemas(body))
        refuse_stop_strings(converted.parsing_options.stop_sequences, constraint)
        self.is_streamed = converted.stream
        self._includes_usage = fields.include_usage(body, converted.stream)
        self._continuous_usage = fields.continuous_usage(body)
        self._model = model
        self.call_id = call_id = make_call_id("chatcmpl")
        self.requests = [
            Request(
                call_id,
                prompt.token_ids,
                sampling,
                clock.now_ns(),
                prompt.images,
                fields.cache_salt(body),
                constraint=constraint,
                priority=fields.priority(body),
            )
        ]
        self._num_generated = 0
        self._num_cached = 0
        self._usage: dict[str, Any] = {}
        self._response = recipe.ChatCompletionResponse(
            call_id, model.name, clock.unix_s(), len(prompt.token_ids), 0
        )
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, call_id, model.name)
        self._processor = recipe.StreamProcessor(
            generator, converted.parsing_options, model.codec.tokenizer
        )

    def opening(self) -> bytes:
        """The chunk with the role."""
        usage = recipe.PromptUsage(prompt_tokens=len(self.requests[0].prompt_token_ids))
        return self._take(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def feed(self, update: Update) -> bytes:
        """Parses the tokens of one update into chunks."""
        if self._processor.finished:
            return b""
        self._num_generated += len(update.token_ids)
        self._num_cached = update.num_cached_tokens
        tokens = visible_tokens(update, self.requests[0].sampling, self._model.eos_token_id)
        chunks: list[Any] = []
        if tokens:
            # The last token may be missing from `tokens`, but not from the reports.
            logprobs = [(entry.logprob, entry.top) for entry in update.logprobs[: len(tokens)]]
            chunk = recipe.InferenceChunk.tokens(tokens, logprobs or None)
            chunks += self._processor.push(chunk)
        if update.finish_reason is not None and not self._processor.finished:
            reason = recipe.InferenceFinishReason.Stop
            if update.finish_reason is FinishReason.LENGTH:
                reason = recipe.InferenceFinishReason.Length
            chunks += self._processor.push(recipe.InferenceChunk.finish(reason))
            chunks += self._processor.finish()
        return self._take(chunks)

    def is_over(self, index: int) -> bool:
        """Whether the text has ended."""
        return self._processor.finished

    def closing(self) -> bytes:
        """The chunk with the usage, where it is wanted, and the mark of the end."""
        if not self._includes_usage:
            return DONE_EVENT
        last = msgspec.json.decode(self._last_chunk)
        last.update(choices=[], usage=self._usage)
        return event(msgspec.json.encode(last)) + DONE_EVENT

    def failing(self, error: ApiError) -> bytes:
        """The error and the mark of the end."""
        return failing_events(error)

    def answer(self) -> bytes:
        """The `chat.completion` object."""
        body = msgspec.json.decode(self._response.to_json())
        body["usage"] = self._usage = self._counted(body.get("usage") or {})
        return msgspec.json.encode(body)

    def num_reasoning_tokens(self) -> int:
        """Those that the parser has found, 0 before the end."""
        details = self._usage.get("completion_tokens_details") or {}
        return details.get("reasoning_tokens", 0)

    def _take(self, chunks: Sequence[Any]) -> bytes:
        if not self.is_streamed:
            for chunk in chunks:
                self._response.accumulate(chunk)
            return b""
        texts = [chunk.to_json() for chunk in chunks]
        if self._processor.finished and texts:
            texts[-1] = self._finish_chunk(texts[-1])
        if self._continuous_usage:
            texts = [self._with_usage(text) for text in texts]
        return b"".join(event(text) for text in texts)

    def _finish_chunk(self, text: str) -> str:
        """The last chunk, its empty delta removed and its usage corrected or taken out."""
        self._last_chunk = text
        chunk = msgspec.json.decode(text)
        self._usage = self._counted(chunk.get("usage") or {})
        chunk["usage"] = None if self._includes_usage else self._usage
        for choice in chunk["choices"]:
            choice["delta"] = {}
        return msgspec.json.encode(chunk).decode()

    def _with_usage(self, text: str) -> str:
        """A chunk with the usage up to now."""
        chunk = msgspec.json.decode(text)
        if not chunk.get("usage"):
            prompt = len(self.requests[0].prompt_token_ids)
            chunk["usage"] = usage(prompt, self._num_generated, self._num_cached)
        return msgspec.json.encode(chunk).decode()

    def _counted(self, parsed: dict[str, Any]) -> dict[str, Any]:
        """The parser's usage with our counts: it does not see tokens that made no text."""
        prompt, cached = len(self.requests[0].prompt_token_ids), self._num_cached
        parsed.update(usage(prompt, self._num_generated, cached))
        details = parsed.get("completion_tokens_details") or {}
        if "reasoning_tokens" in details:
            # The parser counts tokens again that it held back for an unfinished character.
            details["reasoning_tokens"] = min(details["reasoning_tokens"], self._num_generated)
        parsed["prompt_cache_hit_tokens"] = cached
        parsed["prompt_cache_miss_tokens"] = prompt - cached
        return parsed


def _with_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """The body with `max_completion_tokens` under the name that deepseek-recipe reads."""
    if body.get("max_completion_tokens") is None:
        return body
    return body | {"max_tokens": body["max_completion_tokens"]}


def _sent_schemas(body: dict[str, Any]) -> SentSchemas:
    """The schemas in a chat request that deepseek-recipe has accepted."""
    wanted = body.get("response_format") or {}
    functions = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
    return SentSchemas(
        (wanted.get("json_schema") or {}).get("schema"),
        {function["name"]: function.get("parameters") for function in functions},
        "response_format",
    )
