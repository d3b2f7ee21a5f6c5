"""The controls of one step: collected from its rows before it, and their results taken after it.

Called only for steps that contain a sequence with controls.
"""

from typing import Any

import numpy as np
from msgspec.structs import replace

from serving.core.buckets import StepKind
from serving.core.controls import ANY_TOKEN, NO_BIAS, CountEdits, StepControls, StepReport
from serving.core.grammar import mask_words
from serving.core.request import LOGIT_BIASES_MAX, FinishReason, TokenDelta
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence
from serving.core.step_plan import StepPlan, StepResult


def plan_controls(
    table: RunningTable,
    kind: StepKind,
    rows: np.ndarray,
    starts: np.ndarray,
    num_tokens: np.ndarray,
    vocab_size: int,
) -> StepControls | None:
    """The controls of a step, None if no row has any. The arguments are as in its plan.

    Tokens of a decode row after its first one are drafts. If the row has a grammar, it knows them
    (`SequenceControls.take_drafts`).
    """
    is_controlled = table.is_controlled[rows]
    if not is_controlled.any():
        return None
    indexes = np.flatnonzero(is_controlled)
    builder = _StepBuilder(kind, rows, starts, num_tokens, vocab_size)
    for index in indexes.tolist():
        sequence = table.sequences[int(rows[index])]
        assert sequence is not None, f"row {rows[index]} is planned but empty"
        builder.add(index, sequence)
    return builder.finish()


def controlled_rows(table: RunningTable, slots: np.ndarray) -> list[tuple[int, Sequence]]:
    """(index, sequence) of the rows `slots` [R] whose sequence has controls, before a commit."""
    indexes = np.flatnonzero(table.is_controlled[slots] & (table.sequence_ids[slots] >= 0))
    found = [(index, table.sequences[int(slots[index])]) for index in indexes.tolist()]
    return [(index, sequence) for index, sequence in found if sequence is not None]


def take_prompt_report(sequence: Sequence, plan: StepPlan, index: int, report: StepReport) -> None:
    """Take the log probabilities of the prompt tokens after those of row `index` of a step."""
    assert sequence.controls is not None
    if report.prompt is not None:
        first = int(plan.num_tokens[:index].sum())
        start, num_tokens = int(plan.starts[index]), int(plan.num_tokens[index])
        sequence.controls.add_prompt_logprobs(report.prompt, first, start, num_tokens)


def take_tokens(
    table: RunningTable,
    sequence: Sequence,
    plan: StepPlan,
    index: int,
    result: StepResult,
    delta: TokenDelta,
) -> TokenDelta:
    """The delta of row `index` with what its controls have to say of it.

    Its reason is `ERROR` if the request has to end because of its grammar.
    """
    controls = sequence.controls
    assert controls is not None
    controls.advance(delta.token_ids)
    if controls.failure is not None:
        return replace(delta, finish_reason=FinishReason.ERROR, error=controls.failure)
    if controls.grammar is not None and result.drafts is not None and delta.finish_reason is None:
        drafts = result.drafts[index].tolist()
        table.num_usable_drafts[sequence.row] = controls.take_drafts(drafts)
    changes: dict[str, Any] = {}
    num_top = controls.sampling.logprobs
    if num_top is not None:
        report = result.report
        assert report is not None, f"step {plan.step_index} came back without log probabilities"
        decodes = plan.kind is StepKind.DECODE
        first = int(plan.num_tokens[:index].sum()) if decodes else index
        entries = [report.sampled.entry(first + n, num_top) for n in range(len(delta.token_ids))]
        changes["logprobs"] = tuple(entries)
    is_first = len(sequence.output_token_ids) == len(delta.token_ids)
    if controls.sampling.prompt_logprobs is not None and is_first:
        changes["prompt_logprobs"] = tuple(controls.prompt_logprobs)
    return replace(delta, **changes)


class _StepBuilder:
    """Collects the controls of the rows of one step."""

    def __init__(
        self,
        kind: StepKind,
        rows: np.ndarray,
        starts: np.ndarray,
        num_tokens: np.ndarray,
        vocab_size: int,
    ) -> None:
        num_rows = len(rows)
        self._rows, self._ends = rows, starts + num_tokens
        # A decode step samples after each token, a prefill step after each row.
        decodes = kind is StepKind.DECODE
        self._num_drafts = num_tokens - 1 if decodes else np.zeros(num_rows, np.int32)
        self._first_samples = np.cumsum(num_tokens) - num_tokens if decodes else np.arange(num_rows)
        num_samples = int(num_tokens.sum()) if decodes else num_rows
        self._mask_shape = (num_samples, mask_words(vocab_size))
        self._masks: np.ndarray | None = None
        self._adjusts = self._reports = False
        self._min_ps = np.zeros(num_rows, np.float32)
        self._repetition = np.ones(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._next_tokens = np.full(num_rows, -1, np.int32)
        self._bias_tokens = np.full((num_rows, LOGIT_BIASES_MAX), NO_BIAS, np.int32)
        self._bias_values = np.zeros((num_rows, LOGIT_BIASES_MAX), np.float32)
        self._cleared: list[int] = []
        self._edits: list[tuple[int, dict[int, int]]] = []

    def add(self, index: int, sequence: Sequence) -> None:
        """Row `index` of the step, of a sequence with controls."""
        controls = sequence.controls
        assert controls is not None, f"sequence {sequence.sequence_id} has no controls"
        sampling = controls.sampling
        self._next_tokens[index] = controls.next_prompt_token(int(self._ends[index]))
        if self._ends[index] < sequence.num_tokens:
            return  # A chunk that is not the last: its token means nothing.
        self._reports |= sampling.logprobs is not None
        num_drafts = int(self._num_drafts[index])
        # Text that is free now may not be after its drafts.
        if not (controls.adjusts or (num_drafts and controls.grammar is not None)):
            return
        self._adjusts = True
        self._min_ps[index] = sampling.min_p
        self._repetition[index] = sampling.repetition_penalty
        self._presence[index] = sampling.presence_penalty
        self._frequency[index] = sampling.frequency_penalty
        for number, (token, value) in enumerate(sampling.logit_bias):
            self._bias_tokens[index, number], self._bias_values[index, number] = token, value
        if controls.grammar is not None:
            if self._masks is None:
                self._masks = np.full(self._mask_shape, ANY_TOKEN, np.int32)
            first = int(self._first_samples[index])
            controls.fill_masks(num_drafts, self._masks[first : first + num_drafts + 1])
        if sampling.has_penalties:
            place = (sequence.row, sequence.num_preemptions)
            is_new, edits = controls.count_edits(place, sequence.output_token_ids)
            slot = int(self._rows[index])
            self._cleared += [slot] * is_new
            self._edits.append((slot, edits))

    def finish(self) -> StepControls:
        """The controls of the step."""
        return StepControls(
            adjusts=self._adjusts,
            reports=self._reports,
            min_ps=self._min_ps,
            repetition_penalties=self._repetition,
            presence_penalties=self._presence,
            frequency_penalties=self._frequency,
            next_tokens=self._next_tokens,
            bias_tokens=self._bias_tokens,
            bias_values=self._bias_values,
            masks=self._masks,
            count_edits=self._count_edits(),
        )

    def _count_edits(self) -> CountEdits | None:
        if not self._edits:
            return None
        lengths = [len(edits) for _, edits in self._edits]
        slots = np.array([slot for slot, _ in self._edits], np.int32)
        tokens = [token for _, edits in self._edits for token in edits]
        values = [value for _, edits in self._edits for value in edits.values()]
        return CountEdits(
            np.array(self._cleared, np.int32),
            np.repeat(slots, lengths),
            np.array(tokens, np.int32),
            np.array(values, np.int32),
        )
