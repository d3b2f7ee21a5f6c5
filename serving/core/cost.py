"""What a prefill step costs, predicted from its tokens and from the context they look back on.

The model has three terms. A step that computes chunks of `q` tokens, each behind `h` tokens of its
own sequence, takes

    base + sum over chunks of (token * q + pair * (q * h + q * q / 2))  milliseconds.

The linear term is what every token costs by itself: matrix products, experts, attention to a
bounded number of entries. The quadratic one counts pairs of a token and a position before it,
which the indexer scores; of `q` new tokens there are `q * h` pairs with what was there and about
`q * q / 2` among themselves. Pairs add up over the chunks of a prompt, so the predicted work of a
prompt does not depend on how it is cut, but for one base per step.

`fit_prefill_cost` finds the terms from measured steps, `PrefillCost.num_tokens_within` inverts
the model: how long may a chunk be that is to take so long. Everything is plain numbers, so the same
model serves the scheduler of one engine, balancers over many, and simulated devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import cast

import numpy as np


def num_pairs(num_tokens: float, num_before: float) -> float:
    """Pairs of a chunk of `num_tokens` behind `num_before`, as the model counts them."""
    return num_tokens * num_before + num_tokens * num_tokens / 2


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A measured prefill step: all its tokens, all its pairs (`num_pairs`), and how long it took.

    Tokens count as they are computed, padding included.
    """

    num_tokens: int
    num_pairs: float
    time_ms: float


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The terms of the model, in milliseconds: per step, per token, and per pair.

    Raises:
        ValueError: a term is negative or not finite, or all of them are 0.
    """

    base_ms: float
    token_ms: float
    pair_ms: float

    def __post_init__(self) -> None:
        terms = (self.base_ms, self.token_ms, self.pair_ms)
        if not all(math.isfinite(term) and term >= 0 for term in terms) or not any(terms):
            raise ValueError(
                f"base_ms, token_ms and pair_ms are {terms}; expected numbers of 0 or more, and "
                "one above 0"
            )

    def chunk_ms(self, num_tokens: float, num_before: float) -> float:
        """What a chunk of `num_tokens` behind `num_before` adds to the time of its step.

        With all tokens of a prompt that are not cached and the number of cached ones it is the
        work of the prompt.
        """
        return self.token_ms * num_tokens + self.pair_ms * num_pairs(num_tokens, num_before)

    def total_ms(self, num_tokens: float, num_pairs: float) -> float:
        """The time of a step with so many tokens and pairs in all its chunks."""
        return self.base_ms + self.token_ms * num_tokens + self.pair_ms * num_pairs

    def step_ms(self, chunks: Sequence[tuple[float, float]]) -> float:
        """The time of a step with chunks of (tokens, tokens before them)."""
        return self.base_ms + sum(self.chunk_ms(*chunk) for chunk in chunks)

    def num_tokens_within(
        self, budget_ms: float, num_before: int, limit: int, is_padding: bool = False
    ) -> int:
        """The largest chunk behind `num_before` tokens with `chunk_ms` of at most `budget_ms`.

        The budget is that of the chunk: whoever has one for a step takes `base_ms` off. The result
        is exact: one token more would exceed the budget as `chunk_ms` computes it.

        Args:
            limit: the most tokens wanted; 0 to this is returned.
            is_padding: the tokens take the place of padding whose linear time is counted already,
                so only pairs count.
        """
        token_ms = 0.0 if is_padding else self.token_ms

        def fits(num_tokens: int) -> bool:
            return token_ms * num_tokens + self.pair_ms * num_pairs(num_tokens, num_before) <= (
                budget_ms
            )

        if limit <= 0 or not fits(0):
            return 0
        if fits(limit):
            return limit
        # The positive root, in the form that loses no digits where the quadratic term is small.
        linear = token_ms + self.pair_ms * num_before
        root = math.sqrt(linear * linear + 2 * self.pair_ms * budget_ms)
        guess = min(int(2 * budget_ms / (linear + root)), limit)
        # Rounding may have put it off by a little, in either direction.
        while not fits(guess):
            guess -= 1
        while fits(guess + 1):
            guess += 1
        return guess


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A measured decode step: its rows, the tokens of all their contexts, and how long it took."""

    num_rows: int
    num_context: float
    time_ms: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What a decode step costs, in milliseconds: per step, per row, and per token of context."""

    base_ms: float
    row_ms: float
    context_ms: float

    def step_ms(self, num_rows: float, num_context: float) -> float:
        """The time of a step."""
        return self.base_ms + self.row_ms * num_rows + self.context_ms * num_context


def fit_decode_cost(samples: Sequence[DecodeSample]) -> DecodeCost:
    """As `fit_prefill_cost`, for decode steps."""
    return DecodeCost(*_fit([(s.num_rows, s.num_context, s.time_ms) for s in samples]))


def fit_prefill_cost(samples: Sequence[PrefillSample]) -> PrefillCost:
    """The terms with the least squared relative error over the samples, none of them negative.

    A term that the samples cannot tell from the others comes out as 0: samples of one length
    give no linear term beside the base.

    Raises:
        ValueError: there is no sample, or a time is not above 0.
    """
    return PrefillCost(*_fit([(s.num_tokens, s.num_pairs, s.time_ms) for s in samples]))


def _fit(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The base and what each of two counts costs, for samples of (count, count, time)."""
    times = np.array([time_ms for *_, time_ms in samples], np.float64)
    if not len(times) or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"times of samples are {times.tolist()}; expected some, all above 0")
    terms = np.array([(1, one, other) for one, other, _ in samples], np.float64)
    # Errors relative to the times, so that short steps count as much as long ones; columns of equal
    # size, because pairs are many orders of magnitude more than steps.
    terms /= times[:, None]
    scales = np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    terms /= scales
    best, least = np.zeros(3), math.inf
    # The best nonnegative terms are the best ones of some subset. Small subsets first: a larger
    # one has to be better by more than rounding.
    for count in (1, 2, 3):
        for subset in combinations(range(3), count):
            columns = list(subset)
            some = terms[:, columns]
            if np.linalg.matrix_rank(some, tol=1e-9) < count:
                continue
            inverse = cast(np.ndarray, np.linalg.pinv(some))
            found = inverse.sum(axis=1)
            error = float(np.square(some @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-12 * len(times):
                best, least = np.zeros(3), error
                best[columns] = found
    base_ms, one_ms, other_ms = (best / scales).tolist()
    return base_ms, one_ms, other_ms
