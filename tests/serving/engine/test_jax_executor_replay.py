"""Goal: with bounded replay the real model answers the same however a prompt is computed: its other
tokens left out or only hidden, cold or from a prefix, in any chunks, preempted or not.

Method: one executor with drafts and every program of a rule, whose masked steps are the oracle of
those that leave tokens out; engines that differ in what they share, in company and in memory.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax.replay import ReplayError
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import Request, SamplingParams
from serving.engine.engine import Engine, EngineLimits, run_step
from serving.engine.jax_executor import JaxExecutor
from sharding.plan import load_plan

DIRECTORY = Path(__file__).parents[2] / "golden" / "tiny-v41"
BUCKETS = BucketTable({StepKind.PREFILL: [Bucket(2, 40, 2)], StepKind.DECODE: [Bucket(3, 12, 2)]})
NUM_SLOTS, NUM_SNAPSHOTS, NUM_BLOCKS = 5, 4, 12
# The model's window has 8 tokens.
COMPACT = ReplayRule(ReplayMode.COMPACT, 16)
MASK = ReplayRule(ReplayMode.MASK, 16)


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    """An unquantised cache, so that no value near a rounding midpoint can flip."""
    plan = load_plan("single")
    num_slots = NUM_SLOTS + NUM_SNAPSHOTS
    return JaxExecutor(
        DIRECTORY, "noq", BUCKETS, NUM_BLOCKS, num_slots, plan, has_drafts=True, replay=COMPACT
    )


def make_engine(
    executor: JaxExecutor,
    replay: ReplayRule | None,
    num_snapshots: int = 0,
    num_blocks: int = NUM_BLOCKS,
) -> Engine:
    limits = EngineLimits(
        num_blocks=num_blocks,
        num_slots=NUM_SLOTS,
        context_max=256,
        vocab_size=executor.model_config.vocab_size,
        eos_token_id=None,
        num_snapshots=num_snapshots,
        in_flight_max=2,
        num_drafts=executor.num_drafts,
        replay=replay,
    )
    return Engine(limits, BUCKETS, random.Random(7))


def run(
    engine: Engine, executor: JaxExecutor, prompts: Sequence[Sequence[int]], max_tokens: int = 16
) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of prompts that run together, and the tokens of each that were not computed."""
    sampling = SamplingParams(max_tokens, temperature=0.0)
    outputs: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        engine.admit(Request(str(index), tuple(prompt), sampling))
    while engine.has_work:
        for delta in run_step(engine, executor):
            outputs[int(delta.request_id)] += delta.token_ids
            cached[int(delta.request_id)] = delta.num_cached_tokens
    return outputs, cached


def last_logprobs(
    executor: JaxExecutor, replay: ReplayRule | None, prompts: Sequence[Sequence[int]]
) -> np.ndarray:
    """Of each prompt, which runs alone, those of the three likeliest first tokens; [prompts, 3]."""
    rows: list[list[float]] = []
    for prompt in prompts:
        engine = make_engine(executor, replay)
        engine.admit(Request("0", tuple(prompt), SamplingParams(1, temperature=0.0, logprobs=3)))
        while engine.has_work:
            for delta in run_step(engine, executor):
                rows += [[value for _, value in some.top] for some in delta.logprobs]
    return np.array(rows)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 140, 150, 131 and 60 tokens; the first three begin alike."""
    source = np.random.default_rng(11)
    long = source.integers(3, 300, 150).tolist()
    return [long[:140], long, long[:131], source.integers(3, 300, 60).tolist()]


@pytest.fixture(scope="module")
def cold(executor: JaxExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt is answered alone."""
    return [run(make_engine(executor, COMPACT), executor, [p])[0][0] for p in prompts]


def test_hidden_and_left_out_tokens_give_the_same_answers(
    executor: JaxExecutor, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    masked = [run(make_engine(executor, MASK), executor, [p])[0][0] for p in prompts]
    assert cold == masked
    # So little is hidden that greedy tokens seldom change, but probabilities do.
    compact, hidden, exact = (
        last_logprobs(executor, replay, prompts) for replay in (COMPACT, MASK, None)
    )
    np.testing.assert_allclose(compact, hidden, rtol=0, atol=2e-5)
    assert (np.abs(hidden - exact) > 1e-4).all()


def test_prompts_that_are_all_tail_are_answered_as_by_the_exact_model(
    executor: JaxExecutor, prompts: list[list[int]]
) -> None:
    short = [prompts[0][:n] for n in (1, 9, 16)]
    exact, _ = run(make_engine(executor, None), executor, short)
    assert run(make_engine(executor, COMPACT), executor, short)[0] == exact


def test_tokens_do_not_depend_on_prefixes(
    executor: JaxExecutor, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    """A state at 128 of the first prompt, whose tail starts at 124, serves itself and the longer
    one; the one of 131 tokens, whose tail starts at 115, leaves its own there.
    """
    engine = make_engine(executor, COMPACT, NUM_SNAPSHOTS)
    for index, num_cached in ((0, 0), (0, 128), (1, 128), (2, 0), (2, 128), (0, 0), (1, 128)):
        outputs, cached = run(engine, executor, [prompts[index]])
        assert (outputs[0], cached[0]) == (cold[index], num_cached), index


def test_blocks_without_states_are_gone_on_from(
    executor: JaxExecutor, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    """The tail of the longer prompt starts at 134, so the state at 128 can be made anew."""
    num_replayed = executor.model.num_replayed
    assert num_replayed == 7 * executor.model.topology.num_encoder_layers + 3
    rule = replace(COMPACT, num_replayed=num_replayed)
    engine = make_engine(executor, rule, NUM_SNAPSHOTS)
    assert run(engine, executor, [prompts[1]]) == ([cold[1]], [0])
    state = snapshot_of(engine, executor)
    entries = [np.asarray(jax.tree.leaves(s.entries)[0]) for s in executor.cache.sources]
    # Only the blocks stay.
    prefixes = engine._table.prefixes
    for slot in list(prefixes._used_slots):
        prefixes.drop_unused_snapshot(prefixes._slot_keys[slot])
    assert run(engine, executor, [prompts[1]]) == ([cold[1]], [128 - num_replayed])
    np.testing.assert_allclose(snapshot_of(engine, executor), state, rtol=0, atol=1e-4)
    # The block that others share was read and not written.
    block = engine._table.prefixes.block(next(iter(prefixes._entries)))
    for source, before in zip(executor.cache.sources, entries, strict=True):
        after = np.asarray(jax.tree.leaves(source.entries)[0])
        np.testing.assert_array_equal(after[block], before[block])
    # With a shorter replay windows would lack what they see.
    short = replace(COMPACT, num_replayed=8)
    other = make_engine(executor, short, NUM_SNAPSHOTS)
    run(other, executor, [prompts[1]])
    prefixes = other._table.prefixes
    for slot in list(prefixes._used_slots):
        prefixes.drop_unused_snapshot(prefixes._slot_keys[slot])
    assert run(other, executor, [prompts[1]])[1] == [128 - 8]
    assert np.abs(snapshot_of(other, executor) - state).max() > 1e-3


def snapshot_of(engine: Engine, executor: JaxExecutor) -> np.ndarray:
    """The last lower window of the first snapshot in use, float32."""
    slot = next(iter(engine._table.prefixes._used_slots))
    layer = executor.model.topology.num_encoder_layers - 1
    return np.asarray(executor.cache.rings[layer][slot], np.float32)


def test_tokens_do_not_depend_on_chunks(
    executor: JaxExecutor, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    assert run(make_engine(executor, COMPACT), executor, prompts)[0] == cold


def test_tokens_do_not_depend_on_preemption(
    executor: JaxExecutor, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    """Three prompts that fill a block each need a second one as they go on."""
    some = [prompt[:120] for prompt in (prompts[0], prompts[0][5:], prompts[0][9:])]
    alone = [run(make_engine(executor, COMPACT), executor, [p])[0][0] for p in some]
    engine = make_engine(executor, COMPACT, num_blocks=5)
    assert run(engine, executor, some)[0] == alone
    assert engine.status().num_preemptions > 0


def test_a_rule_that_the_model_cannot_follow_is_refused_before_anything_is_compiled() -> None:
    rule = ReplayRule(ReplayMode.COMPACT, 13)
    with pytest.raises(ReplayError, match="engine.replay_keep 13: .* expected at least 14"):
        JaxExecutor(DIRECTORY, "kvq", BUCKETS, 12, 5, load_plan("single"), replay=rule)
