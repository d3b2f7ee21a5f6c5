"""How many rows each sequence verifies in a decode step: its last token and some of its drafts.

A draft is worth verifying while the chance that it survives outweighs the time its row costs. That
chance is the product of the confidences up to it, so it falls along a sequence, and taking the best
rates of a batch takes a prefix of every sequence. Three questions, in order:

1. `survival_rates`: how likely is each draft to be accepted;
2. `total_rows`: how many rows make the most tokens per time, given what steps of each compiled
   size cost. Time is a staircase, so the end of every stair is looked at, not only the next one;
3. `share_rows`: which sequences get them.

*Why two sets of rates.* Verification leaves the text exactly as the model would have written it
only if the choice to verify a draft does not depend on what was drafted after it. Sharing keeps
that by itself: a later draft has a lower rate and never decides about an earlier one. The total
does not, because it adds up rates of all drafts. So the total is chosen from the rates of the
round before the newest, and only the sharing uses the newest.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a decode step by its number of rows, one row a verified token.

    Attributes:
        sizes: compiled numbers of rows, ascending.
        times_ms: measured time of each size.
        slope_ms: how much longer a step really takes for each row of its size; below 0 counts as 0.
        sampling_ms: time per step that does not depend on its size.

    Raises:
        ValueError: there is no size, sizes do not ascend from 1 or more, a time is not above 0, or
            the numbers of sizes and times differ.
    """

    sizes: tuple[int, ...]
    times_ms: tuple[float, ...]
    slope_ms: float = 0.0
    sampling_ms: float = 0.0

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.times_ms):
            raise ValueError(
                f"{len(self.sizes)} sizes and {len(self.times_ms)} times; expected a time for "
                "every size"
            )
        if not self.sizes or any(
            size <= before for before, size in zip((0, *self.sizes), self.sizes, strict=False)
        ):
            raise ValueError(f"sizes are {self.sizes}; expected ascending numbers from 1 on")
        if not all(time > 0 for time in self.times_ms):
            raise ValueError(f"times_ms are {self.times_ms}; expected numbers above 0")
        if self.sampling_ms < 0:
            raise ValueError(f"sampling_ms is {self.sampling_ms}; expected 0 or more")

    def time_ms(self, num_rows: int) -> float:
        """Time of a step of so many rows; infinite past the largest size."""
        index = bisect_left(self.sizes, num_rows)
        if index == len(self.sizes):
            return math.inf
        slope_ms = max(self.slope_ms, 0.0)
        return self.times_ms[index] + slope_ms * self.sizes[index] + self.sampling_ms


def survival_rates(
    confidences: np.ndarray, is_known: np.ndarray, num_drafts: np.ndarray
) -> np.ndarray:
    """The chance of each draft to be accepted, [S, N] float64; 0 where there is no draft.

    Args:
        confidences: [S, N], the chance of each draft to be accepted if all before it are.
        is_known: [S] bool, false for a sequence whose confidences have not arrived: its drafts
            count as certain, so that they are not put off before anything is known of them.
        num_drafts: [S] integers, drafts that a sequence has and may use.
    """
    rates = confidences.cumprod(axis=1, dtype=np.float64)
    if not is_known.all():
        rates[~is_known] = 1.0
    if not (num_drafts >= rates.shape[1]).all():
        rates[~_is_draft(rates, num_drafts)] = 0.0
    return rates


def total_rows(rates: np.ndarray, num_drafts: np.ndarray, cost: StepCost | None) -> int:
    """The number of rows with the most expected tokens per time; of equals, the smallest.

    Args:
        rates: [S, N] survival rates, those of the round before the newest.
        num_drafts: [S] integers, drafts that may be verified now.
        cost: None when nothing was measured: then every draft is verified.

    Raises:
        ValueError: even one row for each sequence is more than the largest size.
    """
    num_sequences = len(rates)
    is_whole = (num_drafts >= rates.shape[1]).all()
    usable = rates.reshape(-1) if is_whole else rates[_is_draft(rates, num_drafts)]
    if cost is None:
        return num_sequences + len(usable)
    if num_sequences > cost.sizes[-1]:
        raise ValueError(
            f"{num_sequences} sequences; expected at most {cost.sizes[-1]}, the largest size of "
            "the cost table"
        )
    gains = np.sort(usable)[::-1].cumsum()
    # Between two sizes the time is that of the larger one and the gain grows, so that only the
    # ends of the stairs, and the last draft that gains anything, can be best.
    last = num_sequences + len(usable)
    ends = {min(max(size, num_sequences), last) for size in cost.sizes}
    num_gaining = int(np.count_nonzero(usable > 0))
    best, most = num_sequences, 0.0
    for total in sorted({num_sequences, num_sequences + num_gaining, *ends}):
        num_extra = total - num_sequences
        expected_tokens = num_sequences + (float(gains[num_extra - 1]) if num_extra else 0.0)
        per_ms = expected_tokens / cost.time_ms(total)
        if per_ms > most:
            best, most = total, per_ms
    return best


def share_rows(rates: np.ndarray, num_drafts: np.ndarray, total: int) -> np.ndarray:
    """Rows of each sequence, [S] int32: one, and one for each of its drafts among the best.

    `total` rows are shared out, fewer if there are not so many drafts. Of equal rates the lower
    sequence comes first, and within a sequence the earlier draft.

    Args:
        rates: [S, N] survival rates, the newest; they do not rise along a sequence.
        num_drafts: [S] integers, drafts that may be verified now.

    Raises:
        ValueError: `total` has not a row for every sequence.
    """
    num_sequences, drafts_max = rates.shape
    num_extra = total - num_sequences
    if num_extra < 0:
        raise ValueError(f"total is {total}; expected at least {num_sequences}, one per sequence")
    ranked = np.where(_is_draft(rates, num_drafts), rates, -1.0).reshape(-1)
    best = np.argsort(-ranked, kind="stable")[:num_extra]
    best = best[ranked[best] >= 0]
    extra = np.bincount(best // max(drafts_max, 1), minlength=num_sequences)
    return (1 + extra).astype(np.int32)


def _is_draft(rates: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    number = np.arange(int(rates.shape[1]))
    return number[None, :] < num_drafts[:, None]
