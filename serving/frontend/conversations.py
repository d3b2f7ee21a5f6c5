"""What the Responses and the Messages dialect share: one request, and events that have names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import deepseek_recipe as recipe
import msgspec

from serving.clock import Clock
from serving.core.request import OutputConstraint, Request
from serving.frontend import fields
from serving.frontend.answer_tokens import AnswerTokens, chunks_of
from serving.frontend.conversion import ServedModel, starts_thinking
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Update
from serving.frontend.images import EncodedPrompt
from serving.frontend.protocols import event


class ConversationCall(ABC):
    """One call whose answer deepseek-recipe writes as a series of named events.

    Subclasses say how their dialect spells usage and errors.

    Args:
        body: the request, already accepted by deepseek-recipe.
        generator: makes the events of the dialect.
        response: the class that adds the events up to one answer.
        usage_events: names of the events that hold the final usage.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        call_id: str,
        converted: recipe.ConversationRequest,
        prompt: EncodedPrompt,
        max_tokens: int,
        constraint: OutputConstraint | None,
        generator: Any,
        response: type[recipe.ResponsesResponse] | type[recipe.MessagesResponse],
        usage_events: Sequence[str],
        model: ServedModel,
        clock: Clock,
    ) -> None:
        options = converted.inference_options
        sampling = fields.sampling_params(
            body,
            max_tokens=max_tokens,
            vocab_size=model.vocab_size,
            seed=fields.integer(body, "seed"),
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )
        self.call_id = call_id
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
        self.is_streamed = converted.stream
        self._usage_events = frozenset(usage_events)
        self._response_type = response
        num_tokens = len(prompt.token_ids)
        self._response = response(call_id, model.name, clock.unix_s(), num_tokens, 0)
        self._processor = recipe.StreamProcessor(
            generator, converted.parsing_options, model.codec.tokenizer
        )
        self.tokens = AnswerTokens(
            sampling,
            model.eos_token_id,
            has_stops=bool(converted.parsing_options.stop_sequences),
            thinking_end=model.codec.thinking_end if starts_thinking(converted) else None,
        )
        self.num_events = 0

    def opening(self) -> bytes:
        """The events that say that an answer has begun."""
        usage = recipe.PromptUsage(prompt_tokens=len(self.requests[0].prompt_token_ids))
        return self._take(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def feed(self, update: Update) -> bytes:
        """Parses the tokens of one update into events."""
        if self._processor.finished:
            return b""
        return self._take(chunks_of(self._processor, self.tokens, update))

    def is_over(self, index: int) -> bool:
        """Whether the text has ended."""
        return self._processor.finished

    def closing(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def failing(self, error: ApiError) -> bytes:
        """The error as an event."""
        return _named_event("error", msgspec.json.encode(self._error_object(error)))

    def num_generated_tokens(self) -> int:
        """The tokens that were delivered."""
        return self.tokens.num_generated

    def num_reasoning_tokens(self) -> int:
        """The tokens before the end of thinking."""
        return self.tokens.num_reasoning

    def answer(self) -> bytes:
        """The whole answer as one object."""
        body = msgspec.json.decode(self._response.to_json())
        self._correct_usage(body)
        return msgspec.json.encode(body)

    def _take(self, events: Sequence[Any]) -> bytes:
        self.num_events += len(events)
        if not self.is_streamed:
            for item in events:
                self._response.accumulate(item)
            return b""
        return b"".join(self._shown(item) for item in events)

    def _shown(self, item: Any) -> bytes:
        name, text = self._response_type.sse_event_name(item), item.to_json()
        if name in self._usage_events:
            value = msgspec.json.decode(text)
            self._correct_usage(value.get("response", value))
            text = msgspec.json.encode(value)
        return _named_event(name or "message", text)

    @abstractmethod
    def _correct_usage(self, holder: dict[str, Any]) -> None:
        """Puts our counts into `holder["usage"]`: the parser misses tokens that made no text."""

    @abstractmethod
    def _error_object(self, error: ApiError) -> dict[str, Any]:
        """An error as the dialect spells it inside a stream."""


def _named_event(name: str, text: str | bytes) -> bytes:
    return f"event: {name}\n".encode() + event(text)
