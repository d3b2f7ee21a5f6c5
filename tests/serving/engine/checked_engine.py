"""A driver that checks an engine around a simulated device, and what its tests are made of."""

import random
from collections.abc import Callable, Iterable

import numpy as np

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.replay import ReplayRule
from serving.core.request import FinishReason, Request, RequestImage, SamplingParams, TokenDelta
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.step_plan import StepPlan
from serving.engine.engine import Engine, EngineLimits
from tests.serving.engine.simulated_device import (
    EOS,
    VOCAB_SIZE,
    SimulatedDevice,
    expected_tokens,
)


class CheckedEngine:
    """An engine with a device; every call is followed by a check of all that must always hold."""

    def __init__(self, limits: EngineLimits, buckets: BucketTable, seed: int = 5) -> None:
        self.engine = Engine(limits, buckets, random.Random(seed))
        self.device = SimulatedDevice(limits, buckets)
        self.length_max = min(limits.context_max, (limits.num_blocks - 1) * limits.block_size)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.expected: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.num_computed_tokens = 0
        self._requests: dict[str, Request] = {}
        self._same_seeds = random.Random(seed)

    def admit(
        self,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        images: tuple[RequestImage, ...] = (),
        cache_salt: str = "",
        priority: int = 0,
        owner: str = "",
    ) -> str:
        """Admit a request and return its name; raises as the engine does."""
        sampling = sampling or SamplingParams(temperature=0)
        name = f"request-{len(self._requests)}"
        return self.admit_request(
            Request(
                name,
                tuple(prompt),
                sampling,
                images=images,
                cache_salt=cache_salt or owner,
                priority=priority,
                cache_owner=owner,
            )
        )

    def admit_request(self, request: Request) -> str:
        """Admit a request made by the caller, under its own name."""
        name, sampling = request.request_id, request.sampling
        self.engine.admit(request)
        seed = sampling.seed if sampling.seed is not None else self._same_seeds.getrandbits(63)
        self._requests[name] = request
        self.outputs[name] = []
        replay = self.engine.limits.replay
        tail_start = 0 if replay is None else replay.tail_start(len(request.prompt_token_ids))
        self.expected[name] = expected_tokens(request, seed, self.length_max, tail_start)
        self.check()
        return name

    def abort(self, name: str) -> None:
        delta = self.engine.abort(name)
        assert (delta is None) == (name in self.reasons), f"{name} ended twice or never"
        if delta is not None:
            assert delta.token_ids == ()
            assert delta.finish_reason is FinishReason.ABORT
            self._take([delta])
        self.check()

    def plan(self) -> StepPlan | None:
        """Plan and submit one step."""
        plan = self.engine.plan()
        if plan is not None:
            self.device.submit(plan)
            self.num_computed_tokens += len(plan.token_ids)
        self.check()
        return plan

    def commit(self) -> None:
        """Collect and commit the oldest step, if there is one."""
        if self.device.in_flight:
            self._take(self.engine.commit(self.device.collect()))
        self.check()

    def step(self) -> None:
        """Plan what can be planned, then commit one step."""
        while self.plan() is not None:
            pass
        self.commit()

    def drain(self, num_steps_max: int = 5000) -> None:
        """Step until nothing is left, then check the end state and every token."""
        for _ in range(num_steps_max):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"still busy after {num_steps_max} steps"
        status = self.engine.status()
        assert status.num_free_blocks == status.num_blocks
        assert status.num_free_slots == status.num_slots
        assert status.num_waiting == status.num_running == status.num_steps_in_flight == 0
        assert set(self.reasons) == set(self._requests)
        for name, reason in self.reasons.items():
            self._check_output(name, reason)

    def check(self) -> None:
        """Each block and slot is free or held by one row; steps in flight use none that is free."""
        table = self.engine._table
        held = [
            block
            for row in range(table.slots.num_slots)
            for block in table.block_tables[row, : table.num_blocks[row]].tolist()
        ]
        held += [block for _, block in table._replaced]
        holders = table.blocks.num_holders
        assert 0 not in held, "the padding block is held"
        np.testing.assert_array_equal(np.bincount(held, minlength=len(holders)), holders)
        assert table.blocks.num_free + len(set(held)) == table.blocks.num_usable
        self._check_prefixes()
        running = [row for row, sequence in enumerate(table.sequences) if sequence is not None]
        assert np.flatnonzero(table.sequence_ids >= 0).tolist() == running
        num_retiring = len(table._retiring)
        assert table.slots.num_free + len(running) + num_retiring == table.slots.num_usable
        for row in running:
            sequence = table.sequences[row]
            assert sequence is not None
            assert sequence.num_tokens == table.num_tokens[row]
            num_ahead = max(len(self.device.in_flight), 1) * (self.engine.limits.num_drafts + 1)
            assert table.num_scheduled[row] < table.num_tokens[row] + num_ahead
            assert table.num_computed[row] <= table.num_tokens[row] <= table.length_limits[row]
            assert table.num_scheduled[row] < table.length_limits[row]
            assert table.num_scheduled[row] <= table.num_blocks[row] * table.block_size
            self._check_row(row, sequence)
        status = self.engine.status()
        assert status.num_running == len(running)
        assert status.num_waiting + len(running) == len(self._requests) - len(self.reasons)
        for plan in self.device.in_flight:
            used = plan.block_tables[plan.block_tables > 0]
            assert holders[used].all(), f"step {plan.step_index} in flight uses a free block"
            assert not set(plan.slots.tolist()) & set(table.slots._free)

    def _check_row(self, row: int, sequence: Sequence) -> None:
        """The counts of a row are those of the steps in flight, and it holds no block too many."""
        table, limits = self.engine._table, self.engine.limits
        plans = [plan for plan in self.device.in_flight if row in plan.slots]
        num_in_flight = sum(sequence.sequence_id in plan.sequence_ids for plan in plans)
        assert table.num_in_flight[row] == num_in_flight <= limits.in_flight_max
        if sequence.status is not SequenceStatus.DECODING:
            return  # A chunk that was cut before an image may have blocks for what comes next.
        if not num_in_flight:
            assert table.num_scheduled[row] == table.num_computed[row] == table.num_tokens[row] - 1
        # Drafts of each step in flight, and of the one to come, may all be kept.
        reach = table.num_scheduled[row] + 1 + (limits.in_flight_max + 1) * limits.num_drafts
        assert table.num_blocks[row] <= -(-reach // table.block_size)

    def _check_prefixes(self) -> None:
        """Shared blocks are those of equal prefixes; each snapshot slot has one use."""
        table, size = self.engine._table, self.engine.limits.block_size
        num_snapshots = self.engine.limits.num_snapshots
        index = table.prefixes
        named = set(index._keys)
        assert set(np.flatnonzero(table.blocks._is_named).tolist()) == named
        for row, sequence in enumerate(table.sequences):
            num_named = int(table.num_named[row]) if num_snapshots else 0
            if sequence is not None:
                num_there = max(table.num_computed[row], table.entry_starts[row])
                assert table.num_named[row] * size <= num_there
                keys = sequence.keys(num_named, size)
                assert [index.block(key) for key in keys] == table.block_tables[
                    row, :num_named
                ].tolist()
                own = table.block_tables[row, num_named : table.num_blocks[row]].tolist()
                assert not named & set(own), "a named block may be written"
        pending = [copy.slot for copy in self.engine._snapshots._copies]
        slots = [*pending, *index._free_slots, *index._used_slots]
        assert len(set(slots)) == len(slots) == num_snapshots
        for slot in index._used_slots:
            assert index.snapshot(index._slot_keys[slot]) == slot

    def _take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            name = delta.request_id
            assert name not in self.reasons, f"{name} goes on after its end"
            assert delta.num_prompt_tokens == len(self._requests[name].prompt_token_ids)
            assert self.num_cached.setdefault(name, delta.num_cached_tokens) == (
                delta.num_cached_tokens
            )
            self.outputs[name].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[name] = delta.finish_reason

    def _check_output(self, name: str, reason: FinishReason) -> None:
        output, expected = self.outputs[name], self.expected[name]
        if reason is FinishReason.ABORT:
            assert output == expected[: len(output)], name
            assert len(output) < len(expected), f"{name} was over before it was aborted"
            return
        assert output == expected, name
        sampling = self._requests[name].sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        assert (reason is FinishReason.STOP) == (output[-1] in stops), name


def make_limits(
    num_blocks: int = 65,
    num_slots: int = 5,
    context_max: int = 64,
    waiting_max: int = 100,
    in_flight_max: int = 1,
    num_snapshots: int = 0,
    num_drafts: int = 0,
    replay: ReplayRule | None = None,
) -> EngineLimits:
    """Limits with blocks of four tokens."""
    return EngineLimits(
        num_blocks=num_blocks,
        num_slots=num_slots,
        context_max=context_max,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        waiting_max=waiting_max,
        block_size=4,
        in_flight_max=in_flight_max,
        num_snapshots=num_snapshots,
        num_drafts=num_drafts,
        replay=replay,
    )


def make_buckets(prefill: list[tuple[int, ...]], decode: list[tuple[int, ...]]) -> BucketTable:
    """Buckets from (rows, tokens, blocks)."""
    return BucketTable(
        {
            StepKind.PREFILL: [Bucket(*sizes) for sizes in prefill],
            StepKind.DECODE: [Bucket(*sizes) for sizes in decode],
        }
    )


BUCKETS = make_buckets(
    prefill=[(4, 8, 16), (4, 16, 16)], decode=[(1, 1, 16), (2, 2, 16), (4, 4, 16)]
)


def walk(
    checked: CheckedEngine, trace: Iterable[tuple], admit: Callable[..., list[str]]
) -> list[str]:
    """Make the calls of a trace, each a name and its values, then drain the engine.

    `admit` takes the values of an "admit" and returns the names of the requests that it made; an
    "abort" has a number that chooses among all of them, a "step" how often to step. Returns all.
    """
    names: list[str] = []
    for call, *values in trace:
        if call == "admit":
            names += admit(*values)
        elif call == "abort":
            if names:
                checked.abort(names[values[0] % len(names)])
        else:
            for _ in range(*values or (1,)):
                getattr(checked, call)()
    checked.drain()
    return names


def step_on(
    checked: CheckedEngine, source: random.Random, name: str, steps_max: int, abort_share: float
) -> None:
    """Step a few times, and now and then abort a request that is not over."""
    for _ in range(source.randint(0, steps_max)):
        checked.step()
    if source.random() < abort_share and name not in checked.reasons:
        checked.abort(name)
