"""The API dialects: a request body in; engine requests, streamed chunks or one answer out.

deepseek-recipe converts Chat Completions, renders and encodes the prompt, and parses the tokens
that come back (reasoning, tool calls, stop strings, characters cut in two). What it does not know
of is read from the body beside it. Each other dialect has a module of its own.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import deepseek_recipe as recipe
import msgspec

from serving.clock import Clock
from serving.core.forking import fork
from serving.core.request import (
    TOOL_KINDS,
    OutputConstraint,
    Request,
    SamplingParams,
)
from serving.frontend import fields
from serving.frontend.answer_tokens import AnswerTokens, chunks_of
from serving.frontend.conversion import (
    SentSchemas,
    ServedModel,
    chat_changes,
    constraint_of,
    convert,
    encode,
    starts_thinking,
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

    def num_generated_tokens(self) -> int:
        """The tokens that were delivered by now, those included that ended an answer."""
        ...

    def num_reasoning_tokens(self) -> int:
        """Those of them that were thinking."""
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


class _ChatSample:
    """One answer to a chat: what is parsed of it, and its counts."""

    def __init__(
        self,
        converted: Any,
        sampling: SamplingParams,
        call_id: str,
        model: ServedModel,
        created: int,
    ) -> None:
        options = converted.parsing_options
        self.is_thinking = starts_thinking(converted)
        self.tokens = AnswerTokens(
            sampling,
            model.eos_token_id,
            has_stops=bool(options.stop_sequences),
            thinking_end=model.codec.thinking_end if self.is_thinking else None,
        )
        self.usage: dict[str, Any] = {}
        self.response = recipe.ChatCompletionResponse(call_id, model.name, created, 0, 0)
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, call_id, model.name)
        self.processor = recipe.StreamProcessor(generator, options, model.codec.tokenizer)
        self.is_over = False

    def feed(self, update: Update) -> Sequence[Any]:
        """The chunks that come of an update."""
        chunks = chunks_of(self.processor, self.tokens, update)
        self.is_over = self.processor.finished
        return chunks


class ChatCall:
    """A Chat Completions call; each of its `n` samples is one engine request.

    Raises:
        ApiError: 400, the body is not acceptable.
    """

    def __init__(self, raw: bytes, model: ServedModel, clock: Clock) -> None:
        body = decode_body(raw)
        fields.refuse_unsupported(body, fields.CHAT_NEUTRAL)
        num_samples = fields.num_samples(body)
        renamed = _with_known_names(body)
        try:
            with recipe_errors(renamed):
                check_image_parts(body)
                request = recipe.ChatCompletionRequest(raw if renamed is body else renamed)
                converted = convert(request, model)
                prompt = encode(converted, model, "messages")
                max_tokens = tokens_left(converted, prompt, model, "messages")
        except ApiError as error:
            if error.param == "max_tokens" and body.get("max_completion_tokens") is not None:
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
        constraint = constraint_of(body, converted, sent_schemas(body))
        refuse_stop_strings(converted.parsing_options.stop_sequences, constraint)
        self.is_streamed = converted.stream
        self._includes_usage = fields.include_usage(body, converted.stream)
        self._continuous_usage = fields.continuous_usage(body)
        self._model = model
        self.call_id = call_id = make_call_id("chatcmpl")
        self.requests = fork(
            Request(
                call_id,
                prompt.token_ids,
                sampling,
                clock.now_ns(),
                prompt.images,
                fields.cache_salt(body),
                constraint=constraint,
                priority=fields.priority(body),
            ),
            num_samples,
        )
        self._num_prompt = len(prompt.token_ids)
        created = clock.unix_s()
        self._samples = [
            _ChatSample(converted, sampling, call_id, model, created) for _ in self.requests
        ]

    def opening(self) -> bytes:
        """The chunks with the roles."""
        usage = recipe.PromptUsage(prompt_tokens=self._num_prompt)
        ready = recipe.InferenceChunk.ready(prompt_usage=usage)
        return b"".join(
            self._take(index, sample.processor.push(ready))
            for index, sample in enumerate(self._samples)
        )

    def feed(self, update: Update) -> bytes:
        """Parses the tokens of one update into chunks."""
        sample = self._samples[update.index]
        if sample.is_over:
            return b""
        return self._take(update.index, sample.feed(update))

    def is_over(self, index: int) -> bool:
        """Whether the text of a sample has ended."""
        return self._samples[index].is_over

    def closing(self) -> bytes:
        """The chunk with the usage, where it is wanted, and the mark of the end."""
        if not self._includes_usage:
            return DONE_EVENT
        last = msgspec.json.decode(self._last_chunk)
        last.update(choices=[], usage=self._counted())
        return event(msgspec.json.encode(last)) + DONE_EVENT

    def failing(self, error: ApiError) -> bytes:
        """The error and the mark of the end."""
        return failing_events(error)

    def answer(self) -> bytes:
        """The `chat.completion` object."""
        bodies = [msgspec.json.decode(sample.response.to_json()) for sample in self._samples]
        for sample, body in zip(self._samples, bodies, strict=True):
            sample.usage = body.get("usage") or {}
        answer = bodies[0]
        answer["choices"] = [
            choice | {"index": index}
            for index, body in enumerate(bodies)
            for choice in body["choices"]
        ]
        answer["usage"] = self._counted()
        return msgspec.json.encode(answer)

    def num_generated_tokens(self) -> int:
        """The tokens of all samples that were delivered."""
        return sum(sample.tokens.num_generated for sample in self._samples)

    def num_reasoning_tokens(self) -> int:
        """The tokens of all samples before the end of thinking."""
        return sum(sample.tokens.num_reasoning for sample in self._samples)

    def _take(self, index: int, chunks: Sequence[Any]) -> bytes:
        sample = self._samples[index]
        if not self.is_streamed:
            for chunk in chunks:
                sample.response.accumulate(chunk)
            return b""
        if not chunks:
            return b""
        texts = [chunk.to_json() for chunk in chunks]
        if index:
            texts = [_with_index(text, index) for text in texts]
        if sample.is_over:
            texts[-1] = self._finish_chunk(sample, texts[-1])
        if self._continuous_usage:
            texts = [self._with_usage(text) for text in texts]
        if len(texts) == 1:  # As most are.
            return f"data: {texts[0]}\n\n".encode()
        return b"".join(event(text) for text in texts)

    def _finish_chunk(self, sample: _ChatSample, text: str) -> str:
        """The last chunk of a sample, its empty delta removed.

        Its usage is taken out, or corrected if it is the last chunk of the call.
        """
        self._last_chunk = text
        chunk = msgspec.json.decode(text)
        sample.usage = chunk.get("usage") or {}
        is_last = all(other.is_over for other in self._samples)
        chunk["usage"] = self._counted() if is_last and not self._includes_usage else None
        for choice in chunk["choices"]:
            choice["delta"] = {}
        return msgspec.json.encode(chunk).decode()

    def _with_usage(self, text: str) -> str:
        """A chunk with the usage up to now."""
        chunk = msgspec.json.decode(text)
        if not chunk.get("usage"):
            chunk["usage"] = self._counts()
        return msgspec.json.encode(chunk).decode()

    def _counts(self) -> dict[str, Any]:
        """Our counts: the prompt once, and the tokens of all samples."""
        num_cached = self._samples[0].tokens.num_cached
        return usage(self._num_prompt, self.num_generated_tokens(), num_cached)

    def _counted(self) -> dict[str, Any]:
        """The parser's usage with our counts: it does not see tokens that made no text."""
        counted = self._samples[0].usage | self._counts()
        if self._samples[0].is_thinking:
            details = counted.get("completion_tokens_details") or {}
            num_reasoning = {"reasoning_tokens": self.num_reasoning_tokens()}
            counted["completion_tokens_details"] = details | num_reasoning
        cached = self._samples[0].tokens.num_cached
        counted["prompt_cache_hit_tokens"] = cached
        counted["prompt_cache_miss_tokens"] = self._num_prompt - cached
        return counted


def _with_index(text: str, index: int) -> str:
    """A chunk as one of sample `index`; the parser knows of a single one."""
    chunk = msgspec.json.decode(text)
    for choice in chunk["choices"]:
        choice["index"] = index
    return msgspec.json.encode(chunk).decode()


def _with_known_names(body: dict[str, Any]) -> dict[str, Any]:
    """The body as deepseek-recipe reads it; the same object if that is no other.

    It knows `max_completion_tokens` under its older name, and single samples only.
    """
    changes = chat_changes(body)
    if body.get("max_completion_tokens") is not None:
        if body.get("max_tokens") not in (None, body["max_completion_tokens"]):
            raise bad_request(
                f"max_completion_tokens is {body['max_completion_tokens']!r} and max_tokens "
                f"{body['max_tokens']!r}; expected one of them, or the same in both",
                "max_completion_tokens",
            )
        changes["max_tokens"] = body["max_completion_tokens"]
    if body.get("n") is not None:
        changes["n"] = 1
    return body | changes if changes else body


def sent_schemas(body: Mapping[str, Any]) -> SentSchemas:
    """The schemas in a chat request that deepseek-recipe has accepted."""
    wanted = body.get("response_format") or {}
    functions = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
    return SentSchemas(
        (wanted.get("json_schema") or {}).get("schema"),
        {function["name"]: function.get("parameters") for function in functions},
        "response_format",
        wanted.get("type", "text") != "text",
    )
