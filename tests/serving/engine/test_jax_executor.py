"""Goal: plans run on the real model as the engine means them, and nothing is compiled after the
start. Method: the golden checkpoint with small buckets, its greedy tokens, and jax's own compile
events.
"""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax.reports import ReportedResult
from serving.cluster import ModelFacts
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.prefix_transfer import StagedPrefix
from serving.core.request import Request, SamplingParams, TokenLogprob
from serving.core.step_plan import LAST_SAMPLED
from serving.engine import jax_executor
from serving.engine.engine import Engine, EngineLimits, run_step
from serving.engine.jax_executor import CacheTooLargeError, JaxExecutor
from serving.transport.driver import SystemClock
from sharding.plan import ShardingError, load_plan

BUCKETS = BucketTable(
    {StepKind.PREFILL: [Bucket(2, 16, 2)], StepKind.DECODE: [Bucket(1, 1, 2), Bucket(4, 4, 2)]}
)
FEW_BUCKETS = BucketTable(
    {StepKind.PREFILL: [Bucket(2, 16, 2)], StepKind.DECODE: [Bucket(4, 4, 2)]}
)
NUM_SNAPSHOTS = 3
CLOCK = SystemClock().now_ns
DIRECTORY = Path(__file__).parents[2] / "golden" / "tiny-v41"


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    """The golden checkpoint on one device."""
    plan = load_plan("single")
    return JaxExecutor(DIRECTORY, "kvq", BUCKETS, 12, 5 + NUM_SNAPSHOTS, plan, kv_clock=CLOCK)


@pytest.fixture(scope="module")
def host_executor() -> JaxExecutor:
    """The same with the Engram tables in host memory, and fewer buckets to compile."""
    plan = load_plan("single")
    slots = 5 + NUM_SNAPSHOTS
    return JaxExecutor(
        DIRECTORY, "kvq", FEW_BUCKETS, 12, slots, plan, engram="host", kv_clock=CLOCK
    )


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of everything that is compiled while the test runs."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def _engine(
    executor: JaxExecutor,
    num_snapshots: int = NUM_SNAPSHOTS,
    in_flight_max: int = 1,
    buckets: BucketTable = BUCKETS,
) -> Engine:
    facts = ModelFacts(
        executor.model_config.vocab_size,
        executor.model_config.max_position_embeddings,
        executor.model_config.eos_token_id,
    )
    limits = EngineLimits(
        num_blocks=12,
        num_slots=5,
        context_max=256,
        vocab_size=facts.vocab_size,
        eos_token_id=facts.eos_token_id,
        num_snapshots=num_snapshots,
        in_flight_max=in_flight_max,
        num_drafts=executor.num_drafts,
    )
    return Engine(limits, buckets, random.Random(7))


def _run(engine: Engine, executor: JaxExecutor) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.status().num_waiting or engine.status().num_running:
        for delta in run_step(engine, executor):
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


def test_greedy_tokens_in_company_and_no_compilation(
    executor: JaxExecutor, golden: Path, compilations: list[str]
) -> None:
    data = np.load(golden / "greedy.npz")
    prompt = tuple(int(t) for t in data["prompt"])
    engine = _engine(executor)
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=9, temperature=1.0, top_k=5, top_p=0.9, seed=2**40)
    for i in range(3):
        engine.admit(Request(f"greedy {i}", prompt, greedy))
        engine.admit(Request(f"drawn {i}", prompt[: 5 * i + 1], drawn))
    tokens = _run(engine, executor)
    for i in range(3):
        assert tokens[f"greedy {i}"] == data["tokens_kvq"].tolist()
    assert compilations == []
    # The draw repeats itself alone, in other slots and blocks.
    engine.admit(Request("again", prompt[:11], drawn))
    assert _run(engine, executor)["again"] == tokens["drawn 2"]
    assert compilations == []
    jax.jit(lambda x: x + 1)(3)
    assert compilations, "the listener would have seen a compilation"


def test_tokens_do_not_depend_on_what_was_computed_before(
    executor: JaxExecutor, rng: np.random.Generator, compilations: list[str]
) -> None:
    """With a usable prefix and without, the last chunk is the same step over the same state."""
    first = tuple(rng.integers(3, 300, 140).tolist())
    # Parts from the first in its second block.
    second = (*first[:135], *rng.integers(3, 300, 9).tolist())
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    outputs: list[list[list[int]]] = []
    for num_snapshots in (0, NUM_SNAPSHOTS):
        engine = _engine(executor, num_snapshots)
        outputs.append([])
        num_computed = []
        for index, prompt in enumerate((first, first, second, first)):
            engine.admit(Request(str(index), prompt, sampling))
            num_computed.append(-engine.status().num_steps)
            outputs[-1].append(_run(engine, executor)[str(index)])
            num_computed[-1] += engine.status().num_steps
        # Nine chunks of 16 tokens and eleven decode steps; eight of the chunks can be spared.
        assert num_computed == ([20, 20, 20, 20] if num_snapshots == 0 else [20, 12, 12, 12])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 2
    assert compilations == []


@pytest.mark.parametrize("engram", ["device", "host"])
def test_a_prefix_that_was_carried_over_gives_the_same_tokens(
    request: pytest.FixtureRequest,
    engram: str,
    rng: np.random.Generator,
    compilations: list[str],
) -> None:
    """Two engines on one device share nothing but what is carried between them."""
    fixture = "executor" if engram == "device" else "host_executor"
    device: JaxExecutor = request.getfixturevalue(fixture)
    buckets = BUCKETS if engram == "device" else FEW_BUCKETS
    compilations.clear()
    prompt = tuple(rng.integers(3, 300, 140).tolist())
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    first = _engine(device, buckets=buckets)
    first.transfers.record()
    first.admit(Request("a", prompt, sampling))
    expected = _run(first, device)["a"]
    ((_, keys),) = first.transfers.take_kept()
    transfer, blocks, has_state = first.transfers.read(keys, keys[-1])
    assert blocks == keys and has_state
    device.move(transfer)
    read = device.collect_read()
    assert device.kv_moves is not None
    assert [g.shape for g in read.groups] == [(1, n) for n in device.kv_moves.form.group_bytes]
    # Something else in all blocks and slots of the other engine, the classes on the host included.
    second = _engine(device, buckets=buckets)
    second.admit(Request("b", prompt[::-1], sampling))
    _run(second, device)
    staged = StagedPrefix(keys, 0, read.groups, read.states[0])
    written = second.transfers.write(staged)
    assert written is not None
    with jax.transfer_guard("disallow"):
        device.move(written)
    num_steps = second.status().num_steps
    second.admit(Request("c", prompt, sampling))
    assert _run(second, device)["c"] == expected
    assert second.status().num_steps - num_steps == 12
    # The state is what makes it: with another one the tokens differ.
    third = _engine(device, buckets=buckets)
    false = StagedPrefix(keys, 0, read.groups, np.zeros_like(read.states[0]))
    written = third.transfers.write(false)
    assert written is not None
    device.move(written)
    third.admit(Request("d", prompt, sampling))
    assert _run(third, device)["d"] != expected
    assert compilations == []


def test_tokens_fed_before_they_are_known_are_the_same(executor: JaxExecutor, golden: Path) -> None:
    data = np.load(golden / "greedy.npz")
    prompt = tuple(int(t) for t in data["prompt"])
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=9, temperature=1.0, top_k=5, seed=2**40, ignore_eos=True)
    outputs: list[dict[str, list[int]]] = []
    for in_flight_max in (1, 2):
        engine = _engine(executor, in_flight_max=in_flight_max)
        engine.admit(Request("greedy", prompt, greedy))
        for i in range(4):
            engine.admit(Request(f"drawn {i}", prompt[: 5 * i + 1], drawn))
        outputs.append(_run(engine, executor))
    assert outputs[0]["greedy"] == data["tokens_kvq"].tolist()
    assert outputs[1] == outputs[0]


def test_without_tiles_the_last_bits_depend_on_company(executor: JaxExecutor) -> None:
    """What `engine.batch_invariant` is there for: its tests would see a difference."""
    prompt = (5, 6, 7, 8, 9, 10, 11)
    wanted = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=20)
    found: list[list[TokenLogprob]] = []
    for num_others in (0, 3):
        engine = _engine(executor, num_snapshots=0)
        engine.admit(Request("a", prompt, wanted))
        for number in range(num_others):
            others = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            engine.admit(Request(str(number), (20 + number, *prompt), others))
        found.append([])
        while engine.has_work:
            for delta in run_step(engine, executor):
                found[-1] += delta.logprobs
    assert found[0] != found[1]
    values = [[entry.logprob for entry in entries] for entries in found]
    assert values[0] == pytest.approx(values[1], abs=5e-3)


def test_dispatching_a_step_waits_for_no_device(
    executor: JaxExecutor, rng: np.random.Generator
) -> None:
    """All transfers are asked for; one that an operation made by itself would raise."""
    engine = _engine(executor, in_flight_max=2)
    prompt = tuple(rng.integers(3, 300, 130).tolist())
    num_references = 0
    for name in ("first", "again"):
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        engine.admit(Request(name, prompt, sampling))
        while engine.has_work:
            while (plan := engine.plan()) is not None:
                num_references += int((plan.token_ids == LAST_SAMPLED).sum())
                with jax.transfer_guard("disallow"):
                    executor.submit(plan)
            engine.commit(executor.collect())
    assert num_references == 8
    assert engine.status().num_snapshots > 0
    with pytest.raises(Exception, match="[Dd]isallowed"), jax.transfer_guard("disallow"):
        _ = jax.numpy.zeros(3) + np.ones(3)


def test_engram_in_host_memory_changes_no_token(
    executor: JaxExecutor, host_executor: JaxExecutor, rng: np.random.Generator
) -> None:
    """Prompts of several chunks, company, reused slots, and a prefix that is gone on from."""
    long = tuple(rng.integers(3, 300, 140).tolist())
    prompts = [long[:n] for n in (1, 3, 17, 40)] + [(*long[:135], *range(3, 12)), long]
    outputs = []
    for one in (executor, host_executor):
        # The host has to look up tokens that it feeds before they are known.
        engine = _engine(one, buckets=FEW_BUCKETS, in_flight_max=2)
        outputs.append({})
        engine.admit(Request("long", long, SamplingParams(max_tokens=3, temperature=0.0)))
        outputs[-1].update(_run(engine, one))
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(12, temperature=i % 2, seed=i, ignore_eos=True)
            engine.admit(Request(str(i), prompt, sampling))
        outputs[-1].update(_run(engine, one))
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0].values()}) == 7


def test_engram_in_host_memory_leaves_the_devices(
    executor: JaxExecutor, host_executor: JaxExecutor
) -> None:
    num_bytes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(one.weights))
        for one in (executor, host_executor)
    ]
    # Rows of 64 codes and two scales.
    assert num_bytes[0] - num_bytes[1] == sum(executor.model_config.engram_num_embeddings) * 66
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(host_executor.weights))


def test_host_rows_are_fetched_while_a_step_runs(
    host_executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk never ends; the second is dispatched with its rows all the same."""

    class Running:
        def copy_to_host_async(self) -> None: ...

        def __array__(self) -> np.ndarray:
            raise AssertionError("waited for a step that runs")

    sent: list[np.ndarray] = []

    def step(weights: object, buffer: object, cache: object, **more: jax.Array) -> object:
        sent.append(np.asarray(more["engram_rows"]))
        return ReportedResult(Running(), None, None), cache  # type: ignore[arg-type]

    monkeypatch.setattr(host_executor, "compiled", lambda *key: step)
    monkeypatch.setattr(host_executor, "_in_flight", deque())
    monkeypatch.setattr(host_executor, "_unread", deque())
    engine = _engine(host_executor, in_flight_max=2)
    prompt = tuple(range(3, 31))
    engine.admit(Request("a", prompt, SamplingParams(max_tokens=3)))
    for _ in range(2):
        plan = engine.plan()
        assert plan is not None
        host_executor.submit(plan)
    # The n-grams of a repeated prompt repeat themselves, whatever chunks they come in.
    assert len(sent) == 2 and sent[1][:12].any(axis=(2, 3)).all()
    again = _engine(host_executor, num_snapshots=0, in_flight_max=2)
    again.admit(Request("b", prompt[10:], SamplingParams(max_tokens=3)))
    plan = again.plan()
    assert plan is not None
    host_executor.submit(plan)
    # From its fourth token on, the second prompt has the same past as the first from the 14th.
    np.testing.assert_array_equal(sent[2][3:6], sent[0][13:16])
    np.testing.assert_array_equal(sent[2][6:16], sent[1][:10])


def test_results_come_in_the_order_of_the_plans(executor: JaxExecutor) -> None:
    engine = _engine(executor)
    for name in ("a", "b"):
        engine.admit(Request(name, (5, 6, 7), SamplingParams(max_tokens=3, temperature=0.0)))
    plan = engine.plan()
    assert plan is not None and plan.kind is StepKind.PREFILL
    executor.submit(plan)
    result = executor.collect()
    assert result.step_index == plan.step_index
    # One token for each of the two prompts, and equal ones, since the prompts are equal.
    assert result.token_ids.shape == (2,) and len(set(result.token_ids.tolist())) == 1
    with pytest.raises(IndexError):
        executor.collect()


def test_an_uncompiled_bucket_raises(executor: JaxExecutor) -> None:
    with pytest.raises(KeyError):
        executor.compiled(StepKind.DECODE, Bucket(3, 3, 2))


def test_packing_and_model_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(2, 16, 2)
    jax_executor.check_layout(bucket, jax_executor.shape_of(StepKind.PREFILL, bucket))
    real = jax_executor.batch.fields
    monkeypatch.setattr(
        jax_executor.batch, "fields", lambda shape: dict(reversed(real(shape).items()))
    )
    with pytest.raises(AssertionError):
        jax_executor.check_layout(bucket, jax_executor.shape_of(StepKind.PREFILL, bucket))


def test_too_few_devices(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "many.toml"
    path.write_text("[mesh]\ndata = 4096\n")
    with pytest.raises(ShardingError, match="needs 4096 devices"):
        JaxExecutor(golden / "tiny-v41", "kvq", BUCKETS, 12, 5, load_plan(path))


def test_a_cache_that_does_not_fit(golden: Path) -> None:
    with pytest.raises(CacheTooLargeError, match=r"cannot be allocated .* fewer engine.num_blocks"):
        JaxExecutor(golden / "tiny-v41", "kvq", BUCKETS, 2**31 - 1, 5, load_plan("single"))
