"""Goal: requests with grammars, penalties, biases and log probabilities get, token for token, what
they get alone and in order, whatever company, preemption and steps in flight do to them.

Method: a simulated device that obeys masks, keeps the counts that it is told to keep and makes up
log probabilities, against an oracle that walks one request by itself and counts its text anew.
"""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.buckets import StepKind
from serving.core.controls import IN_PROMPT, LogprobColumns, StepReport
from serving.core.grammar import Grammar, GrammarCompiler
from serving.core.request import (
    ConstraintKind,
    FinishReason,
    OutputConstraint,
    Request,
    RequestError,
    SamplingParams,
    TokenDelta,
)
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.packing import PackedStep
from tests.serving.engine import simulated_device as device
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_buckets,
    make_limits,
    step_on,
)
from tests.serving.engine.simulated_device import (
    EOS,
    VOCAB_SIZE,
    SimulatedDevice,
)

LETTERS = "abcdefghijklmnopqrstu"
THINK_END = len(LETTERS) + 1
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
TOKENIZER = {
    "added_tokens": [
        {"id": EOS, "content": "<eos>", "special": True, **_FLAGS},
        {"id": THINK_END, "content": "</think>", "special": True, **_FLAGS},
    ],
    "model": {
        "type": "BPE",
        "vocab": {"<eos>": EOS, "</think>": THINK_END}
        | {letter: i for i, letter in enumerate(LETTERS, 1)},
        "merges": [],
    },
    "pre_tokenizer": _BYTE_LEVEL,
    "decoder": _BYTE_LEVEL,
}
COMPILER = GrammarCompiler(json.dumps(TOKENIZER), VOCAB_SIZE, EOS)
DRAFT_BUCKETS = make_buckets(
    prefill=[(4, 8, 16), (4, 16, 16)], decode=[(1, 6, 16), (2, 8, 16), (6, 20, 16)]
)
PATTERNS = ["[a-c]+", "(ab|cd)*", "[a-u]{2,6}", "k", "[d-f]{3}"]


def legal_token(token: int, mask: np.ndarray) -> int:
    """The token, or the first one above it, around the end, that the mask allows."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    legal = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
    return min(legal, key=lambda other: (other < token, other))


def shifted(token: int, counts: np.ndarray, sampling: SamplingParams) -> int:
    """What a device does that takes bias, floor and counts [V] into account, one way or other."""
    shift = sum(biased + round(value) for biased, value in sampling.logit_bias)
    shift += round(10 * sampling.min_p)
    weights = np.arange(1, VOCAB_SIZE + 1)
    shift += round(2 * sampling.frequency_penalty) * int((counts % IN_PROMPT * weights).sum())
    shift += round(2 * sampling.presence_penalty) * int((counts % IN_PROMPT > 0) @ weights)
    shift += round(10 * sampling.repetition_penalty - 10) * int((counts > 0) @ weights)
    return (token + shift) % VOCAB_SIZE


def made_up(values: list[int]) -> LogprobColumns:
    """Minus each value; the likeliest tokens are the value and those after it."""
    column = np.array(values, np.int64)[:, None]
    top = -column.astype(np.float32) - np.arange(20)
    return LogprobColumns(-column[:, 0].astype(np.float32), column + np.arange(20), top)


class ControlledDevice(SimulatedDevice):
    """Obeys the controls of its plans."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # What others have left in a slot must not matter.
        self._counts = np.full((64, VOCAB_SIZE), 99)
        # By sequence: the length of its prompt, and its text. Masks change what a draft module
        # would propose as little as they change this, but without it few drafts would be legal.
        self.foreseen: dict[int, tuple[int, list[int]]] = {}

    def collect(self) -> StepResult:
        plan = self._plan = self.in_flight[0]
        controls = plan.controls
        self._samples: list[int] = []
        if controls is not None:
            self._edit_counts(plan)
        result = super().collect()
        if controls is None or not (controls.reports or (controls.next_tokens >= 0).any()):
            return result
        positions = [
            start + number
            for start, count in zip(plan.starts.tolist(), plan.num_tokens.tolist(), strict=True)
            for number in range(count)
        ]
        report = StepReport(made_up(self._samples), made_up(positions))
        return replace(result, report=report)

    def _chosen(self, plan: StepPlan, row: int, drafts: list[int], token: int) -> int:
        controls = plan.controls
        if controls is not None and controls.adjusts:
            counts = self._counts[plan.slots[row]].copy()
            np.add.at(counts, drafts, 1)
            token = shifted(token, counts, self._settings(plan, row))
            if controls.masks is not None:
                token = legal_token(token, controls.masks[len(self._samples)])
        self._samples.append(token)
        return token

    def _draft(self, step: PackedStep, row: int) -> None:
        """What the row will sample, and at every fourth place something else."""
        slot = int(step.slots[row])
        num_prompt, text = self.foreseen[int(self._plan.sequence_ids[row])]
        for place in range(self._num_drafts):
            index = int(self._lengths[slot]) - num_prompt + 1 + place
            token = text[index] if 0 <= index < len(text) else 1
            self._drafts[slot, place] = (token + (index % 4 == 3)) % VOCAB_SIZE

    def _edit_counts(self, plan: StepPlan) -> None:
        assert plan.controls is not None
        edits = plan.controls.count_edits
        if edits is not None:
            self._counts[edits.cleared] = 0
            self._counts[edits.slots, edits.tokens] = edits.values

    def _settings(self, plan: StepPlan, row: int) -> SamplingParams:
        controls = plan.controls
        assert controls is not None
        pairs = zip(controls.bias_tokens[row].tolist(), controls.bias_values[row], strict=True)
        return SamplingParams(
            min_p=float(controls.min_ps[row]),
            repetition_penalty=float(controls.repetition_penalties[row]),
            presence_penalty=float(controls.presence_penalties[row]),
            frequency_penalty=float(controls.frequency_penalties[row]),
            logit_bias=tuple((t, float(v)) for t, v in pairs if t < VOCAB_SIZE),
        )


def alone(request: Request, grammar: Grammar | None, seed: int, length_max: int) -> list[int]:
    """The tokens of a request that nothing disturbs."""
    wanted, state = request.sampling, None if grammar is None else grammar.start()
    settings = (wanted.temperature, wanted.top_k, wanted.top_p, seed)
    stops = set(wanted.stop_token_ids) | (set() if wanted.ignore_eos else {EOS})
    digest, text = device._EMPTY, list(request.prompt_token_ids)
    for token in text:
        digest = device._extend(digest, token)
    counts = np.zeros(VOCAB_SIZE, np.int64)
    counts[text] = IN_PROMPT
    output: list[int] = []
    while True:
        token = shifted(device._sample(digest, len(text), settings), counts, wanted)
        if state is not None:
            mask = np.zeros((1, 1), np.int32)
            state.fill_masks([], mask)
            token = legal_token(token, mask[0])
            state.advance([token])
        output.append(token)
        text.append(token)
        counts[token] += 1
        digest = device._extend(digest, token)
        if token in stops or len(output) == wanted.max_tokens or len(text) == length_max:
            return output


class ControlledEngine(CheckedEngine):
    """An engine whose requests may have controls; keeps all deltas."""

    def __init__(self, **limits: Any) -> None:
        made = make_limits(**limits)
        buckets = DRAFT_BUCKETS if made.num_drafts else BUCKETS
        super().__init__(made, buckets)
        self.device: ControlledDevice = ControlledDevice(made, buckets)
        self.deltas: dict[str, list[TokenDelta]] = {}

    def admit_controlled(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        pattern: str | None = None,
        priority: int = 0,
        after_thinking: bool = False,
    ) -> str:
        constraint = None
        if pattern is not None:
            constraint = OutputConstraint(ConstraintKind.REGEX, pattern, after_thinking)
        grammar = None if constraint is None else COMPILER.compile(constraint)
        name = f"request-{len(self._requests)}"
        request = Request(name, tuple(prompt), sampling, constraint=constraint, priority=priority)
        self.engine.admit(request, grammar)
        seed = sampling.seed if sampling.seed is not None else self._same_seeds.getrandbits(63)
        number = len(self._requests)
        self._requests[name], self.outputs[name], self.deltas[name] = request, [], []
        self.expected[name] = alone(request, grammar, seed, self.length_max)
        self.device.foreseen[number] = len(prompt), self.expected[name]
        self.check()
        return name

    def _take(self, deltas: list[TokenDelta]) -> None:
        super()._take(deltas)
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)

    def check_reports(self) -> None:
        for name, request in self._requests.items():
            wanted, deltas = request.sampling, self.deltas[name]
            entries = [entry for delta in deltas for entry in delta.logprobs]
            prompts = [entry for delta in deltas for entry in delta.prompt_logprobs]
            if wanted.logprobs is None:
                assert not entries
            else:
                assert [entry.logprob for entry in entries] == [-t for t in self.outputs[name]]
                assert {len(entry.top) for entry in entries} <= {wanted.logprobs}
            if wanted.prompt_logprobs is None or not self.outputs[name]:
                assert not prompts
            else:
                values = [None if entry is None else entry.logprob for entry in prompts]
                assert values == [None, *(-p for p in range(len(request.prompt_token_ids) - 1))]


def random_sampling(source: random.Random) -> SamplingParams:
    """Any mixture of controls, often none."""

    def sometimes(value: Any, neutral: Any) -> Any:
        return value if source.random() < 0.25 else neutral

    return SamplingParams(
        max_tokens=source.randint(1, 12),
        temperature=source.choice([0.0, 0.7]),
        seed=source.choice([None, 5]),
        min_p=sometimes(0.3, 0.0),
        repetition_penalty=sometimes(1.5, 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(-1.5, 0.0),
        logit_bias=sometimes(((3, 2.0), (7, -1.0)), ()),
        logprobs=sometimes(source.randint(0, 20), None),
        prompt_logprobs=sometimes(1, None),
    )


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.sampled_from([0, 5]))
def test_random_traces(seed: int, in_flight_max: int, num_drafts: int) -> None:
    source = random.Random(seed)
    checked = ControlledEngine(
        num_blocks=source.randint(6, 20),
        num_slots=source.randint(2, 6),
        context_max=source.choice([12, 24]),
        num_snapshots=source.choice([0, 3]),
        in_flight_max=in_flight_max,
        num_drafts=num_drafts,
    )
    for _ in range(10):
        length = source.randint(1, min(14, checked.length_max - 1))
        prompt = [(i * 5 + source.randint(0, 1)) % VOCAB_SIZE for i in range(length)]
        pattern = source.choice([None, None, *PATTERNS])
        priority = source.choice([0, 0, 0, 1, -1])
        sampling, thinks = random_sampling(source), source.random() < 0.3
        name = checked.admit_controlled(prompt, sampling, pattern, priority, thinks)
        step_on(checked, source, name, 4, abort_share=0.15)
    checked.drain()
    checked.check_reports()


def test_preemption_rebuilds_counts_and_keeps_grammars() -> None:
    checked = ControlledEngine(num_blocks=8, num_slots=4, context_max=24)
    for number in range(3):
        penalised = SamplingParams(max_tokens=14, temperature=0, frequency_penalty=1.0)
        checked.admit_controlled([1 + number] * 6, penalised, "[a-u]{14}")
    checked.drain()
    assert checked.engine.status().num_preemptions > 0


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_a_constrained_request_that_gives_way_to_an_urgent_one_keeps_to_its_grammar(
    in_flight_max: int,
) -> None:
    checked = ControlledEngine(num_slots=2, in_flight_max=in_flight_max)
    sampling = SamplingParams(max_tokens=12, temperature=0, frequency_penalty=1.0)
    name = checked.admit_controlled([1, 2, 3], sampling, "(abc)+d", priority=1)
    while len(checked.outputs[name]) < 5:
        checked.step()
    urgent = checked.admit_controlled([4], replace(sampling, max_tokens=2), "[a-c]+")
    checked.drain()
    assert list(checked.reasons) == [urgent, name]
    assert checked.engine.status().num_preemptions == 1


@pytest.mark.parametrize("in_flight_max", [1, 2])
@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        (SamplingParams(24, 0, ignore_eos=True, logprobs=2), None),
        (SamplingParams(24, 0, ignore_eos=True, logit_bias=((3, 0.2),), min_p=0.01), None),
        (SamplingParams(24, 0, ignore_eos=True, presence_penalty=0.1), None),
        (SamplingParams(24, 0), "[a-u]{24}"),
        (SamplingParams(24, 0.7, seed=3, logprobs=1), "([ab]{3}|[c-u]{2})+"),
    ],
)
def test_drafts_make_steps_fewer_whatever_controls_a_row_has(
    sampling: SamplingParams, pattern: str | None, in_flight_max: int
) -> None:
    num_steps = []
    for num_drafts in (0, 5):
        checked = ControlledEngine(num_drafts=num_drafts, in_flight_max=in_flight_max)
        checked.admit_controlled([1, 2, 3], sampling, pattern)
        checked.drain()
        checked.check_reports()
        num_steps.append(checked.engine.status().num_steps)
    assert 2 * num_steps[1] < num_steps[0]


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_a_step_may_hold_the_end_of_thinking_and_what_follows_it(in_flight_max: int) -> None:
    sampling = SamplingParams(40, 0, logprobs=0)
    num_across = 0
    for first in range(1, 23):
        checked = ControlledEngine(num_drafts=5, in_flight_max=in_flight_max)
        pattern = "(ab|cd|efg){4}"
        name = checked.admit_controlled([first, 2], sampling, pattern, after_thinking=True)
        checked.drain()
        checked.check_reports()
        text = checked.outputs[name]
        is_cut = checked.reasons[name] is FinishReason.LENGTH
        assert is_cut or THINK_END in text, "no answer ends in its thinking"
        if THINK_END in text:
            answer = text[text.index(THINK_END) + 1 :]
            assert is_cut or 4 * 2 < len(answer) <= 4 * 3 + 1 and answer[-1] == EOS
            steps = [delta.token_ids for delta in checked.deltas[name]]
            num_across += any(THINK_END in tokens[:-1] for tokens in steps)
    assert num_across > 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_step_goes_past_the_first_illegal_draft(temperature: float) -> None:
    checked = ControlledEngine(num_drafts=5)
    checked.admit_controlled([1, 2, 3], SamplingParams(24, temperature, seed=3), "(ab|cd){9}")
    row = checked.engine._sequences["request-0"]
    num_cut = 0
    while checked.engine.has_work:
        assert row.controls is not None and row.controls.grammar is not None
        plan = checked.plan()
        if plan is not None and plan.kind is StepKind.DECODE:
            in_slot = checked.device._drafts[row.row].tolist()
            num_legal = row.controls.grammar.num_legal(in_slot)
            assert row.controls.drafts == in_slot[:num_legal]
            room = row.length_limit - 1 - row.num_tokens
            judged = min(num_legal + (temperature > 0), 5, room)
            assert plan.num_tokens.tolist() == [1 + judged]
            num_cut += judged < min(5, room)
        checked.commit()
    assert num_cut > 0 and checked.engine.status().num_accepted[0] > 0


@pytest.mark.parametrize(
    ("sampling", "is_ahead"),
    [
        (SamplingParams(9, 0, ignore_eos=True, logprobs=2), True),
        (SamplingParams(9, 0, ignore_eos=True, logit_bias=((3, 2.0),)), True),
        (SamplingParams(9, 0, ignore_eos=True, frequency_penalty=0.5), False),
    ],
)
def test_only_controls_that_go_by_the_text_wait_for_it(
    sampling: SamplingParams, is_ahead: bool
) -> None:
    checked = ControlledEngine(in_flight_max=2)
    checked.admit_controlled([1, 2, 3], sampling)
    checked.drain()
    checked.check_reports()
    assert (checked.device.num_references > 0) == is_ahead


def test_a_text_that_the_vocabulary_cannot_write_is_refused() -> None:
    with pytest.raises(RequestError, match="no token of this model"):
        COMPILER.compile(OutputConstraint(ConstraintKind.REGEX, "x"))


def test_steps_without_controls_carry_none() -> None:
    checked = ControlledEngine()
    checked.admit_controlled([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    while checked.engine.has_work:
        plan = checked.plan()
        assert plan is not None and plan.controls is None
        checked.commit()


def test_controls_ask_for_no_more_than_they_need() -> None:
    checked = ControlledEngine()
    checked.admit_controlled([1, 2], SamplingParams(max_tokens=2, logprobs=1, ignore_eos=True))
    plan = checked.plan()
    assert plan is not None and plan.controls is not None
    assert plan.controls.reports and not plan.controls.adjusts
    assert plan.controls.masks is None and plan.controls.count_edits is None
    checked.drain()


def test_a_reported_prompt_is_computed_although_it_is_in_the_cache() -> None:
    checked = ControlledEngine(num_snapshots=4)
    prompt = [number % VOCAB_SIZE for number in range(1, 14)]
    for wanted, num_cached in ((None, 0), (None, 12), (2, 0)):
        sampling = SamplingParams(max_tokens=2, prompt_logprobs=wanted)
        name = checked.admit_controlled(prompt, sampling)
        checked.drain()
        assert checked.num_cached[name] == num_cached
    checked.check_reports()


def test_a_failing_grammar_ends_its_own_request() -> None:
    checked = ControlledEngine(in_flight_max=2)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    other = checked.admit_controlled([1, 2, 3], replace(sampling, ignore_eos=True))
    name = checked.admit_controlled([4, 5], sampling, "[a-u]{12}")
    checked.step()
    row = checked.engine._sequences[name]
    assert row.controls is not None and row.controls.grammar is not None
    while not checked.outputs[name]:
        checked.step()
    row.controls.failure = "the grammar is too complex"
    while name not in checked.reasons:
        checked.step()
    assert checked.reasons[name] is FinishReason.ERROR
    assert checked.deltas[name][-1].error == "the grammar is too complex"
    while other not in checked.reasons:
        checked.step()
    assert checked.outputs[other] == checked.expected[other]
    status = checked.engine.status()
    assert status.num_free_blocks == status.num_blocks


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(ignore_eos=True), "ignore_eos"),
        (SamplingParams(stop_token_ids=(3,)), "stop_token_ids"),
        (SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias"),
    ],
)
def test_contradictions_are_refused(sampling: SamplingParams, param: str) -> None:
    checked = ControlledEngine()
    with pytest.raises(RequestError) as caught:
        checked.admit_controlled([1], sampling, "[a-c]+")
    assert caught.value.param == param
