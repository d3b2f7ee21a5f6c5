"""From exchanges to token ids: the V4.1 prompt format, and which tokens the model has to say."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import deepseek_recipe as recipe
import numpy as np

from scripts.tiny_model.tasks import Exchange
from scripts.tiny_model.words import PROPERTIES


@dataclass(frozen=True, slots=True)
class Encoded:
    """token_ids [T] int32 of a conversation; said [T] bool marks those that the model wrote."""

    token_ids: np.ndarray
    said: np.ndarray


def messages_of(exchanges: Sequence[Exchange], *, thinking: bool) -> list[Any]:
    """The messages of exchanges one after another, answers included."""
    messages: list[Any] = []
    for turn in (turn for exchange in exchanges for turn in exchange.turns):
        messages.append(recipe.UserMessage(turn.user))
        reasoning = turn.reasoning if thinking else None
        if turn.call is None:
            messages.append(recipe.AssistantMessage(turn.answer, reasoning_content=reasoning))
            continue
        name, arguments = turn.call
        call = recipe.ToolCall("0", name, json.dumps(arguments))
        messages.append(recipe.AssistantMessage("", reasoning_content=reasoning, tool_calls=[call]))
        messages.append(recipe.ToolMessage(turn.result, "0"))
        after = "The tool answered." if thinking else None
        messages.append(recipe.AssistantMessage(turn.answer, reasoning_content=after))
    return messages


def conversation_of(
    exchanges: Sequence[Exchange], *, thinking: bool, num_messages: int | None = None
) -> Any:
    """A conversation of the library; only its first messages if `num_messages` is given."""
    tools = [
        recipe.ToolDefinition(tool["name"], tool["description"], tool["parameters"])
        for exchange in exchanges
        for tool in exchange.tools
    ]
    wants_json = any(exchange.wants_json for exchange in exchanges)
    return recipe.Conversation(
        messages_of(exchanges, thinking=thinking)[:num_messages],
        thinking_mode=thinking,
        tools=tools,
        response_format="json_object" if wants_json else "text",
    )


class Codec:
    """Encodes conversations with the tokenizer in a file.

    Attributes:
        properties: int32 ids of the words that lists to remember speak of, a token each.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = recipe.Tokenizer.from_file(str(tokenizer_file))
        self._tokenizer = tokenizer
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
        tokens = ("Assistant", "Eos", "ThinkingStart", "ThinkingEnd")
        spelled = [getattr(recipe.SpecialToken, name).default_str() for name in tokens]
        self.properties = np.asarray(
            [tokenizer.encode(f" {word}")[0] for word in PROPERTIES], np.int32
        )
        self._assistant, self._eos, self._think, self._answer = (
            tokenizer.encode(text)[0] for text in spelled
        )

    def encode(self, exchanges: Sequence[Exchange], *, thinking: bool) -> Encoded:
        """A whole conversation, as the model would see and continue it turn by turn."""
        num_messages = None
        last = exchanges[-1].turns[-1]
        keeps_reasoning = any(exchange.tools for exchange in exchanges)
        if thinking and not keeps_reasoning:
            # The library drops the reasoning of answers that were given, also of the last one, so
            # that one is written behind its prompt.
            num_messages = -1
        conversation = conversation_of(exchanges, thinking=thinking, num_messages=num_messages)
        ids = self._encoding.encode(conversation)
        if num_messages is not None:
            ids += [*self._text(last.reasoning), self._answer, *self._text(last.answer), self._eos]
        token_ids = np.asarray(ids, np.int32)
        # What comes after the last answer is the prompt of a turn that nobody takes.
        end = int(np.flatnonzero(token_ids == self._eos)[-1]) + 1
        token_ids = token_ids[:end]
        said = np.zeros(end, bool)
        # An answer starts after the assistant marker and the think marker, which the prompt holds.
        starts = np.flatnonzero(token_ids == self._assistant) + 2
        ends = np.flatnonzero(token_ids == self._eos) + 1
        for start in starts:
            said[start : ends[np.searchsorted(ends, start, side="right")]] = True
        return Encoded(token_ids, said)

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def ends(self, encoded: Encoded) -> list[int]:
        """Where each answer ends, in tokens."""
        return [int(place) + 1 for place in np.flatnonzero(encoded.token_ids == self._eos)]

    def prompt(
        self, exchanges: Sequence[Exchange], *, thinking: bool, num_messages: int
    ) -> list[int]:
        """Token ids of the prompt that asks for the message after the first `num_messages`."""
        conversation = conversation_of(exchanges, thinking=thinking, num_messages=num_messages)
        return list(self._encoding.encode(conversation))


def training_exchanges(
    rng: Random, makers: dict[str, Any], weights: dict[str, int]
) -> list[Exchange]:
    """One to four exchanges for one conversation; tools and JSON mode stand alone."""
    names, shares = list(weights), list(weights.values())
    first = makers[rng.choices(names, shares)[0]](rng)
    exchanges = [first]
    if first.tools or first.wants_json:
        return exchanges
    for _ in range(rng.choice((0, 0, 1, 3))):
        more = makers[rng.choices(names, shares)[0]](rng)
        if not (more.tools or more.wants_json):
            exchanges.append(more)
    return exchanges
