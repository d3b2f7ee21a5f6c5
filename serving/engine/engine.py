"""One engine: requests in, plans out, results in, tokens out.

The engine is arithmetic. It knows no device, clock or thread; whoever drives it moves its plans to
an `Executor` and the results back:

1. `admit` checks a request and queues it.
2. `plan` starts waiting requests, chooses a prefill or a decode step, claims the blocks for it and
   returns it as integers. It depends on nothing but the engine's state.
3. The executor runs it; the next step may be planned meanwhile, up to `in_flight_max`.
4. `commit` takes the results in the order of the plans, adds the sampled tokens, ends what is
   finished and frees what no step in flight uses.
5. `abort` ends a request at any moment, between any two of these.

Prefill and decode alternate while both have work: never two prefill steps between two decode
steps, so a token waits for at most one chunk; and never two decode steps while a prompt could be
computed, so a prompt gets at least every second step.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.core import decode_scheduler, prefill_scheduler
from serving.core.blocks import BLOCK_SIZE
from serving.core.buckets import BucketTable, StepKind
from serving.core.prefill_scheduler import WaitingQueue
from serving.core.request import (
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    TokenDelta,
)
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.step_plan import StepImage, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may use and accept.

    Attributes:
        num_blocks: KV blocks on the device, the padding block 0 included.
        num_slots: state slots on the device, the padding slot 0 included; one less run at a time.
        context_max: tokens of a sequence, prompt and output, at which it ends.
        vocab_size: token ids lie below it.
        eos_token_id: the token that ends a sequence by itself; None if there is none.
        waiting_max: requests that may wait beyond those that free slots can take at once.
        block_size: tokens of a block.
        in_flight_max: steps planned but not committed at one time.
    """

    num_blocks: int
    num_slots: int
    context_max: int
    vocab_size: int
    eos_token_id: int | None
    waiting_max: int = 1024
    block_size: int = BLOCK_SIZE
    in_flight_max: int = 1


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of what the engine holds; padding blocks and slots are not counted.

    Blocks that a step in flight still uses are not free, even if their sequence is over.
    `num_steps` and `num_preemptions` count since the start.
    """

    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_steps_in_flight: int
    num_blocks: int
    num_free_blocks: int
    num_slots: int
    num_free_slots: int
    num_steps: int
    num_preemptions: int

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return self.num_prefilling + self.num_decoding


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

    Raises:
        ValueError: limits that contradict each other or the buckets.
    """

    def __init__(
        self, limits: EngineLimits, buckets: BucketTable, random_source: random.Random
    ) -> None:
        _check_limits(limits, buckets)
        self.limits = limits
        self.buckets = buckets
        self._random = random_source
        pool_tokens = (limits.num_blocks - 1) * limits.block_size
        self._length_max = min(limits.context_max, pool_tokens)
        self._table = RunningTable(
            limits.num_slots,
            limits.num_blocks,
            limits.block_size,
            # As wide as the widest bucket, so that a plan's block tables are one slice.
            max(buckets.largest(kind).num_blocks for kind in StepKind),
        )
        self._waiting = WaitingQueue()
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

    def admit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; `param` names the field at fault.
            QueueFullError: it could be served later.
        """
        prompt = self._check_request(request)
        num_waiting_max = self.limits.waiting_max + self._table.slots.num_free
        if len(self._waiting) >= num_waiting_max:
            raise QueueFullError(len(self._waiting), self.limits.waiting_max)
        sampling = request.sampling
        stops = set(sampling.stop_token_ids)
        if self.limits.eos_token_id is not None and not sampling.ignore_eos:
            stops.add(self.limits.eos_token_id)
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        sequence = Sequence(
            sequence_id=self._num_admitted,
            request=request,
            prompt=prompt,
            seed=seed,
            stop_token_ids=tuple(sorted(stops)),
            length_limit=min(len(prompt) + sampling.max_tokens, self._length_max),
        )
        self._num_admitted += 1
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenDelta | None:
        """End a request now and return its last delta; None if it is unknown or already over.

        What a step in flight still computes for it is dropped.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.row:
            self._table.leave(sequence.row, SequenceStatus.FINISHED)
        else:
            self._waiting.remove(sequence)
            sequence.move_to(SequenceStatus.FINISHED)
        return sequence.delta((), reason)

    def fail(self) -> list[TokenDelta]:
        """The executor is lost: end every request with `ERROR` and forget the steps in flight."""
        deltas = [self.abort(name, FinishReason.ERROR) for name in list(self._sequences)]
        self._in_flight.clear()
        self._table.settle(self._num_steps - 1)
        return [delta for delta in deltas if delta is not None]

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit or admission."""
        if len(self._in_flight) >= self.limits.in_flight_max:
            return None
        if len(self._waiting):
            prefill_scheduler.start_waiting(self._waiting, self._table)
        if self._last_kind is StepKind.DECODE:
            plan = self._plan_prefill() or self._plan_decode()
        else:
            plan = self._plan_decode()
            # While all decoding rows are in flight, waiting for them keeps their gap at one chunk.
            if plan is None and not (self._in_flight and len(self._table.decoding_rows)):
                plan = self._plan_prefill()
        if plan is None:
            assert self._in_flight or not self._sequences, (
                f"nothing can run although {len(self._sequences)} requests are unfinished"
            )
            return None
        self._in_flight.append(plan)
        self._last_kind = plan.kind
        return plan

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over the results of the oldest step in flight.

        Rows whose sequence left in the meantime are dropped.

        Raises:
            ValueError: the result belongs to another step or has the wrong shape.
        """
        plan = self._check_result(result)
        self._in_flight.popleft()
        table = self._table
        ends = plan.starts + plan.num_tokens
        # A chunk that is not a prompt's last one samples too, but its token means nothing.
        is_sampled = (table.sequence_ids[plan.slots] == plan.sequence_ids) & (
            table.num_tokens[plan.slots] == ends
        )
        deltas = self._add_tokens(plan.kind, plan.slots[is_sampled], result.token_ids[is_sampled])
        table.settle(plan.step_index)
        return deltas

    def status(self) -> EngineStatus:
        """Counts for metrics and health."""
        table = self._table
        return EngineStatus(
            num_waiting=len(self._waiting),
            num_prefilling=len(table.prefilling_rows),
            num_decoding=len(table.decoding_rows),
            num_steps_in_flight=len(self._in_flight),
            num_blocks=table.blocks.num_usable,
            num_free_blocks=table.blocks.num_free,
            num_slots=table.slots.num_usable,
            num_free_slots=table.slots.num_free,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
        )

    def _plan_prefill(self) -> StepPlan | None:
        table = self._table
        shortest_first = self._num_prefill_steps % 2 == 1
        rows, num_tokens = prefill_scheduler.choose_chunks(table, self.buckets, shortest_first)
        self._requeue_preempted()
        if not len(rows):
            return None
        self._num_prefill_steps += 1
        starts = table.num_scheduled[rows]
        chunks: list[np.ndarray] = []
        images: list[StepImage] = []
        num_before = 0
        for row, start, count in zip(
            rows.tolist(), starts.tolist(), num_tokens.tolist(), strict=True
        ):
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} is planned but empty"
            chunks.append(sequence.tokens(start, start + count))
            images += [
                StepImage(num_before + image.start - start, image)
                for image in sequence.request.images
                if start <= image.start < start + count
            ]
            num_before += count
        token_ids = np.concatenate(chunks)
        return self._make_plan(StepKind.PREFILL, rows, num_tokens, token_ids, tuple(images))

    def _plan_decode(self) -> StepPlan | None:
        rows = decode_scheduler.choose_rows(self._table, self.buckets)
        self._requeue_preempted()
        if not len(rows):
            return None
        num_tokens = np.ones(len(rows), np.int32)
        return self._make_plan(StepKind.DECODE, rows, num_tokens, self._table.last_tokens[rows])

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
        num_blocks = int(table.blocks_for(ends).max())
        bucket = self.buckets.smallest(kind, len(rows), len(token_ids), num_blocks)
        assert bucket is not None, (
            f"no {kind.value} bucket for {len(rows)} rows, {len(token_ids)} tokens, {num_blocks} "
            "blocks"
        )
        step_index = self._num_steps
        self._num_steps += 1
        table.num_scheduled[rows] = ends
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
            block_tables=table.block_tables[rows, : bucket.num_blocks],
            temperatures=table.temperatures[rows],
            top_ks=table.top_ks[rows],
            top_ps=table.top_ps[rows],
            seeds=table.seeds[rows],
            images=images,
        )

    def _add_tokens(self, kind: StepKind, rows: np.ndarray, tokens: np.ndarray) -> list[TokenDelta]:
        """Append one sampled token to each row; end the rows that are finished by it."""
        table = self._table
        table.num_tokens[rows] += 1
        table.last_tokens[rows] = tokens
        is_stop = (table.stop_tokens[rows] == tokens[:, None]).any(axis=1)
        is_over = is_stop | (table.num_tokens[rows] >= table.length_limits[rows])
        deltas: list[TokenDelta] = []
        row_list, token_list = rows.tolist(), tokens.tolist()
        for row, token in zip(row_list, token_list, strict=True):
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} is committed but empty"
            sequence.output_token_ids.append(token)
            deltas.append(sequence.delta((token,)))
            if kind is StepKind.PREFILL:
                table.begin_decoding(row)
        for index in np.flatnonzero(is_over).tolist():
            reason = FinishReason.STOP if is_stop[index] else FinishReason.LENGTH
            sequence = table.sequences[row_list[index]]
            assert sequence is not None, f"row {row_list[index]} is committed but empty"
            del self._sequences[sequence.request.request_id]
            table.leave(row_list[index], SequenceStatus.FINISHED)
            deltas[index] = sequence.delta((token_list[index],), reason)
        return deltas

    def _requeue_preempted(self) -> None:
        for sequence in self._table.take_preempted():
            self._waiting.put_back(sequence)
            self._num_preemptions += 1

    def _check_request(self, request: Request) -> np.ndarray:
        """Raise `RequestError` if it can never be served; else its prompt, [L] int32."""
        if request.request_id in self._sequences:
            raise RequestError(
                f"request_id {request.request_id!r} is already running; expected a new one",
                "request_id",
            )
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise RequestError("the prompt has no tokens; expected at least one", "prompt")
        if num_tokens >= self.limits.context_max:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; expected at most "
                f"{self.limits.context_max - 1}, to leave room for one more in a context of "
                f"{self.limits.context_max}",
                "prompt",
            )
        if num_tokens >= self._length_max:
            num_blocks = self._table.blocks.num_usable
            raise RequestError(
                f"the prompt has {num_tokens} tokens; expected at most {self._length_max - 1}, "
                f"because the pool has {num_blocks} blocks of {self.limits.block_size} tokens; "
                "enlarge the pool or shorten the prompt",
                "prompt",
            )
        self._check_ids(request.prompt_token_ids, "prompt")
        self._check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self._check_images(request)
        return np.array(request.prompt_token_ids, np.int32)

    def _check_images(self, request: Request) -> None:
        """An image must lie in the prompt, and in a single prefill step of some bucket."""
        stop_before = 0
        for index, image in enumerate(request.images):
            if not stop_before <= image.start < image.stop <= len(request.prompt_token_ids):
                raise RequestError(
                    f"image {index + 1} covers tokens {image.start} to {image.stop - 1}; expected "
                    f"tokens from {stop_before} to {len(request.prompt_token_ids) - 1}",
                    "images",
                )
            stop_before = image.stop
            fits = self.buckets.smallest(
                StepKind.PREFILL, 1, image.num_tokens, -(-image.stop // self.limits.block_size)
            )
            if fits is None:
                num_tokens = self.buckets.largest(StepKind.PREFILL).num_tokens
                raise RequestError(
                    f"image {index + 1} has {image.num_tokens} tokens; expected at most "
                    f"{num_tokens}, because an image is computed in one prefill step; send a "
                    "smaller image or add a larger prefill size",
                    "images",
                )

    def _check_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        vocab_size = self.limits.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
            raise RequestError(
                f"token {index} of {param} is {token_ids[index]}; expected 0 to {vocab_size - 1}",
                param,
            )

    def _check_result(self, result: StepResult) -> StepPlan:
        if not self._in_flight:
            raise ValueError(f"result of step {result.step_index}, but no step is in flight")
        plan = self._in_flight[0]
        if result.step_index != plan.step_index:
            raise ValueError(
                f"result of step {result.step_index}; expected step {plan.step_index}, the oldest "
                "in flight"
            )
        # One token per row in both kinds of step: a row decodes one token at a time.
        if result.token_ids.shape != (plan.num_rows,):
            raise ValueError(
                f"result of step {plan.step_index} has token_ids of shape "
                f"{result.token_ids.shape}; expected ({plan.num_rows},)"
            )
        return plan


def run_step(engine: Engine, executor: Executor) -> list[TokenDelta]:
    """Submit what can be planned, then wait for the oldest step; no deltas if there is no work."""
    while (plan := engine.plan()) is not None:
        executor.submit(plan)
    if not engine.status().num_steps_in_flight:
        return []
    return engine.commit(executor.collect())


def _check_limits(limits: EngineLimits, buckets: BucketTable) -> None:
    for name in ("context_max", "vocab_size", "block_size", "in_flight_max"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}; expected at least 1")
    if limits.waiting_max < 0:
        raise ValueError(f"waiting_max is {limits.waiting_max}; expected 0 or more")
    if limits.context_max < 2:
        raise ValueError("context_max is 1; expected at least 2, a prompt token and one more")
    for kind in StepKind:
        num_tokens = buckets.largest(kind).num_blocks * limits.block_size
        if num_tokens < limits.context_max:
            raise ValueError(
                f"context_max is {limits.context_max}, but the widest {kind.value} bucket holds "
                f"{num_tokens} tokens; expected a bucket with at least "
                f"{-(-limits.context_max // limits.block_size)} blocks, or a smaller context_max"
            )
