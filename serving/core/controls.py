"""What a request may ask of its tokens beyond temperature, top_k and top_p, on the host: grammar,
biases, penalties, a floor of probability, and log probabilities.

Few requests ask for any. Those have a `SequenceControls`, and a step that contains one of them
carries a `StepControls`, made in `step_controls.py`; every other step has none and costs nothing.

Masks and counts follow from tokens that are known: the mask for a token depends on every token
before it. So a sequence with a grammar or penalties is planned only when its last token has come
back. Biases, floors and log probabilities need no such wait.

Drafts count as known in masks. With the results of a step come the drafts that wait on the device
for the next one; a grammar looks at them before that is planned. *Why not ahead of the results*:
the masks of a step would have to be made for drafts that the step before it makes, while it runs.

Penalties need to know how often each token has occurred. The device keeps these counts in the
sequence's state slot and is told what has changed (`CountEdits`).

A grammar that fails, which a legal one may do by growing too complex, ends its own request: the
failure is remembered here and reported with the next token.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.core.grammar import Grammar, GrammarError, GrammarState
from serving.core.request import Request, SamplingParams, TokenLogprob

IN_PROMPT = 1 << 15
"""Bit of a token's count that says that the prompt holds it; the rest counts the output."""

COUNT_MAX = IN_PROMPT - 1

NO_BIAS = 2**31 - 1
"""Stands where there is no token with a bias: an id past every vocabulary."""

ANY_TOKEN = -1
"""A word of a mask that allows all its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class CountEdits:
    """Changes of the counts of tokens that state slots hold, to be made before the step.

    Attributes:
        cleared: [C] int32, slots whose counts all become 0, before anything else.
        slots, tokens: [E] int32.  values: [E] int32, the counts to be written there.
    """

    cleared: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class StepControls:
    """The controls of a step of `R` rows and `M` sampled tokens, before padding.

    Attributes:
        adjusts: whether any row changes its logits.
        reports: whether any row wants log probabilities of sampled tokens.
        min_ps, repetition_penalties, presence_penalties, frequency_penalties: [R] float32.
        next_tokens: [R] int32, for rows that want log probabilities of their prompt: the token
            after their chunk, 0 after the last; -1 for other rows.
        bias_tokens: [R, LOGIT_BIASES_MAX] int32, padded with `NO_BIAS`.
        bias_values: [R, LOGIT_BIASES_MAX] float32.
        masks: [M, W] int32 bits of the tokens that may be sampled; None if any may.
        count_edits: None if no row has penalties.
    """

    adjusts: bool
    reports: bool
    min_ps: np.ndarray
    repetition_penalties: np.ndarray
    presence_penalties: np.ndarray
    frequency_penalties: np.ndarray
    next_tokens: np.ndarray
    bias_tokens: np.ndarray
    bias_values: np.ndarray
    masks: np.ndarray | None
    count_edits: CountEdits | None


class LogprobColumns(NamedTuple):
    """Log probabilities as columns, for N tokens.

    Attributes:
        chosen: [N] float32, of the token itself.
        top_tokens: [N, K] int32, the most likely tokens, the likeliest first.
        top: [N, K] float32, of those.
    """

    chosen: np.ndarray
    top_tokens: np.ndarray
    top: np.ndarray

    def entry(self, index: int, num_top: int) -> TokenLogprob:
        """That of one token, with the `num_top` most likely ones."""
        tokens, values = self.top_tokens[index, :num_top], self.top[index, :num_top]
        pairs = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprob(float(self.chosen[index]), pairs)


class StepReport(NamedTuple):
    """The log probabilities of a step, as far as its plan asks for them.

    Attributes:
        sampled: of every sampled token.
        prompt: of the token after each token of the step; None for a decode step.
    """

    sampled: LogprobColumns
    prompt: LogprobColumns | None


class SequenceControls:
    """The controls of one sequence, and how far they have come.

    Attributes:
        sampling: what the request asks for.
        grammar: the state of its grammar after the tokens that were sampled; None without one.
        failure: why the request has to end; None while it has not.
        drafts: those behind the last token, as far as the grammar allows them.
        prompt_logprobs: those found so far; the first token has none.
    """

    def __init__(self, request: Request, grammar: GrammarState | None) -> None:
        self.sampling = request.sampling
        self.grammar = grammar
        self.failure: str | None = None
        self.drafts: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self._prompt_ids = request.prompt_token_ids
        self._image_spans = [range(image.start, image.stop) for image in request.images]
        self._counts: dict[int, int] = {}
        self._num_counted = 0
        self._counted_at: tuple[int, int] | None = None

    @property
    def is_stepwise(self) -> bool:
        """Whether what the next token may be depends on all tokens before it."""
        return self.grammar is not None or self.sampling.has_penalties

    @property
    def adjusts(self) -> bool:
        """Whether the next token's logits are changed."""
        sampling = self.sampling
        is_masked = self.grammar is not None and not self.grammar.is_free
        return bool(
            is_masked or sampling.has_penalties or sampling.logit_bias or sampling.min_p > 0
        )

    def take_drafts(self, drafts: list[int]) -> int:
        """Take what is drafted behind the last token; how many of it may be verified.

        The first illegal draft is among these where tokens are drawn at random: to reject it is
        part of the draw. If it were left out, its place would be drawn from the whole distribution
        and not from what the drafter puts too little on, and so not be what the model says.
        """
        assert self.grammar is not None, "only grammars ask for drafts"
        if self.failure is not None:
            return 0
        self.drafts = drafts[: self.grammar.num_legal(drafts)]
        is_drawn = self.sampling.temperature > 0
        return min(len(self.drafts) + is_drawn, len(drafts))

    def fill_masks(self, num_drafts: int, masks: np.ndarray) -> None:
        """Write what may follow the last token and each of so many drafts into `masks` [M, W].

        Anything may follow an illegal draft, and what is behind it: nothing of that is kept.
        """
        masks[:] = ANY_TOKEN
        if self.grammar is None or self.failure is not None:
            return
        drafts = self.drafts[:num_drafts]
        try:
            self.grammar.fill_masks(drafts, masks[: len(drafts) + 1])
        except GrammarError as error:
            self.failure = str(error)
            masks[:] = ANY_TOKEN

    def advance(self, tokens: ListLike[int]) -> None:
        """Take tokens that were sampled."""
        if self.grammar is None or self.failure is not None:
            return
        try:
            self.grammar.advance(tokens)
        except GrammarError as error:
            self.failure = str(error)

    def next_prompt_token(self, stop: int) -> int:
        """For `StepControls.next_tokens`, of a row whose chunk ends before position `stop`."""
        is_wanted = self.sampling.prompt_logprobs is not None
        # Computed anew after a preemption: reported already.
        if not is_wanted or len(self.prompt_logprobs) >= len(self._prompt_ids):
            return -1
        return self._prompt_ids[stop] if stop < len(self._prompt_ids) else 0

    def add_prompt_logprobs(self, columns: LogprobColumns, first: int, start: int, n: int) -> None:
        """Take what was found after the prompt tokens `start` to `start + n - 1`.

        They stand from `first` on in `columns`.
        """
        num_top = self.sampling.prompt_logprobs
        if num_top is None:
            return
        begin = len(self.prompt_logprobs)
        for position in range(begin, min(start + n + 1, len(self._prompt_ids))):
            is_image = any(position in span for span in self._image_spans)
            entry = None if is_image else columns.entry(first + position - 1 - start, num_top)
            self.prompt_logprobs.append(entry)

    def count_edits(
        self, place: tuple[int, int], output_token_ids: ListLike[int]
    ) -> tuple[bool, dict[int, int]]:
        """What the device has to be told: whether to clear the slot, and counts by token.

        Args:
            place: names one stay in one slot; another one means that the counts are not there.
            output_token_ids: all tokens sampled so far.
        """
        is_new_place = place != self._counted_at
        if is_new_place:
            self._counted_at, self._num_counted = place, 0
            self._counts = dict.fromkeys(self._prompt_ids, IN_PROMPT)
        fresh = output_token_ids[self._num_counted :]
        self._num_counted = len(output_token_ids)
        for token in fresh:
            count = self._counts.get(token, 0)
            self._counts[token] = count + (count & COUNT_MAX < COUNT_MAX)
        changed = self._counts if is_new_place else {t: self._counts[t] for t in fresh}
        return is_new_place, dict(changed)


def controls_of(request: Request, grammar: Grammar | None) -> SequenceControls | None:
    """The controls that a request asks for, None if it asks for none.

    `grammar` is what its constraint was compiled to.
    """
    assert (grammar is None) == (request.constraint is None), "a constraint needs its grammar"
    if grammar is None and not _asks(request.sampling):
        return None
    return SequenceControls(request, None if grammar is None else grammar.start())


def _asks(sampling: SamplingParams) -> bool:
    return bool(
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.min_p > 0
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
    )
