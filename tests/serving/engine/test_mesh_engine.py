"""Goal: a mesh with several ranks gives every request the tokens of one device alone, in one plan a
step. Method: a device by hand for each rank, which refuses a block, slot or state that is not its.
"""

import random

import numpy as np
import pytest

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.forking import fork
from serving.core.request import (
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    SamplingParams,
)
from serving.core.step_plan import StepPlan, StepResult, join_results
from serving.engine.engine import EngineLimits, run_step
from serving.engine.mesh_engine import MeshEngine
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import VOCAB_SIZE, SimulatedDevice, expected_tokens

BUCKETS = BucketTable(
    {
        StepKind.PREFILL: [Bucket(2, 8, 8), Bucket(3, 16, 8)],
        StepKind.DECODE: [Bucket(1, 1, 8), Bucket(3, 3, 8), Bucket(3, 12, 8)],
    }
)
RANKS = 3


class _Mesh:
    """An executor that runs every part on the device of its rank."""

    def __init__(self, limits: EngineLimits) -> None:
        self.devices = [SimulatedDevice(limits, BUCKETS) for _ in range(RANKS)]
        self.plans: list[StepPlan] = []
        self._num_collected = 0

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for device, part in zip(self.devices, plan.parts, strict=True):
            if part is not None:
                assert (part.kind, part.bucket) == (plan.kind, plan.bucket)
                device.submit(part)

    def collect(self) -> StepResult:
        plan = self.plans[self._num_collected]
        self._num_collected += 1
        results = [
            None if part is None else device.collect()
            for device, part in zip(self.devices, plan.parts, strict=True)
        ]
        return join_results(plan.step_index, results)


def _limits(num_drafts: int = 0, num_snapshots: int = 3, waiting_max: int = 100) -> EngineLimits:
    return EngineLimits(
        num_blocks=9,
        num_slots=4,
        context_max=32,
        vocab_size=VOCAB_SIZE,
        eos_token_id=0,
        block_size=4,
        num_snapshots=num_snapshots,
        in_flight_max=2,
        num_drafts=num_drafts,
        waiting_max=waiting_max,
    )


def _engine(limits: EngineLimits) -> tuple[MeshEngine, _Mesh]:
    return MeshEngine(RANKS, limits, BUCKETS, random.Random(3)), _Mesh(limits)


def _run(engine: MeshEngine, mesh: _Mesh) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in run_step(engine, mesh):
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("num_drafts", (0, 3))
def test_every_request_gets_its_own_tokens(num_drafts: int) -> None:
    """Pools are so small that sequences are preempted on their ranks."""
    limits = _limits(num_drafts)
    engine, mesh = _engine(limits)
    rng = random.Random(1)
    requests = [
        Request(
            f"r{number}",
            tuple(prompt_of(rng.randint(1, 20), rng.randint(0, 3))),
            SamplingParams(temperature=0.5, seed=number, max_tokens=rng.randint(1, 14)),
        )
        for number in range(30)
    ]
    for request in requests:
        engine.admit(request)
    tokens = _run(engine, mesh)
    for number, request in enumerate(requests):
        assert tokens[request.request_id] == expected_tokens(request, number, limits.context_max)
    assert engine.status().num_preemptions
    used = {tuple(part is not None for part in plan.parts) for plan in mesh.plans}
    assert (True,) * RANKS in used and len(used) > 1, "ranks ran together, and some without others"
    kinds = [plan.kind for plan in mesh.plans]
    assert StepKind.PREFILL in kinds and StepKind.DECODE in kinds
    status = engine.status()
    assert (status.num_running, status.num_waiting, status.num_steps) == (0, 0, len(mesh.plans))
    assert status.num_free_blocks == status.num_blocks == RANKS * 8
    assert sum(rank.num_blocks for rank in engine.rank_statuses()) == status.num_blocks


def test_requests_are_spread_and_prefixes_draw_them() -> None:
    engine, mesh = _engine(_limits())
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for number in range(RANKS):
        engine.admit(Request(f"r{number}", tuple(prompt_of(9, number)), greedy))
    assert [rank.num_waiting for rank in engine.rank_statuses()] == [1] * RANKS
    _run(engine, mesh)
    # Every rank is free; the one that has the prompt of `r2` gets it again.
    engine.admit(Request("again", tuple(prompt_of(9, 2)), greedy))
    assert [rank.num_waiting for rank in engine.rank_statuses()] == [0, 0, 1]
    # With so much to do there another rank is quicker.
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.admit(Request("more", tuple(prompt_of(9, 2)), long))
    engine.admit(Request("elsewhere", tuple(prompt_of(9, 2)), greedy))
    assert [rank.num_waiting for rank in engine.rank_statuses()] != [0, 0, 3]
    _run(engine, mesh)


def test_samples_of_one_prompt_share_a_rank() -> None:
    engine, mesh = _engine(_limits())
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=3)
    for sample in fork(Request("n", tuple(prompt_of(9)), sampling), 3):
        engine.admit(sample)
    assert sorted(rank.num_waiting for rank in engine.rank_statuses()) == [0, 0, 3]
    assert len(_run(engine, mesh)) == 3


def test_a_full_rank_is_passed_over_and_all_full_refuse() -> None:
    engine, _ = _engine(_limits(waiting_max=3))
    request = SamplingParams(max_tokens=2)
    # Three slots and one place to wait on each rank.
    for number in range(4 * RANKS):
        engine.admit(Request(f"r{number}", (1, 2), request))
    with pytest.raises(QueueFullError, match="12"):
        engine.admit(Request("too many", (1, 2), request))
    assert engine.abort("r4") is not None
    engine.admit(Request("fits", (1, 2), request))


def test_ends_from_outside() -> None:
    engine, mesh = _engine(_limits())
    engine.admit(Request("a", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True)))
    with pytest.raises(RequestError, match="already running"):
        engine.admit(Request("a", (1, 2), SamplingParams()))
    engine.admit(Request("b", (3, 4), SamplingParams(max_tokens=9, ignore_eos=True)))
    run_step(engine, mesh)
    delta = engine.abort("a")
    assert delta is not None and delta.finish_reason is FinishReason.ABORT
    assert engine.abort("a") is None and engine.abort("unknown") is None
    (failed,) = engine.fail()
    assert (failed.request_id, failed.finish_reason) == ("b", FinishReason.ERROR)
    assert not engine.has_work and engine.plan() is None


def test_results_of_another_step_are_refused() -> None:
    engine, _ = _engine(_limits())
    nothing = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="no step is in flight"):
        engine.commit(StepResult(0, nothing))
    engine.admit(Request("a", (1, 2), SamplingParams(max_tokens=2)))
    assert engine.plan() is not None
    with pytest.raises(ValueError, match="expected step 0, the oldest in flight, with 3"):
        engine.commit(StepResult(5, nothing))
    with pytest.raises(ValueError, match="with 0 parts; expected step 0"):
        engine.commit(StepResult(0, nothing))


def test_one_bucket_must_hold_what_any_other_holds() -> None:
    decode = [Bucket(4, 4, 2), Bucket(1, 6, 2)]
    buckets = BucketTable({StepKind.PREFILL: [Bucket(2, 8, 8)], StepKind.DECODE: decode})
    with pytest.raises(ValueError, match=r"no decode bucket is .*num_rows=4, num_tokens=6"):
        MeshEngine(2, _limits(), buckets, random.Random(3))
