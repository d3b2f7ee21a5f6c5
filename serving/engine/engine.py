"""One engine: requests in, plans out, results in, tokens out.

The engine is arithmetic. It knows no device, clock or thread; whoever drives it moves its plans to
an `Executor` and the results back:

1. `admit` checks a request and queues it.
2. `plan` starts waiting requests, chooses a prefill or a decode step, claims the blocks for it and
   returns it as integers. It depends on nothing but the engine's state.
3. The executor runs it; the next step is planned meanwhile, up to `in_flight_max` in all. It may
   feed tokens that only the device knows yet. With two, step N is planned knowing the results up
   to those of step N-2, and the device does not wait for the host.
4. `commit` takes the results in the order of the plans, adds the sampled tokens, ends what is
   finished and frees what no step in flight uses.
5. `abort` ends a request at any moment, between any two of these.

Prefill and decode alternate while both have work: never two prefill steps between two decode
steps, so a token waits for at most one chunk; and never two decode steps while a prompt could be
computed, so a prompt gets at least every second step.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from serving.core import decode_scheduler, prefill_scheduler, step_controls
from serving.core.admission import (
    EngineLimits,
    check_limits,
    check_request,
    length_max,
    make_sequence,
)
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.cost_correction import CostCorrection
from serving.core.draft_counts import DraftCounts
from serving.core.engine_status import EngineStatus, Scheduler
from serving.core.forking import ForkGroups
from serving.core.grammar import Grammar
from serving.core.hand_off import HandedContext, HandOffs
from serving.core.image_features import FeatureShelf
from serving.core.kv_transfer import KVTransfer
from serving.core.outputs import add_tokens
from serving.core.prefill_scheduler import PrefillBudget
from serving.core.prefix import PrefixKey
from serving.core.prefix_transfer import PrefixTransfers
from serving.core.request import (
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    TokenDelta,
)
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.snapshots import SnapshotCopies
from serving.core.step_plan import LAST_SAMPLED, StepImage, StepPlan, StepResult, check_result
from serving.core.waiting_queue import WaitingQueue


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step; does not wait for it."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted and not collected yet."""
        ...


class Engine:
    """Continuous batching over one executor.

    A sequence ends at `context_max` tokens, or at what the whole pool holds if that is less.

    Args:
        random_source: of the seeds of requests without one.
        step_ms: measured time of decode buckets, which decides how many drafts are verified. It is
            corrected by the times that come with results.
        prefill_budget: the time that a prefill step may take; None for no limit.

    Raises:
        ValueError: limits that contradict each other or the buckets.
    """

    def __init__(
        self,
        limits: EngineLimits,
        buckets: BucketTable,
        random_source: random.Random,
        step_ms: Mapping[Bucket, float] | None = None,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        check_limits(limits, buckets)
        self.limits = limits
        self.buckets = buckets
        self._random = random_source
        self._costs = decode_scheduler.DecodeCosts(buckets, step_ms or {})
        self._correction = CostCorrection(step_ms or {})
        self._prefill_budget = prefill_budget
        self._draft_counts = DraftCounts(limits.num_drafts)
        self._length_max = length_max(limits)
        self._table = RunningTable(
            limits.num_slots,
            limits.num_blocks,
            limits.block_size,
            # As wide as the widest bucket, so that a plan's block tables are one slice.
            max(buckets.largest(kind).num_blocks for kind in StepKind),
            limits.num_snapshots,
            limits.num_drafts,
            limits.replay,
        )
        self._snapshots = SnapshotCopies(self._table)
        self.transfers = PrefixTransfers(self._table, limits)
        self.hand_offs = HandOffs(self._table, self.transfers.next_id)
        self.features = FeatureShelf()
        self._waiting = WaitingQueue[Sequence](self._table.num_owned)
        self._forks = ForkGroups()
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._num_admitted = 0
        self._num_steps = 0
        self._num_prefill_steps = 0
        self._num_preemptions = 0
        self._last_kind = StepKind.DECODE

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self._sequences or self._in_flight)

    def admit(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request; `grammar` is what its constraint was compiled to, if it has one.

        Raises:
            RequestError: it can never be served; `param` names the field at fault.
            QueueFullError: it could be served later.
        """
        self._check_new(request)
        num_waiting_max = self.limits.waiting_max + self._table.slots.num_free
        if self._num_waiting >= num_waiting_max:
            raise QueueFullError(self._num_waiting, self.limits.waiting_max)
        sequence = self._make_sequence(request, grammar)
        # Hashed now, so that planning only looks up.
        is_shared = bool(self._table.whole_keys(sequence))
        self._sequences[request.request_id] = sequence
        if request.fork_group is None or not is_shared or not self._forks.hold(sequence):
            self._waiting.add(sequence)

    def adopt(
        self, request: Request, context: HandedContext, grammar: Grammar | None = None
    ) -> KVTransfer | None:
        """Go on with a request whose context was computed elsewhere, up to its last token.

        Returns the transfer that brings it, to be run before any later plan; None without room.

        Raises:
            RequestError: it can never be served, or is running.
        """
        self._check_new(request)
        sequence = self._make_sequence(request, grammar)
        transfer = self.hand_offs.adopt(sequence, context)
        if transfer is not None:
            self._sequences[request.request_id] = sequence
        return transfer

    def hold_present(self, request: Request) -> list[int]:
        """Hold the blocks that are here of the context of a request that will be adopted.

        Whoever asks gives them to `hand_offs.release` in the end.
        """
        sequence = make_sequence(request, self.limits, -1, 0, None)
        return self.hand_offs.hold_present(sequence, sequence.num_tokens - 1)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenDelta | None:
        """End a request now and return its last delta; None if it is unknown or already over.

        What a step in flight still computes for it is dropped.
        """
        self.features.drop(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        self.transfers.unstage(request_id)
        if sequence.row:
            self._table.leave(sequence.row, SequenceStatus.FINISHED)
        else:
            if not self._forks.discard(sequence):
                self._waiting.remove(sequence)
            sequence.move_to(SequenceStatus.FINISHED)
        self._queue_forked()
        return sequence.delta((), reason)

    def fail(self) -> list[TokenDelta]:
        """The executor is lost: end every request with `ERROR` and forget the steps in flight."""
        if not self.has_work:
            return []
        deltas = [self.abort(name, FinishReason.ERROR) for name in list(self._sequences)]
        self._in_flight.clear()
        self._snapshots.settle(self._num_steps - 1)
        self._table.settle(self._num_steps - 1)
        self._table.forget_prefixes()
        return [delta for delta in deltas if delta is not None]

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request is here and holds no memory yet."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.status is SequenceStatus.WAITING

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit or admission."""
        if len(self._in_flight) >= self.limits.in_flight_max:
            return None
        self.start_waiting()
        if self._last_kind is StepKind.DECODE:
            plan = self.plan_kind(StepKind.PREFILL) or self.plan_kind(StepKind.DECODE)
        else:
            plan = self.plan_kind(StepKind.DECODE)
            if plan is None and not self.waits_for_memory:
                plan = self.plan_kind(StepKind.PREFILL)
        assert plan is not None or self._in_flight or not self._sequences, (
            f"nothing can run although {len(self._sequences)} requests are unfinished"
        )
        return plan

    def start_waiting(self) -> None:
        """Give memory to the waiting requests that fit; the first half of `plan`."""
        if len(self._waiting):
            prefill_scheduler.start_waiting(self._waiting, self._table, self.transfers)
            self._requeue_preempted()

    @property
    def waits_for_memory(self) -> bool:
        """Whether rows that could not run wait for memory, which comes with the steps in flight.

        To wait for those before the next prefill step keeps the gap between their tokens at one
        chunk.
        """
        return bool(self._in_flight and len(self._table.generating_rows))

    def plan_kind(self, kind: StepKind) -> StepPlan | None:
        """The next step of one kind; None if there is none before another commit or admission."""
        plan = self._plan_prefill() if kind is StepKind.PREFILL else self._plan_decode()
        if plan is not None:
            self._in_flight.append(plan)
            self._last_kind = kind
        return plan

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over the results of the oldest step in flight.

        Rows whose sequence left in the meantime are dropped.

        Raises:
            ValueError: the result belongs to another step or has the wrong shape.
        """
        plan = self._check_result(result)
        self._in_flight.popleft()
        if result.elapsed_ms is not None and plan.kind is StepKind.DECODE:
            self._correction.observe(plan.bucket, result.elapsed_ms)
        table = self._table
        is_running = table.sequence_ids[plan.slots] == plan.sequence_ids
        running = slice(None) if is_running.all() else is_running
        rows, counts = plan.slots[running].astype(np.intp), plan.num_tokens[running]
        tokens = result.token_ids[running].reshape(-1, self.limits.num_drafts + 1)
        table.num_in_flight[rows] -= 1
        num_kept = np.count_nonzero(tokens >= 0, axis=1)
        is_sampled: np.ndarray | slice = slice(None)
        if plan.kind is StepKind.PREFILL:
            num_computed = plan.starts[running] + counts
            # A chunk that is not a prompt's last one samples too, but its token means nothing.
            is_sampled = table.num_tokens[rows] == num_computed
        else:
            table.num_scheduled[rows] += num_kept - counts
            self._draft_counts.add(counts - 1, num_kept - 1)
            num_computed = table.num_computed[rows] + num_kept
        if result.confidences is not None:
            table.add_confidences(rows, result.confidences[running])
        controlled = [] if plan.controls is None else self._take_prompts(plan, result, is_running)
        deltas, over = add_tokens(table, rows[is_sampled], tokens[is_sampled], num_kept[is_sampled])
        # What was kept behind an end does not count.
        table.add_computed(rows, np.minimum(num_computed, table.num_tokens[rows]))
        self._snapshots.settle(plan.step_index)
        for row in over:
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} is over but empty"
            del self._sequences[sequence.request.request_id]
            self.features.drop(sequence.request.request_id)
            self.hand_offs.note_end(sequence)
            table.leave(row, SequenceStatus.FINISHED)
        if controlled:
            # Places among the deltas of the rows of the plan.
            places = np.full(plan.num_rows, -1)
            places[np.flatnonzero(is_running)[is_sampled]] = np.arange(len(deltas))
            for index, sequence in controlled:
                at = int(places[index])
                if at >= 0:
                    deltas[at] = self._take_tokens(sequence, plan, index, result, deltas[at])
        table.settle(plan.step_index)
        self._queue_forked()
        return deltas

    def num_usable_blocks(self, keys: list[PrefixKey]) -> int:
        """Blocks of a prompt with these prefixes that are here already."""
        return self._table.prefixes.num_usable(keys)

    def status(self) -> EngineStatus:
        """Counts for metrics and health."""
        table = self._table
        return EngineStatus(
            num_waiting=self._num_waiting,
            num_prefilling=len(table.prefilling_rows),
            num_decoding=len(table.decoding_rows),
            num_steps_in_flight=len(self._in_flight),
            num_blocks=table.blocks.num_usable,
            num_free_blocks=table.blocks.num_free,
            num_slots=table.slots.num_usable,
            num_free_slots=table.slots.num_free,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_cached_blocks=table.blocks.num_free_named,
            num_snapshots=table.prefixes.num_used_snapshots,
            num_verified=self._draft_counts.verified,
            num_accepted=self._draft_counts.accepted,
            slope_ms=self._correction.slope_ms,
        )

    def _plan_prefill(self) -> StepPlan | None:
        table = self._table
        if not len(table.prefilling_rows):
            return None
        shortest_first = self._num_prefill_steps % 2 == 1
        rows, num_tokens = prefill_scheduler.choose_chunks(
            table, self.buckets, shortest_first, self._prefill_budget
        )
        self._requeue_preempted()
        if not len(rows):
            return None
        self._num_prefill_steps += 1
        starts = table.num_scheduled[rows]
        for row in rows[starts + num_tokens == table.num_tokens[rows]].tolist():
            table.begin_decoding(row)
        chunks: list[np.ndarray] = []
        images: list[StepImage] = []
        num_before = 0
        for row, start, count in zip(
            rows.tolist(), starts.tolist(), num_tokens.tolist(), strict=True
        ):
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} is planned but empty"
            chunks.append(sequence.tokens(start, start + count))
            images += self._step_images(sequence.request, range(start, start + count), num_before)
            num_before += count
        token_ids = np.concatenate(chunks)
        return self._make_plan(StepKind.PREFILL, rows, num_tokens, token_ids, tuple(images))

    def _step_images(self, request: Request, span: range, num_before: int) -> Iterator[StepImage]:
        """Images that stand at these positions, in a step with so many tokens before them."""
        for index, image in enumerate(request.images):
            if image.start in span:
                is_last = all(o.digest != image.digest for o in request.images[index + 1 :])
                features = self.features.take(request.request_id, image.digest, is_last)
                yield StepImage(num_before + image.start - span.start, image, features)

    def _plan_decode(self) -> StepPlan | None:
        rows = decode_scheduler.choose_rows(self._table, self.buckets)
        self._requeue_preempted()
        if not len(rows):
            return None
        table = self._table
        num_tokens = decode_scheduler.choose_lengths(
            table, self._costs, rows, self._correction.slope_ms
        )
        token_ids = np.zeros(num_tokens.sum(), np.int32)
        is_known = table.num_in_flight[rows] == 0
        firsts = np.cumsum(num_tokens) - num_tokens
        token_ids[firsts] = np.where(is_known, table.last_tokens[rows], LAST_SAMPLED)
        return self._make_plan(StepKind.DECODE, rows, num_tokens, token_ids)

    def _make_plan(
        self,
        kind: StepKind,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        images: tuple[StepImage, ...] = (),
    ) -> StepPlan:
        table = self._table
        starts = table.num_scheduled[rows]
        ends = starts + num_tokens
        num_blocks = table.blocks_of(int(ends.max()))
        bucket = self.buckets.smallest(kind, len(rows), len(token_ids), num_blocks)
        assert bucket is not None, (
            f"no {kind.value} bucket for {len(rows)} rows, {len(token_ids)} tokens, {num_blocks} "
            "blocks"
        )
        step_index = self._num_steps
        self._num_steps += 1
        is_prefill = kind is StepKind.PREFILL
        sure = starts if is_prefill else table.num_tokens[rows] - 1 + table.num_in_flight[rows]
        snapshots = self._snapshots.plan(step_index, rows, sure, ends, is_prefill)
        tail = None
        if is_prefill and (replay := self.limits.replay) is not None:
            tail = replay.step_tail(bucket, starts, num_tokens, *table.replayed(rows))
        table.num_scheduled[rows] = ends
        table.num_in_flight[rows] += 1
        table.last_steps[rows] = step_index
        return StepPlan(
            step_index=step_index,
            kind=kind,
            bucket=bucket,
            sequence_ids=table.sequence_ids[rows],
            slots=rows.astype(np.int32),
            starts=starts,
            num_tokens=num_tokens,
            token_ids=token_ids,
            # Wider than the bucket in general, but whole rows are gathered faster.
            block_tables=table.block_tables.take(rows, axis=0)[:, : bucket.num_blocks],
            temperatures=table.temperatures[rows],
            top_ks=table.top_ks[rows],
            top_ps=table.top_ps[rows],
            seeds=table.seeds[rows],
            images=images,
            restores=table.take_restores(),
            snapshots=snapshots,
            controls=step_controls.plan_controls(
                table, kind, rows, starts, num_tokens, self.limits.vocab_size
            ),
            tail=tail,
        )

    def _take_prompts(
        self, plan: StepPlan, result: StepResult, is_running: np.ndarray
    ) -> list[tuple[int, Sequence]]:
        """Take what the step says of prompts; the rows that have controls and still run."""
        rows = step_controls.controlled_rows(self._table, plan.slots)
        rows = [(index, sequence) for index, sequence in rows if is_running[index]]
        if result.report is not None:
            for index, sequence in rows:
                step_controls.take_prompt_report(sequence, plan, index, result.report)
        return rows

    def _take_tokens(
        self, sequence: Sequence, plan: StepPlan, index: int, result: StepResult, delta: TokenDelta
    ) -> TokenDelta:
        """The delta of a row that has controls; ends its request if these say so."""
        is_over = delta.finish_reason is not None
        delta = step_controls.take_tokens(self._table, sequence, plan, index, result, delta)
        if delta.finish_reason is FinishReason.ERROR and not is_over:
            self.abort(delta.request_id, FinishReason.ERROR)
        return delta

    def _check_new(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise RequestError(
                f"request_id {request.request_id!r} is already running; expected a new one",
                "request_id",
            )
        check_request(request, self.limits, self.buckets)

    def _make_sequence(self, request: Request, grammar: Grammar | None) -> Sequence:
        given = request.sampling.seed
        seed = self._random.getrandbits(63) if given is None else given
        self._num_admitted += 1
        return make_sequence(request, self.limits, self._num_admitted - 1, seed, grammar)

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._forks.num_held

    def _queue_forked(self) -> None:
        for sequence in self._forks.take_ready():
            self._waiting.add(sequence)

    def _requeue_preempted(self) -> None:
        for sequence in self._table.take_preempted():
            self._waiting.add(sequence)
            self._num_preemptions += 1

    def _check_result(self, result: StepResult) -> StepPlan:
        if not self._in_flight:
            raise ValueError(f"result of step {result.step_index}, but no step is in flight")
        plan = self._in_flight[0]
        check_result(result, plan, self.limits.num_drafts)
        return plan


def run_step(engine: Scheduler, executor: Executor) -> list[TokenDelta]:
    """Submit what can be planned, then wait for the oldest step; no deltas if there is no work."""
    while (plan := engine.plan()) is not None:
        executor.submit(plan)
    if not engine.status().num_steps_in_flight:
        return []
    return engine.commit(executor.collect())
