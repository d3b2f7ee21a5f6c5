"""One engine for a mesh whose devices have rows of their own: one plan for all of them.

Each *rank* (a device that has its own rows, or a group of devices that have the same ones) keeps a
pool of blocks and slots of its own. What is planned for a rank depends on its pool alone, so there
is one `Engine` for each, and this one makes their plans into one:

1. `admit` chooses the rank of a request: where most of its prefix is, if ranks are about equally
   loaded, else where the least work waits. Samples of one prompt stay together.
2. `plan` asks every rank for a step of the same kind; prefill and decode take turns for the mesh as
   they do for one device. Parts that differ in size run in the bucket that holds all of them, and a
   rank without work has padding. So devices never wait for different programs.
3. `commit` gives every rank its part of the results.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from serving.core.admission import EngineLimits
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.engine_status import EngineStatus, total_status
from serving.core.grammar import Grammar
from serving.core.prefill_scheduler import PrefillBudget
from serving.core.prefix import prefix_keys, root_key
from serving.core.request import FinishReason, QueueFullError, Request, RequestError, TokenDelta
from serving.core.step_plan import StepPlan, StepResult, join_plans
from serving.engine.engine import Engine


class MeshEngine:
    """Continuous batching over one executor of `num_ranks` ranks.

    Args:
        limits: of each rank, but `waiting_max`, which is shared out.
        buckets: shapes of the part of one rank.
        step_ms, prefill_budget: as in `Engine`.

    Raises:
        ValueError: limits that contradict each other or the buckets; or buckets of a kind of which
            none is as large as all others in rows, tokens and blocks.
    """

    def __init__(
        self,
        num_ranks: int,
        limits: EngineLimits,
        buckets: BucketTable,
        random_source: random.Random,
        step_ms: Mapping[Bucket, float] | None = None,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        for kind in StepKind:
            if buckets.largest(kind) not in buckets.of(kind):
                raise ValueError(
                    f"no {kind.value} bucket is {buckets.largest(kind)}, so parts of a step may "
                    "fit different buckets only; expected one that holds whatever any other holds"
                )
        self.limits = limits
        self.buckets = buckets
        own = replace(limits, waiting_max=-(-limits.waiting_max // num_ranks))
        self._engines = [
            Engine(own, buckets, random_source, step_ms, prefill_budget) for _ in range(num_ranks)
        ]
        # Rank and reserved tokens of every unfinished request.
        self._ranks: dict[str, tuple[int, int]] = {}
        self._num_reserved = np.zeros(num_ranks, np.int64)
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0
        self._last_kind = StepKind.DECODE

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self._in_flight) or any(engine.has_work for engine in self._engines)

    def admit(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request at one of the ranks.

        Raises:
            RequestError: it can never be served; `param` names the field at fault.
            QueueFullError: it could be served later.
        """
        if request.request_id in self._ranks:
            raise RequestError(
                f"request_id {request.request_id!r} is already running; expected a new one",
                "request_id",
            )
        refused: QueueFullError | None = None
        for rank in self._ranks_for(request):
            try:
                self._engines[rank].admit(request, grammar)
            except QueueFullError as error:
                refused = error
                continue
            num_reserved = len(request.prompt_token_ids) + request.sampling.max_tokens
            num_reserved = min(num_reserved, self.limits.context_max)
            self._ranks[request.request_id] = (rank, num_reserved)
            self._num_reserved[rank] += num_reserved
            return
        assert refused is not None
        raise QueueFullError(self.status().num_waiting, self.limits.waiting_max) from refused

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenDelta | None:
        """End a request now and return its last delta; None if it is unknown or already over."""
        if request_id not in self._ranks:
            return None
        rank, _ = self._ranks[request_id]
        delta = self._engines[rank].abort(request_id, reason)
        self._forget([] if delta is None else [delta])
        return delta

    def fail(self) -> list[TokenDelta]:
        """The executor is lost: end every request with `ERROR` and forget the steps in flight."""
        self._in_flight.clear()
        self._ranks.clear()
        self._num_reserved[:] = 0
        return [delta for engine in self._engines for delta in engine.fail()]

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request is here and holds no memory yet."""
        return any(engine.is_waiting(request_id) for engine in self._engines)

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit or admission."""
        if len(self._in_flight) >= self.limits.in_flight_max:
            return None
        for engine in self._engines:
            engine.start_waiting()
        if self._last_kind is StepKind.DECODE:
            plan = self._plan_kind(StepKind.PREFILL) or self._plan_kind(StepKind.DECODE)
        else:
            plan = self._plan_kind(StepKind.DECODE)
            if plan is None and not any(engine.waits_for_memory for engine in self._engines):
                plan = self._plan_kind(StepKind.PREFILL)
        assert plan is not None or self._in_flight or not self._ranks, (
            f"nothing can run although {len(self._ranks)} requests are unfinished"
        )
        return plan

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over the results of the oldest step in flight.

        Raises:
            ValueError: the result belongs to another step or has the wrong shape.
        """
        if not self._in_flight:
            raise ValueError(f"result of step {result.step_index}, but no step is in flight")
        plan = self._in_flight[0]
        if result.step_index != plan.step_index or len(result.parts) != len(plan.parts):
            raise ValueError(
                f"result of step {result.step_index} with {len(result.parts)} parts; expected "
                f"step {plan.step_index}, the oldest in flight, with {len(plan.parts)}"
            )
        self._in_flight.popleft()
        deltas: list[TokenDelta] = []
        for engine, part in zip(self._engines, result.parts, strict=True):
            if part is not None:
                deltas += engine.commit(replace(part, elapsed_ms=result.elapsed_ms))
        self._forget(deltas)
        return deltas

    def status(self) -> EngineStatus:
        """Counts of all ranks together, for metrics and health."""
        statuses = [engine.status() for engine in self._engines]
        # A step of the mesh is one step, however many ranks have a part in it.
        return replace(
            total_status(statuses),
            num_steps=self._num_steps,
            num_steps_in_flight=len(self._in_flight),
        )

    def rank_statuses(self) -> tuple[EngineStatus, ...]:
        """Counts of each rank."""
        return tuple(engine.status() for engine in self._engines)

    def _ranks_for(self, request: Request) -> list[int]:
        """The ranks that may take the request, the best first."""
        if request.fork_group is not None and request.fork_group in self._ranks:
            return [self._ranks[request.fork_group][0]]
        load = self._num_reserved
        if self.limits.num_snapshots:
            prompt = np.array(request.prompt_token_ids[:-1], np.int32)
            root = root_key(self.limits.prefix_fingerprint, request.cache_salt)
            keys = prefix_keys(root, prompt, self.limits.block_size, request.images)
            usable = [engine.num_usable_blocks(keys) for engine in self._engines]
            # What a rank has of the prompt need not be computed there again.
            load = load - np.array(usable) * self.limits.block_size
        return np.argsort(load, kind="stable").tolist()

    def _forget(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                rank, num_reserved = self._ranks.pop(delta.request_id)
                self._num_reserved[rank] -= num_reserved

    def _plan_kind(self, kind: StepKind) -> StepPlan | None:
        parts = [engine.plan_kind(kind) for engine in self._engines]
        some = [part for part in parts if part is not None]
        if not some:
            return None
        need = (
            max(part.num_rows for part in some),
            max(len(part.token_ids) for part in some),
            max(part.bucket.num_blocks for part in some),
        )
        bucket = self.buckets.smallest(kind, *need)
        assert bucket is not None, f"no {kind.value} bucket for {need}"
        plan = join_plans(parts, bucket, self._num_steps)
        self._num_steps += 1
        self._in_flight.append(plan)
        self._last_kind = kind
        return plan
