"""Goal: the engine serves every accepted request exactly once, with exactly the right tokens.

Method: a simulated device whose tokens can be worked out by hand, wrapped so that every call is
followed by a check of all counts; random traces of arrivals, aborts, plans and commits over small
pools; hand-made traces for each policy, limit and error.
"""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.buckets import StepKind
from serving.core.request import (
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    SamplingParams,
)
from serving.core.step_plan import StepResult
from serving.engine.engine import Engine, EngineLimits, run_step
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_buckets,
    make_limits,
    walk,
)
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import (
    EOS,
    VOCAB_SIZE,
    SimulatedDevice,
)

LONG = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


# --- random traces ------------------------------------------------------------

BUCKET_TABLES = [
    BUCKETS,
    make_buckets(prefill=[(1, 5, 12)], decode=[(1, 1, 12)]),
    make_buckets(prefill=[(4, 8, 16)], decode=[(6, 6, 16), (6, 13, 16), (6, 30, 16), (1, 6, 8)]),
    make_buckets(prefill=[(2, 16, 3), (3, 6, 12)], decode=[(4, 4, 4), (2, 2, 12)]),
]
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 8) | st.integers(12, 40),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([0.25, 1.0]),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.just(()) | st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple),
    ignore_eos=st.sampled_from([True, True, False]),
)
admissions = st.tuples(
    st.just("admit"),
    st.integers(1, 9) | st.integers(10, 40),
    samplings,
    st.sampled_from([0, 0, 0, -1, 2]),
)
events = st.one_of(
    *[admissions] * 4,
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("step"), st.integers(1, 12)),
)
engines = st.builds(
    lambda buckets, num_blocks, num_slots, context_max, in_flight_max, num_snapshots, num_drafts: (
        CheckedEngine(
            make_limits(
                num_blocks,
                num_slots,
                context_max,
                in_flight_max=in_flight_max,
                num_snapshots=num_snapshots,
                num_drafts=num_drafts,
            ),
            buckets,
        )
    ),
    st.sampled_from(BUCKET_TABLES),
    st.integers(3, 16),
    st.integers(2, 7),
    st.integers(6, 12) | st.integers(24, 48),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, 5, 20]),
    st.sampled_from([0, 0, 1, 5]),
)


@settings(max_examples=400)
@given(checked=engines, trace=st.lists(events, min_size=5, max_size=120))
def test_random_traces_end_with_the_right_tokens(
    checked: CheckedEngine, trace: list[tuple]
) -> None:
    def admit(length: int, sampling: SamplingParams, priority: int) -> list[str]:
        # Few different beginnings, so that prompts share them.
        prompt = prompt_of(length, len(checked.outputs) % 3)
        if length < checked.length_max:
            return [checked.admit(prompt, sampling, priority=priority)]
        with pytest.raises(RequestError):
            checked.admit(prompt, sampling)
        return []

    walk(checked, trace, admit)


@pytest.mark.parametrize("seed", range(4))
def test_crowded_traces_end_with_the_right_tokens(seed: int) -> None:
    """Uniform choices reach what hypothesis, which prefers small examples, seldom does."""
    source = random.Random(seed)
    num_preemptions = 0

    def admit() -> list[str]:
        length = source.randint(1, min(14, checked.length_max - 1))
        sampling = SamplingParams(source.randint(1, 40), 0.5, ignore_eos=True)
        prompt = prompt_of(length, len(checked.outputs) % 4)
        priority, owner = source.choice([0, 0, 1]), source.choice(["", "", "a", "b"])
        return [checked.admit(prompt, sampling, priority=priority, owner=owner)]

    for _ in range(30):
        limits = make_limits(
            num_blocks=source.randint(5, 14),
            num_slots=source.randint(3, 7),
            context_max=source.choice([24, 48]),
            in_flight_max=source.randint(1, 3),
            num_snapshots=source.choice([0, 2, 8]),
            num_drafts=source.choice([0, 0, 2, 5]),
        )
        checked = CheckedEngine(limits, source.choice(BUCKET_TABLES))
        trace: list[tuple] = []
        for _ in range(60):
            trace.append((source.choice(["admit", "plan", "commit", "step", "step"]),))
            if source.random() < 0.03:
                trace.append(("abort", source.randint(0, 99)))
        walk(checked, trace, admit)
        num_preemptions += checked.engine.status().num_preemptions
    assert num_preemptions > 20


def run_until(checked: CheckedEngine, moment: int) -> tuple[list[str], bool]:
    """Three requests, `moment` calls of plan and commit in turn; whether all had ended by then."""
    names = [checked.admit(prompt_of(length, length), LONG) for length in (3, 21, 9)]
    for index in range(moment):
        if index % 2:
            checked.commit()
        else:
            checked.plan()
    return names, not checked.engine.has_work


@pytest.mark.parametrize("in_flight_max", [1, 2])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_abort_at_every_moment_leaves_nothing_behind(victim: int, in_flight_max: int) -> None:
    limits = make_limits(num_blocks=16, in_flight_max=in_flight_max)
    moment, is_over = 0, False
    while not is_over:
        checked = CheckedEngine(limits, BUCKETS)
        names, is_over = run_until(checked, moment)
        checked.abort(names[victim])
        checked.drain()
        moment += 1
    assert moment > 30


# --- what a request gets ------------------------------------------------------


def test_finish_reasons() -> None:
    checked = CheckedEngine(make_limits(context_max=32), BUCKETS)
    by_length = checked.admit(prompt_of(5), SamplingParams(max_tokens=3, ignore_eos=True))
    by_context = checked.admit(prompt_of(20), SamplingParams(max_tokens=2**31 - 1, ignore_eos=True))
    aborted = checked.admit(prompt_of(7), LONG)
    for _ in range(6):
        checked.step()
    checked.abort(aborted)
    checked.drain()
    assert checked.reasons == {
        by_length: FinishReason.LENGTH,
        by_context: FinishReason.LENGTH,
        aborted: FinishReason.ABORT,
    }
    assert len(checked.outputs[by_length]) == 3
    assert len(checked.outputs[by_context]) == 12
    assert 0 < len(checked.outputs[aborted]) < 20


def test_stop_tokens_end_a_sequence_and_are_its_last_token() -> None:
    free = CheckedEngine(make_limits(), BUCKETS)
    name = free.admit(prompt_of(9), LONG)
    free.drain()
    tokens = free.outputs[name]
    assert len(tokens) == 20
    stop = next(token for token in tokens if token not in tokens[:4])
    unused = tuple(sorted(set(range(VOCAB_SIZE)) - set(tokens)))
    for stops in [(stop,), (*unused, stop)]:
        checked = CheckedEngine(make_limits(), BUCKETS)
        sampling = SamplingParams(20, 0, stop_token_ids=stops, ignore_eos=True)
        name = checked.admit(prompt_of(9), sampling)
        checked.drain()
        assert checked.outputs[name] == tokens[: tokens.index(stop) + 1]
        assert checked.reasons[name] is FinishReason.STOP


def test_eos_ends_a_sequence_unless_ignored() -> None:
    ends: dict[bool, int] = {}
    for ignore_eos in (False, True):
        checked = CheckedEngine(make_limits(), BUCKETS)
        sampling = SamplingParams(50, 0, ignore_eos=ignore_eos)
        names = [checked.admit(prompt_of(8, salt), sampling) for salt in range(4)]
        checked.drain()
        outputs = [checked.outputs[name] for name in names]
        ends[ignore_eos] = sum(output[-1] == EOS and len(output) < 50 for output in outputs)
        assert any(EOS in output[:-1] for output in outputs) == ignore_eos
    assert ends[False] > 0
    assert ends[True] == 0


def test_seeds_are_drawn_from_the_given_source_and_kept_when_given() -> None:
    seeds = []
    for source in (1, 1, 2):
        engine = Engine(make_limits(), BUCKETS, random.Random(source))
        engine.admit(Request("a", (1, 2), SamplingParams()))
        engine.admit(Request("b", (1, 2), SamplingParams(seed=2**63 - 1)))
        plan = engine.plan()
        assert plan is not None
        seeds.append(plan.seeds.tolist())
    assert seeds[0] == seeds[1] != seeds[2]
    assert [b for _, b in seeds] == [2**63 - 1] * 3


def test_run_step_drives_an_engine_and_is_quiet_without_work() -> None:
    limits = make_limits(in_flight_max=2)
    engine, device = Engine(limits, BUCKETS, random.Random(0)), SimulatedDevice(limits, BUCKETS)
    assert run_step(engine, device) == []
    engine.admit(Request("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
    deltas = []
    while engine.has_work:
        deltas += run_step(engine, device)
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1, 1]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.LENGTH]
    assert run_step(engine, device) == []


# --- preemption ---------------------------------------------------------------


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_preemption_does_not_change_tokens(in_flight_max: int) -> None:
    outputs = []
    for num_blocks in (100, 12):
        limits = make_limits(num_blocks, num_slots=6, in_flight_max=in_flight_max)
        checked = CheckedEngine(limits, BUCKETS)
        names = [checked.admit(prompt_of(4, salt), LONG) for salt in range(5)]
        checked.drain()
        outputs.append([checked.outputs[name] for name in names])
        num_preemptions = checked.engine.status().num_preemptions
        assert (num_preemptions > 0) == (num_blocks == 12)
    assert outputs[0] == outputs[1]


def test_the_oldest_is_never_preempted_and_the_youngest_comes_back_first() -> None:
    checked = CheckedEngine(make_limits(num_blocks=8, num_slots=4), BUCKETS)
    names = [checked.admit(prompt_of(4, salt), LONG) for salt in range(6)]
    checked.drain()
    assert checked.engine.status().num_preemptions > 2
    # The dictionary keeps the order in which the requests ended.
    assert list(checked.reasons) == names


# --- scheduling policy --------------------------------------------------------


@pytest.mark.parametrize("in_flight_max", [1, 2, 3])
def test_prefill_and_decode_alternate_while_both_have_work(in_flight_max: int) -> None:
    limits = make_limits(num_blocks=200, num_slots=9, in_flight_max=in_flight_max)
    checked = CheckedEngine(limits, BUCKETS)
    checked.admit(prompt_of(3), LONG)
    checked.step()
    num_before = len(checked.device.kinds)
    for salt in range(4):
        checked.admit(prompt_of(40, salt), SamplingParams(max_tokens=1, ignore_eos=True))
    checked.drain()
    kinds = checked.device.kinds[num_before:]
    last_prefill = max(i for i, kind in enumerate(kinds) if kind is StepKind.PREFILL)
    for first, second in zip(kinds[:last_prefill], kinds[1:], strict=False):
        assert first is not second
    assert last_prefill >= 18


class CountingDevice:
    """An executor that answers at once with token 1, for long contexts."""

    def __init__(self) -> None:
        self.plans: list = []

    def submit(self, plan: object) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan = self.plans[-1]
        num_tokens = plan.num_rows if plan.kind is StepKind.PREFILL else len(plan.token_ids)
        return StepResult(plan.step_index, np.ones(num_tokens, np.int32))


def long_engine(prefill: list[tuple[int, ...]]) -> Engine:
    num_blocks = 2048
    limits = EngineLimits(2 * num_blocks, 33, num_blocks * 128, VOCAB_SIZE, EOS)
    buckets = make_buckets(prefill, decode=[(32, 32, num_blocks)])
    return Engine(limits, buckets, random.Random(0))


@pytest.mark.parametrize(
    ("prefill", "num_chunks_max"), [([(16, 2048, 2048)], 2), ([(4, 1024, 2048)], 5)]
)
def test_short_prompts_pass_a_long_one(prefill: list[tuple[int, ...]], num_chunks_max: int) -> None:
    engine, device = long_engine(prefill), CountingDevice()
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.admit(Request("long", (1,) * 200_000, one))
    for index in range(10):
        engine.admit(Request(f"short-{index}", (1,) * 100, one))
    finished: list[str] = []
    for _ in range(num_chunks_max):
        finished += [delta.request_id for delta in run_step(engine, device)]
    assert sorted(finished) == [f"short-{index}" for index in range(10)]


@pytest.mark.parametrize(("num_rows", "share"), [(4, 1 / 2), (1, 1 / 3)])
def test_a_stream_of_short_prompts_does_not_stop_a_long_one(num_rows: int, share: float) -> None:
    engine, device = long_engine([(num_rows, 1024, 2048)]), CountingDevice()
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.admit(Request("long", (1,) * 20_000, one))
    finished: list[str] = []
    num_short = 0
    for _ in range(round(20_000 / 1024 / share) + 2):
        while engine.status().num_waiting < 20:
            engine.admit(Request(f"short-{num_short}", (1,) * 1000, one))
            num_short += 1
        finished += [delta.request_id for delta in run_step(engine, device)]
    assert "long" in finished
    assert len(finished) > 10


def test_a_prompt_without_room_is_overtaken_but_not_forever() -> None:
    checked = CheckedEngine(make_limits(num_blocks=14, num_slots=3, waiting_max=200), BUCKETS)
    checked.admit(prompt_of(20), LONG)
    checked.step()
    large = checked.admit(prompt_of(40), SamplingParams(max_tokens=2, ignore_eos=True))
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    smalls = [checked.admit(prompt_of(3, salt), short) for salt in range(60)]
    checked.drain()
    ended = list(checked.reasons)
    num_before = sum(ended.index(name) < ended.index(large) for name in smalls)
    assert 3 <= num_before <= 17


def test_decode_takes_turns_when_no_bucket_holds_all() -> None:
    buckets = make_buckets(prefill=[(4, 64, 16)], decode=[(2, 2, 16)])
    checked = CheckedEngine(make_limits(num_slots=6, num_blocks=200), buckets)
    names = [checked.admit(prompt_of(4, salt), LONG) for salt in range(5)]
    for _ in range(12):
        checked.step()
        lengths = [len(checked.outputs[name]) for name in names]
        # The fifth prompt needs a prefill step of its own, so it begins two tokens late.
        assert max(lengths) - min(lengths) <= 3
    checked.drain()


# --- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "words"),
    [
        ((), SamplingParams(), "prompt", ["no tokens"]),
        ((1, VOCAB_SIZE), SamplingParams(), "prompt", ["token 1", "23", "0 to 22"]),
        ((1, -1), SamplingParams(), "prompt", ["token 1", "-1", "0 to 22"]),
        ((1,) * 64, SamplingParams(), "prompt", ["64 tokens", "at most 63"]),
        ((1,) * 40, SamplingParams(), "prompt", ["40 tokens", "at most 39", "10 blocks of 4"]),
        ((1,), SamplingParams(stop_token_ids=(2**31 - 1,)), "stop_token_ids", ["token 0"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    prompt: tuple[int, ...], sampling: SamplingParams, param: str, words: list[str]
) -> None:
    engine = Engine(make_limits(num_blocks=11), BUCKETS, random.Random(0))
    with pytest.raises(RequestError) as caught:
        engine.admit(Request("a", prompt, sampling))
    assert caught.value.param == param
    for word in words:
        assert word in str(caught.value)
    assert not engine.has_work
    engine.admit(Request("a", (1,) * 39, SamplingParams()))


def test_a_request_id_in_use_is_refused() -> None:
    engine = Engine(make_limits(), BUCKETS, random.Random(0))
    request = Request("a", (1,), SamplingParams())
    engine.admit(request)
    with pytest.raises(RequestError, match="already running"):
        engine.admit(request)
    assert engine.abort("a") is not None
    assert engine.abort("a") is None
    engine.admit(request)


def test_the_queue_is_bounded() -> None:
    checked = CheckedEngine(make_limits(num_slots=3, waiting_max=2), BUCKETS)
    for salt in range(4):
        assert checked.admit(prompt_of(4, salt), LONG)
    with pytest.raises(QueueFullError) as caught:
        checked.admit(prompt_of(4), LONG)
    assert (caught.value.num_waiting, caught.value.waiting_max) == (4, 2)
    checked.step()
    with pytest.raises(QueueFullError):
        checked.admit(prompt_of(4), LONG)
    checked.abort("request-3")
    assert checked.admit(prompt_of(4), LONG)
    checked.drain()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"num_slots": 1}, "num_slots is 1"),
        ({"context_max": 1}, "context_max is 1"),
        ({"in_flight_max": 0}, "in_flight_max is 0"),
        ({"waiting_max": -1}, "waiting_max is -1"),
        ({"context_max": 65}, "at least 17 blocks"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(make_limits(**changes), BUCKETS, random.Random(0))


def test_results_must_belong_to_the_oldest_step() -> None:
    engine = Engine(make_limits(), BUCKETS, random.Random(0))
    with pytest.raises(ValueError, match="no step is in flight"):
        engine.commit(StepResult(0, np.ones(1, np.int32)))
    engine.admit(Request("a", (1,), SamplingParams()))
    assert engine.plan() is not None
    with pytest.raises(ValueError, match="expected step 0"):
        engine.commit(StepResult(1, np.ones(1, np.int32)))
    with pytest.raises(ValueError, match=r"expected \(1,\)"):
        engine.commit(StepResult(0, np.ones(2, np.int32)))
    assert len(engine.commit(StepResult(0, np.ones(1, np.int32)))) == 1


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_a_lost_executor_ends_every_request_and_leaves_the_engine_empty(
    in_flight_max: int,
) -> None:
    checked = CheckedEngine(make_limits(in_flight_max=in_flight_max, num_slots=3), BUCKETS)
    for length in (3, 20, 9):
        checked.admit(prompt_of(length), LONG)
    checked.step()
    while checked.plan() is not None:
        pass
    deltas = checked.engine.fail()
    assert {delta.request_id for delta in deltas} == {"request-0", "request-1", "request-2"}
    assert all(delta.finish_reason is FinishReason.ERROR for delta in deltas)
    status = checked.engine.status()
    assert (status.num_free_blocks, status.num_free_slots) == (status.num_blocks, status.num_slots)
    assert not checked.engine.has_work
    again = CheckedEngine(make_limits(), BUCKETS)
    again.engine = checked.engine
    again.admit(prompt_of(5), SamplingParams(20, seed=8))
    again.drain()
