"""The API dialects: a request body in; engine requests, streamed chunks or one answer out.

deepseek-recipe converts Chat Completions, renders and encodes the prompt, and parses the tokens
that come back (reasoning, tool calls, stop strings, characters cut in two). What it does not know
of is read from the body beside it. `completions.py` is the second dialect.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import deepseek_recipe as recipe
import msgspec

from serving.clock import Clock
from serving.core.request import (
    TOOL_KINDS,
    ConstraintKind,
    FinishReason,
    OutputConstraint,
    Request,
    SamplingParams,
)
from serving.frontend import fields
from serving.frontend.errors import ApiError, bad_request, decode_body, recipe_errors
from serving.frontend.gateway import Update
from serving.frontend.images import EncodedPrompt, ImageReader, check_image_parts
from serving.frontend.text import TextCodec

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the dialects need to know of the model.

    `context_max` is the most tokens a prompt and its answer may have together; `images` reads the
    images of chats, or refuses them.
    """

    name: str
    codec: TextCodec
    vocab_size: int
    context_max: int
    eos_token_id: int | None
    images: ImageReader = ImageReader()


class Call(Protocol):
    """One HTTP call, from the parsed body to the end of its answer."""

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
        """The events after the last request's end, without the `[DONE]` mark."""
        ...

    def answer(self) -> bytes:
        """The JSON body of the whole answer, for calls that are not streamed."""
        ...


def event(json_text: str | bytes) -> bytes:
    """One server-sent event."""
    data = json_text.encode() if isinstance(json_text, str) else json_text
    return b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream by a fault; `[DONE]` follows it."""
    return b"event: error\n" + event(error.body())


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
        fields.refuse_unsupported(body)
        renamed = _with_max_tokens(body)
        try:
            with recipe_errors(renamed):
                converted, prompt, max_tokens = _convert(raw, body, renamed, model)
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
        constraint = _constraint(body, converted)
        refuse_stop_strings(converted.parsing_options.stop_sequences, constraint)
        self.is_streamed = converted.stream
        self._includes_usage = fields.include_usage(body, converted.stream)
        self._model = model
        call_id = make_call_id("chatcmpl")
        self.requests = [
            Request(
                call_id,
                prompt.token_ids,
                sampling,
                clock.now_ns(),
                prompt.images,
                constraint=constraint,
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
        """The chunk with the usage, where it is wanted."""
        if not self._includes_usage:
            return b""
        last = msgspec.json.decode(self._last_chunk)
        last.update(choices=[], usage=self._usage)
        return event(msgspec.json.encode(last))

    def answer(self) -> bytes:
        """The `chat.completion` object."""
        body = msgspec.json.decode(self._response.to_json())
        body["usage"] = self._counted(body.get("usage") or {})
        return msgspec.json.encode(body)

    def _take(self, chunks: Sequence[Any]) -> bytes:
        if not self.is_streamed:
            for chunk in chunks:
                self._response.accumulate(chunk)
            return b""
        texts = [chunk.to_json() for chunk in chunks]
        if self._processor.finished and texts:
            texts[-1] = self._finish_chunk(texts[-1])
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


_CONSTRAINT_PARAMS = {
    ConstraintKind.TOOL_CALL: "tools",
    ConstraintKind.TOOL_CALL_REQUIRED: "tool_choice",
}


def _constraint(
    body: dict[str, Any], converted: recipe.ConversationRequest
) -> OutputConstraint | None:
    """The form that the answer must have, by the public protocol or beyond it."""
    stage = converted.parsing_options.thinking_initial_stage
    after_thinking = stage is not None and stage.starts_in_reasoning()
    guided = fields.guided_constraint(body, after_thinking=after_thinking)
    wanted = converted.inference_options.output_constraint
    if wanted is None:
        return guided
    kind = ConstraintKind(wanted.kind)
    param = _CONSTRAINT_PARAMS.get(kind, "response_format")
    if guided is not None:
        raise bad_request(
            f"received {guided.param} and {param}; expected at most one of them", guided.param
        )
    text = _with_whole_schemas(kind, wanted.schema, body)
    return OutputConstraint(kind, text, after_thinking, param)


def _with_whole_schemas(kind: ConstraintKind, text: str, body: dict[str, Any]) -> str:
    """A constraint with the schemas as the client sent them.

    The converter drops limits such as `maxLength` from those that it is to hold strictly.
    """
    if kind is ConstraintKind.JSON and text:
        return msgspec.json.encode(body["response_format"]["json_schema"]["schema"]).decode()
    if kind in TOOL_KINDS:
        functions = [tool["function"] for tool in body["tools"] if "function" in tool]
        sent = {function["name"]: function for function in functions}
        tools = msgspec.json.decode(text)
        for tool in tools:
            function = sent.get(tool["function"]["name"])
            if function is not None:
                tool["function"]["parameters"] = function.get("parameters")
        return msgspec.json.encode(tools).decode()
    return text


def _convert(
    raw: bytes, body: dict[str, Any], renamed: dict[str, Any], model: ServedModel
) -> tuple[recipe.ConversationRequest, EncodedPrompt, int]:
    """The converted request, its prompt and its limit of generated tokens."""
    check_image_parts(body)
    options = (
        recipe.ConversionOptions()
        .with_special_tokens(model.codec.special_tokens)
        .with_model_versions_by_name({model.name: recipe.ModelVersion.DeepseekV41Flash})
        .with_thinking_max_tokens_upper_bound(model.context_max)
        .with_non_thinking_max_tokens_upper_bound(model.context_max)
    )
    request = recipe.ChatCompletionRequest(raw if renamed is body else renamed)
    converted = request.convert(options)
    conversation = converted.conversation
    num_chars = sum(len(message.content) for message in conversation.messages)
    _check_room(model.codec.fewest_tokens(num_chars), model, "at least ")
    prompt = model.images.encode(conversation, model.codec)
    num_tokens = len(prompt.token_ids)
    _check_room(num_tokens, model)
    return converted, prompt, converted.resolve_max_tokens(num_tokens, model.context_max)


def _check_room(num_tokens: int, model: ServedModel, how_sure: str = "") -> None:
    if num_tokens >= model.context_max:
        raise bad_request(
            f"The messages have {how_sure}{num_tokens} tokens; the context of "
            f"{model.context_max} needs room for one more",
            "messages",
            "context_length_exceeded",
        )
