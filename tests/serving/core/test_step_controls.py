"""Goal: the controls of a step stand at their rows, a mask at each sampled token, and results come
back to the rows that asked for them.

Method: a table of sequences with and without controls; steps written out by hand, among them
decode steps with drafts.
"""

import numpy as np

from serving.core.buckets import Bucket, StepKind
from serving.core.controls import (
    IN_PROMPT,
    NO_BIAS,
    LogprobColumns,
    StepControls,
    StepReport,
    controls_of,
)
from serving.core.grammar import mask_words
from serving.core.request import (
    ConstraintKind,
    FinishReason,
    OutputConstraint,
    Request,
    SamplingParams,
)
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.step_controls import (
    controlled_rows,
    plan_controls,
    take_prompt_report,
    take_tokens,
)
from serving.core.step_plan import StepPlan, StepResult
from tests.serving.core.vocabularies import SMALL, SMALL_VOCAB, ids_of

A, B, C = (ids_of(SMALL, letter)[0] for letter in "abc")
PLAIN = SamplingParams(max_tokens=20)


def table_of(*wanted: tuple[SamplingParams, str | None], num_drafts: int = 0) -> RunningTable:
    """A table whose rows 1, 2, ... hold prompts of three tokens, with these settings."""
    table = RunningTable(6, 9, block_size=4, context_blocks_max=4, num_drafts=num_drafts)
    for number, (sampling, pattern) in enumerate(wanted):
        constraint = None if pattern is None else OutputConstraint(ConstraintKind.REGEX, pattern)
        request = Request(str(number), (5, 6, 5), sampling, constraint=constraint)
        grammar = None if constraint is None else SMALL.compile(constraint)
        prompt = np.array(request.prompt_token_ids, np.int32)
        controls = controls_of(request, grammar)
        table.enter(Sequence(number, request, prompt, 1, (1,), 20, controls=controls))
    return table


def controls_at(
    table: RunningTable, kind: StepKind, rows: list[tuple[int, int, list[int]]]
) -> StepControls | None:
    """The controls of a step of rows (row, start, tokens)."""
    return plan_controls(
        table,
        kind,
        np.array([row for row, _, _ in rows]),
        np.array([start for _, start, _ in rows], np.int32),
        np.array([len(tokens) for _, _, tokens in rows], np.int32),
        SMALL_VOCAB,
    )


def legal(masks: np.ndarray | None, index: int) -> list[int] | None:
    """The tokens of one mask, None if it allows all."""
    assert masks is not None and masks.shape[1] == mask_words(SMALL_VOCAB)
    bits = np.unpackbits(masks[index].view(np.uint8), bitorder="little")[:SMALL_VOCAB]
    return None if bits.all() else np.flatnonzero(bits).tolist()


def append(table: RunningTable, row: int, *tokens: int) -> Sequence:
    sequence = table.sequences[row]
    assert sequence is not None
    sequence.output_token_ids.extend(tokens)
    table.num_tokens[row] += len(tokens)
    return sequence


def test_a_step_of_plain_rows_has_no_controls() -> None:
    table = table_of((PLAIN, None), (SamplingParams(min_p=0.5), None))
    assert controls_at(table, StepKind.PREFILL, [(1, 0, [5, 6, 5])]) is None
    assert controls_at(table, StepKind.PREFILL, [(2, 0, [5, 6, 5])]) is not None


def test_settings_stand_at_their_rows() -> None:
    wanted = SamplingParams(
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((7, 3.0), (9, -4.0)),
        logprobs=2,
    )
    table = table_of((PLAIN, None), (wanted, None))
    whole = [5, 6, 5]
    found = controls_at(table, StepKind.PREFILL, [(1, 0, whole), (2, 0, whole)])
    assert found is not None and found.adjusts and found.reports and found.masks is None
    assert found.min_ps.tolist() == [0, 0.5]
    assert found.repetition_penalties.tolist() == [1, 1.5]
    assert found.presence_penalties.tolist() == [0, -1]
    assert found.frequency_penalties.tolist() == [0, 2]
    assert found.next_tokens.tolist() == [-1, -1]
    assert found.bias_tokens[:, :3].tolist() == [[NO_BIAS] * 3, [7, 9, NO_BIAS]]
    assert found.bias_values[1, :3].tolist() == [3, -4, 0]
    edits = found.count_edits
    assert edits is not None and edits.cleared.tolist() == [2] and edits.slots.tolist() == [2, 2]
    assert dict(zip(edits.tokens.tolist(), edits.values.tolist(), strict=True)) == {
        5: IN_PROMPT,
        6: IN_PROMPT,
    }


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    wanted = SamplingParams(presence_penalty=1.0, logprobs=1, prompt_logprobs=1)
    table = table_of((wanted, "ab"))
    found = controls_at(table, StepKind.PREFILL, [(1, 0, [5, 6])])
    assert found is not None and not found.adjusts and not found.reports
    assert found.masks is None and found.count_edits is None
    assert found.next_tokens.tolist() == [5]
    found = controls_at(table, StepKind.PREFILL, [(1, 2, [5])])
    assert found is not None and found.adjusts and found.reports
    assert found.next_tokens.tolist() == [0] and legal(found.masks, 0) == [A]


def test_masks_of_rows_with_drafts() -> None:
    table = table_of((PLAIN, None), (PLAIN, "abc|ab*"), (PLAIN, "c"))
    append(table, 1, 9)
    controls = append(table, 2, A).controls
    assert controls is not None
    controls.advance([A])
    controls.take_drafts([B, B])
    rows = [(1, 3, [9, 8, 7]), (2, 3, [A, B]), (3, 2, [5])]
    found = controls_at(table, StepKind.DECODE, rows)
    assert found is not None and found.masks is not None and len(found.masks) == 6
    assert [legal(found.masks, index) for index in range(3)] == [None] * 3
    assert legal(found.masks, 3) == sorted([1, B]) and legal(found.masks, 4) == sorted([1, B, C])
    assert legal(found.masks, 5) == [C]


def test_only_rows_with_controls_are_asked_after_a_step() -> None:
    table = table_of((PLAIN, None), (SamplingParams(logprobs=1), None), (PLAIN, "a"))
    found = controlled_rows(table, np.array([1, 3, 2]))
    assert [(index, sequence.sequence_id) for index, sequence in found] == [(1, 2), (2, 1)]


def plan_of(kind: StepKind, starts: list[int], num_tokens: list[int]) -> StepPlan:
    none = np.zeros(0)
    return StepPlan(
        step_index=0,
        kind=kind,
        bucket=Bucket(4, 16, 1),
        sequence_ids=none,
        slots=none,
        starts=np.array(starts),
        num_tokens=np.array(num_tokens),
        token_ids=none,
        block_tables=none,
        temperatures=none,
        top_ks=none,
        top_ps=none,
        seeds=none,
    )


def report_of(count: int) -> StepReport:
    """Column i says -i."""
    column = np.arange(count, dtype=np.float32)
    tokens = np.arange(count)[:, None] + np.arange(3)
    columns = LogprobColumns(-column, tokens, -column[:, None] - np.arange(3, dtype=np.float32))
    return StepReport(columns, columns)


def result_of(report: StepReport | None = None, drafts: np.ndarray | None = None) -> StepResult:
    return StepResult(0, np.zeros(0, np.int32), report, drafts=drafts)


def test_log_probabilities_of_several_tokens_of_a_row() -> None:
    table = table_of((PLAIN, None), (SamplingParams(logprobs=2), None))
    sequence = append(table, 2, 8, 9, 7)
    plan = plan_of(StepKind.DECODE, [3, 3], [2, 4])
    delta = take_tokens(
        table, sequence, plan, 1, result_of(report_of(6)), sequence.delta((8, 9, 7))
    )
    assert [entry.logprob for entry in delta.logprobs] == [-2, -3, -4]
    assert delta.logprobs[0].top == ((2, -2.0), (3, -3.0))
    assert delta.finish_reason is None and delta.prompt_logprobs == ()
    plan = plan_of(StepKind.PREFILL, [0, 0], [2, 4])
    delta = take_tokens(table, sequence, plan, 1, result_of(report_of(6)), sequence.delta((8,)))
    assert [entry.logprob for entry in delta.logprobs] == [-1]


def test_the_prompt_is_reported_with_the_first_token() -> None:
    table = table_of((PLAIN, None), (SamplingParams(prompt_logprobs=0), None))
    sequence = append(table, 2, 8)
    plan = plan_of(StepKind.PREFILL, [0, 0], [2, 3])
    take_prompt_report(sequence, plan, 1, report_of(6))
    delta = take_tokens(table, sequence, plan, 1, result_of(report_of(6)), sequence.delta((8,)))
    values = [entry and entry.logprob for entry in delta.prompt_logprobs]
    assert values == [None, -2, -3] and delta.logprobs == ()
    append(table, 2, 9)
    later = take_tokens(table, sequence, plan, 1, result_of(), sequence.delta((9,)))
    assert later.prompt_logprobs == ()


def test_a_grammar_says_how_many_of_the_next_drafts_may_be_verified() -> None:
    table = table_of((PLAIN, None), (SamplingParams(20, 0), "ab*c"), num_drafts=3)
    assert table.num_usable_drafts[1:3].tolist() == [3, 0]
    plan = plan_of(StepKind.PREFILL, [0, 0], [3, 3])
    drafts = np.array([[9, 9, 9], [B, B, A]])
    sequence = append(table, 2, A)
    take_tokens(table, sequence, plan, 1, result_of(drafts=drafts), sequence.delta((A,)))
    assert table.num_usable_drafts[1:3].tolist() == [3, 2]
    # Those who leave take their grammar along.
    table.leave(2, SequenceStatus.WAITING)
    table.enter(sequence)
    assert table.num_usable_drafts[2] == 0


def test_a_token_outside_the_grammar_ends_the_request() -> None:
    table = table_of((PLAIN, "ab"))
    sequence = append(table, 1, B)
    plan = plan_of(StepKind.PREFILL, [0], [3])
    delta = take_tokens(table, sequence, plan, 0, result_of(), sequence.delta((B,)))
    assert delta.finish_reason is FinishReason.ERROR and delta.error
