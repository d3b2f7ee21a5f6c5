"""The generated tokens of one answer: which are text, how many were delivered, how many thought.

A step may bring several tokens, and an update those of several steps. If a stop string ends the
text in the middle of them, those behind it were never delivered and are not counted, so that what
is billed is what the client got.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import deepseek_recipe as recipe

from serving.core.request import FinishReason, SamplingParams, TokenLogprob
from serving.frontend.gateway import Update
from serving.frontend.text import PlainDecoder, TextCodec

Piece = tuple[list[int], list[TokenLogprob]]
"""Tokens that are text, and their log probabilities if they were asked for."""


class AnswerTokens:
    """Counts of one answer, and the cutting of its updates into what can be parsed at once.

    Args:
        sampling: of the request.
        eos: the end-of-sequence token, if the model has one.
        has_stops: whether a stop string may end the text.
        thinking_end: the token that ends the thinking which the answer begins with; None if it
            begins with none, or if that is no single token.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos: int | None,
        *,
        has_stops: bool = False,
        thinking_end: int | None = None,
    ) -> None:
        self.num_generated = 0
        self.num_cached = 0
        self.num_reasoning = 0
        self._sampling = sampling
        self._eos = eos
        self._has_stops = has_stops
        self._thinking_end = thinking_end

    def is_plain(self, update: Update) -> bool:
        """Whether an update is tokens that are text, in one piece, and nothing else."""
        return update.finish_reason is None and not self._has_stops and not update.logprobs

    def take(self, update: Update) -> list[int]:
        """The tokens of a plain update, which count as delivered."""
        self.num_cached = update.num_cached_tokens
        self._count(update.token_ids)
        return update.token_ids

    def pieces(self, update: Update) -> Iterator[Piece]:
        """The visible tokens of an update, in one piece or, with stop strings, one by one.

        A piece counts as delivered once it has been taken. Whoever finds that the text has ended
        takes no more.
        """
        self.num_cached = update.num_cached_tokens
        visible = visible_tokens(update, self._sampling, self._eos)
        size = 1 if self._has_stops else max(len(visible), 1)
        for start in range(0, len(visible), size):
            piece = visible[start : start + size]
            self._count(piece)
            yield piece, update.logprobs[start : start + size]
        self._count(update.token_ids[len(visible) :])

    def _count(self, token_ids: Sequence[int]) -> None:
        self.num_generated += len(token_ids)
        if self._thinking_end is None:
            return
        if self._thinking_end in token_ids:
            self.num_reasoning += token_ids.index(self._thinking_end)
            self._thinking_end = None
        else:
            self.num_reasoning += len(token_ids)


def visible_tokens(update: Update, sampling: SamplingParams, eos: int | None) -> list[int]:
    """The tokens of an update that are text: all but the one that stopped the sequence."""
    tokens = update.token_ids
    if update.finish_reason is FinishReason.STOP and tokens:
        is_eos = tokens[-1] == eos and not sampling.ignore_eos
        if is_eos or tokens[-1] in sampling.stop_token_ids:
            return tokens[:-1]
    return tokens


def chunks_of(processor: Any, tokens: AnswerTokens, update: Update) -> list[Any]:
    """What deepseek-recipe's stream `processor` makes of an update, which `tokens` counts."""
    if tokens.is_plain(update):  # As most are.
        return processor.push(recipe.InferenceChunk.tokens(tokens.take(update)))
    chunks: list[Any] = []
    for visible, entries in tokens.pieces(update):
        logprobs = [(entry.logprob, entry.top) for entry in entries]
        chunks += processor.push(recipe.InferenceChunk.tokens(visible, logprobs or None))
        if processor.finished:
            return chunks
    if update.finish_reason is not None:
        reason = recipe.InferenceFinishReason.Stop
        if update.finish_reason is FinishReason.LENGTH:
            reason = recipe.InferenceFinishReason.Length
        chunks += processor.push(recipe.InferenceChunk.finish(reason))
        chunks += processor.finish()
    return chunks


class PlainAnswer:
    """An answer whose tokens are text and nothing else, up to a stop string.

    Attributes:
        text: what is certain of it.
        finish_reason: `stop` or `length` once it has ended.
        is_cut: whether a stop string has ended it.
        tokens: its counts.
        entries: tokens of the text and their log probabilities, if they were asked for.
    """

    def __init__(
        self, codec: TextCodec, sampling: SamplingParams, eos: int | None, stop: Sequence[str]
    ) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.is_cut = False
        self.tokens = AnswerTokens(sampling, eos, has_stops=bool(stop))
        self.entries: list[tuple[int, TokenLogprob]] = []
        self._decoder = PlainDecoder(codec, stop)

    def take(self, update: Update) -> str:
        """Adds an update; returns the text that it made certain."""
        new = ""
        for visible, logprobs in self.tokens.pieces(update):
            self.entries += zip(visible, logprobs, strict=False)
            text, self.is_cut = self._decoder.push(visible)
            new += text
            if self.is_cut:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and update.finish_reason is not None:
            new += self._decoder.finish()
            is_length = update.finish_reason is FinishReason.LENGTH
            self.finish_reason = "length" if is_length else "stop"
        self.text += new
        return new
