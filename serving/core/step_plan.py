"""The contract between host and device: what one step computes, and what came of it.

A plan is integer columns, one entry per row (sequence) of the step, so that it can be built,
packed, sent to another process and compared without touching a device. Columns are numpy arrays
that nobody writes to after construction.

*Why columns and not an object per row*: planning and packing a step of hundreds of rows has to
cost less than a millisecond of host time; walking that many Python objects does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.controls import StepControls, StepReport
from serving.core.kv_transfer import SwapInTimes
from serving.core.replay import StepTail
from serving.core.request import RequestImage

LAST_SAMPLED = -2
"""Stands among the token ids for the token that the row's slot has sampled last.

The device knows it before the host does. It is kept under the slot rather than under a row of the
step that sampled it, so that a step need not know which rows and shape the one before it had.
"""


@dataclass(frozen=True, slots=True)
class StepImage:
    """An image that a prefill step computes: all of it, from token `token_index` of the step.

    `features` are its rows (`core/image_features.py`) if it was encoded elsewhere.
    """

    token_index: int
    image: RequestImage
    features: np.ndarray | None = field(default=None, compare=False, repr=False)


_NO_COPIES = np.zeros((0, 2), np.int32)


def no_copies() -> np.ndarray:
    """[0, 2] int32, the state slots that a step without copies copies."""
    return _NO_COPIES


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, `R` rows and `T` tokens in all, before padding to `bucket`.

    Attributes:
        step_index: number of the step, strictly increasing within one engine.
        kind: prefill or decode.
        bucket: the compiled shape that will run.
        sequence_ids: [R] int64, the engine's own numbers of the sequences.
        slots: [R] int32, state slot of each row; never 0, which belongs to padding.
        starts: [R] int32, absolute position of each row's first token of this step. With drafts,
            a decode step in flight leaves open how many tokens it keeps; then this is the highest
            position that is possible, and the device knows the true one.
        num_tokens: [R] int32, tokens of each row in this step, at least 1.
        token_ids: [T] int32, the rows' tokens one row after another; `LAST_SAMPLED` for a token
            that a step in flight samples. Drafts are 0 here: they are on the device.
        block_tables: [R, bucket.num_blocks] int32, blocks of each row's context in order,
            padded with 0, which belongs to padding.
        temperatures: [R] float32.   top_ks: [R] int32.   top_ps: [R] float32.
        seeds: [R] int64.
        images: those whose tokens are among `token_ids`, in that order; none in a decode step.
        restores: [N, 2] int32, (snapshot slot, state slot) pairs that are copied, the first onto
            the second, before the step.
        snapshots: [M, 2] int32, (state slot, snapshot slot) pairs that are copied after the step.
        controls: what rows ask of their tokens beyond the columns above; None if none does.
        tail: what the upper layers compute; None for all, as in every decode step.
        parts: for a mesh with several ranks, of which each has rows and pools of its own, what each
            of them computes, None for nothing. The columns above are then those of all parts, one
            after another, and what is not a column (images, copies, controls) is in the parts only.
    """

    step_index: int
    kind: StepKind
    bucket: Bucket
    sequence_ids: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    token_ids: np.ndarray
    block_tables: np.ndarray
    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    seeds: np.ndarray
    images: tuple[StepImage, ...] = ()
    restores: np.ndarray = field(default_factory=no_copies)
    snapshots: np.ndarray = field(default_factory=no_copies)
    controls: StepControls | None = None
    tail: StepTail | None = None
    parts: tuple["StepPlan | None", ...] = ()

    @property
    def dp_ranks(self) -> np.ndarray:
        """[R] int32, the rank of each row: whose slots and blocks its numbers count."""
        counts = [0 if part is None else part.num_rows for part in self.parts] or [self.num_rows]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @property
    def num_rows(self) -> int:
        """Rows in use, at most `bucket.num_rows`."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the device sampled.

    Attributes:
        step_index: that of the plan.
        token_ids: [R] int32, the token after each row. From a device that drafts [R, N + 1]: the
            drafts that it accepted, the token that follows them, then -1.
        report: the log probabilities that the plan's controls ask for, None if they ask for none.
        confidences: [R, N] float32, of the drafts for the next step; None without drafts.
        drafts: [R, N] int32, those drafts, which only grammars ask for; None without drafts.
        elapsed_ms: how long the step had the device for itself; None if nobody measured.
        swap_in: how stored blocks came to the device for it; None if none did.
        parts: the results of the parts of its plan; none if that has none.
    """

    step_index: int
    token_ids: np.ndarray
    report: StepReport | None = None
    confidences: np.ndarray | None = None
    drafts: np.ndarray | None = None
    elapsed_ms: float | None = None
    swap_in: SwapInTimes | None = None
    parts: tuple["StepResult | None", ...] = ()


def check_result(result: StepResult, plan: StepPlan, num_drafts: int) -> None:
    """Raise `ValueError` unless `result` can be that of `plan`, the oldest one in flight."""
    if result.step_index != plan.step_index:
        raise ValueError(
            f"result of step {result.step_index}; expected step {plan.step_index}, the oldest "
            "in flight"
        )
    shape = (plan.num_rows, num_drafts + 1) if num_drafts else (plan.num_rows,)
    if result.token_ids.shape != shape:
        raise ValueError(
            f"result of step {plan.step_index} has token_ids of shape "
            f"{result.token_ids.shape}; expected {shape}"
        )


_COLUMNS = (
    "sequence_ids",
    "slots",
    "starts",
    "num_tokens",
    "token_ids",
    "block_tables",
    "temperatures",
    "top_ks",
    "top_ps",
    "seeds",
)


def join_plans(parts: Sequence[StepPlan | None], bucket: Bucket, step_index: int) -> StepPlan:
    """One step of a mesh from the parts of its ranks, which run in the same `bucket`.

    Each part keeps its own `step_index`, by which its rank knows it.
    """
    fitted = tuple(None if part is None else _in_bucket(part, bucket) for part in parts)
    some = [part for part in fitted if part is not None]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in some]) for name in _COLUMNS
    }
    return StepPlan(
        step_index=step_index, kind=some[0].kind, bucket=bucket, parts=fitted, **columns
    )


def _in_bucket(plan: StepPlan, bucket: Bucket) -> StepPlan:
    """The plan in a bucket that is as large as its own or larger."""
    missing = bucket.num_blocks - plan.bucket.num_blocks
    tables = np.pad(plan.block_tables, ((0, 0), (0, missing))) if missing else plan.block_tables
    return replace(plan, bucket=bucket, block_tables=tables)


def join_results(step_index: int, parts: Sequence[StepResult | None]) -> StepResult:
    """The result of a step of a mesh from those of its parts."""
    tokens = np.concatenate([part.token_ids for part in parts if part is not None])
    return StepResult(step_index, tokens, parts=tuple(parts))
