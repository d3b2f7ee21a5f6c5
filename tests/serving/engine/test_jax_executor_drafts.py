"""Goal: with drafts the real model says what it says without: tokens of free and of constrained
texts, and log probabilities of both and of prompts.

Method: the golden checkpoint with a cache that rounds nothing; its greedy tokens and logits; the
same requests with and without verification.
"""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from serving.core import decode_scheduler
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.cost import PrefillSample
from serving.core.grammar import GrammarCompiler
from serving.core.request import (
    ConstraintKind,
    OutputConstraint,
    Request,
    SamplingParams,
    TokenDelta,
)
from serving.engine import step_times
from serving.engine.engine import Engine, EngineLimits
from serving.engine.jax_executor import JaxExecutor
from serving.engine.profiler import scopes_of
from sharding.plan import load_plan

DIRECTORY = Path(__file__).parents[2] / "golden" / "tiny-v41"
NUM_SLOTS, NUM_SNAPSHOTS = 5, 3
BUCKETS = BucketTable({StepKind.PREFILL: [Bucket(2, 16, 2)], StepKind.DECODE: [Bucket(3, 12, 2)]})


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    """With drafts, and rows that share room for them."""
    plan = load_plan("single")
    num_slots = NUM_SLOTS + NUM_SNAPSHOTS
    return JaxExecutor(DIRECTORY, "noq", BUCKETS, 12, num_slots, plan, has_drafts=True)


def make_engine(executor: JaxExecutor, in_flight_max: int = 1) -> Engine:
    config = executor.model_config
    limits = EngineLimits(
        num_blocks=12,
        num_slots=NUM_SLOTS,
        num_snapshots=NUM_SNAPSHOTS,
        context_max=256,
        vocab_size=config.vocab_size,
        eos_token_id=config.eos_token_id,
        in_flight_max=in_flight_max,
        num_drafts=executor.num_drafts,
    )
    return Engine(limits, BUCKETS, random.Random(7))


def run(
    engine: Engine, executor: JaxExecutor, num_verified: Counter[int] | None = None
) -> dict[str, list[TokenDelta]]:
    """All deltas by request; counts the drafts in plans by the number of their sequence."""
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        while (plan := engine.plan()) is not None:
            executor.submit(plan)
            if num_verified is not None and plan.kind is StepKind.DECODE:
                num_verified.update(dict(zip(plan.sequence_ids, plan.num_tokens - 1, strict=True)))
        for delta in engine.commit(executor.collect()):
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def test_verified_drafts_give_the_greedy_tokens(executor: JaxExecutor, golden: Path) -> None:
    data = np.load(golden / "greedy.npz")
    prompt = tuple(int(t) for t in data["prompt"])
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    short = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    outputs: list[dict[str, list[int]]] = []
    for in_flight_max in (1, 2):
        engine = make_engine(executor, in_flight_max)
        engine.admit(Request("greedy", prompt, greedy))
        for i in range(3):
            engine.admit(Request(f"short {i}", prompt[: 5 * i + 1], short))
        deltas = run(engine, executor)
        outputs.append({n: [t for d in some for t in d.token_ids] for n, some in deltas.items()})
        status = engine.status()
        assert len(status.num_verified) == len(status.num_accepted) == 5
        assert all(a <= v for a, v in zip(status.num_accepted, status.num_verified, strict=True))
        assert 0 < status.num_verified[4] < status.num_verified[0]
    assert outputs[0]["greedy"] == data["tokens_noq"].tolist()
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_drafts_change_neither_constrained_texts_nor_log_probabilities(
    executor: JaxExecutor, in_flight_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = executor.model_config
    assert config.eos_token_id is not None
    tokenizer = (DIRECTORY / "tokenizer.json").read_text(encoding="utf-8")
    grammars = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_id)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, logprobs=20)
    found: list[dict[str, list[TokenDelta]]] = []
    num_verified = Counter[int]()
    for verifies in (True, False):
        if not verifies:
            ones = lambda table, buckets, rows, *_: np.ones(len(rows), np.int32)  # noqa: E731
            monkeypatch.setattr(decode_scheduler, "choose_lengths", ones)
        engine = make_engine(executor, in_flight_max)
        for name, pattern in (("a", "[^q]{1,60}"), ("b", "([a-f]{3}|[0-9]+-)*x"), ("c", None)):
            constraint = grammar = None
            if pattern is not None:
                constraint = OutputConstraint(ConstraintKind.REGEX, pattern)
                grammar = grammars.compile(constraint)
            request = Request(name, (5, 6, 7, ord(name)), sampling, constraint=constraint)
            engine.admit(request, grammar)
        found.append(run(engine, executor, num_verified if verifies else None))
        assert (sum(engine.status().num_accepted) > 0) == verifies
    assert num_verified[0] > 0 and num_verified[2] > 0
    for name in "abc":
        drafted, plain = ([t for d in one[name] for t in d.token_ids] for one in found)
        assert plain == drafted
        after, before = ([entry for d in one[name] for entry in d.logprobs] for one in found)
        assert len(before) == len(after) == len(plain)
        for one, other in zip(before, after, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            values = [[value for _, value in entry.top] for entry in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_log_probabilities_of_steps_with_drafts_are_the_golden_ones(
    executor: JaxExecutor, golden: Path
) -> None:
    """Those of a prompt in two chunks, and of the first token after it."""
    data = np.load(golden / "forward.npz")
    ids, logits = data["ids_24"].tolist(), data["logits_noq_24"].astype(np.float64)
    below = logits - logits.max(1, keepdims=True)
    expected = below - np.log(np.exp(below).sum(1, keepdims=True))
    engine = make_engine(executor)
    sampling = SamplingParams(3, temperature=0.0, logprobs=20, prompt_logprobs=2)
    engine.admit(Request("a", tuple(ids), sampling))
    deltas = run(engine, executor)["a"]
    first, *prompt = (entry for delta in deltas for entry in delta.prompt_logprobs)
    assert first is None and len(prompt) == 23
    for position, entry in enumerate(prompt, 1):
        assert entry is not None and len(entry.top) == 2
        assert entry.logprob == pytest.approx(expected[position - 1, ids[position]], abs=1e-4)
    best = np.sort(expected[-1])[::-1][:20].tolist()
    assert [value for _, value in deltas[0].logprobs[0].top] == pytest.approx(best, abs=1e-4)


def test_steps_are_timed(executor: JaxExecutor) -> None:
    ticks = iter(range(0, 10**12, 3_000_000))
    buckets = BUCKETS.of(StepKind.DECODE)
    times = step_times.decode_step_ms(executor, buckets, lambda: next(ticks))
    assert times == {Bucket(3, 12, 2): 3.0}
    buckets = BUCKETS.of(StepKind.PREFILL)
    samples = step_times.prefill_samples(executor, buckets, 128, lambda: next(ticks))
    assert samples == [PrefillSample(16, 128.0, 3.0), PrefillSample(16, 16 * 240 + 128.0, 3.0)]
    identity = executor.identity
    assert identity["device"].startswith("cpu ") and identity["has_drafts"] == "True"


def test_every_part_of_the_model_has_a_scope(executor: JaxExecutor) -> None:
    scopes = scopes_of(executor.program_texts())
    assert scopes.keys() == {"jit_prefill_r2_t16_b2", "jit_decode_r3_t12_b2"}
    parts = "embedding engram hyper_connections indexer compressor attention moe head sampling"
    for program in scopes.values():
        assert {*parts.split(), "draft", "draft/attention", "draft/moe"} <= set(program.values())
