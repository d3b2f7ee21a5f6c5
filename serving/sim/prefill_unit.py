"""A group of simulated prefill workers that step together, as GPUs that share experts do.

Each worker has a queue and computes in its order. A step takes chunks from the heads of the queues,
as much as fits into the time of a step by the production cost model; it lasts as long as the worker
with the most to do.
"""

from collections import deque
from dataclasses import dataclass, field

from serving.core.balance_decode import DecodeDispatch
from serving.core.balance_prefill import PrefillDispatch
from serving.core.cost import PrefillCost

CHUNK_GRAIN = 128
"""Chunks that do not end a prompt are whole blocks, as blocks are what is stored."""


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the fleet.

    Attributes:
        index: its place in the workload.
        num_context: tokens that the next prefill is for: the prompt, and after a lost decode
            worker what was generated already.
        num_left_output: tokens that are still to be generated.
        blocks: of its prompt; `group` is the group of the workload they belong to.
        rate: tokens that a decode step gives it.
        attempt: how often it was started; what belongs to an earlier one is dropped.
    """

    index: int
    num_context: int
    num_left_output: int
    blocks: tuple[int, ...]
    group: int
    rate: float
    attempt: int = 0
    num_done: int = 0
    num_left: int = 0
    ready_ns: int = 0
    prefill: PrefillDispatch | None = None
    decode: DecodeDispatch | None = None
    num_steps: int = 0
    joined_step: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a job in a step, on a worker counted within the unit."""

    worker: int
    job: Job
    num_tokens: int
    attempt: int


@dataclass(slots=True, eq=False)
class PrefillUnit:
    """Workers `first` to `first + num_workers - 1` of the pool.

    Attributes:
        used_ms: [num_workers] time that each worker had chunks for in the step that runs.
    """

    first: int
    num_workers: int
    cost: PrefillCost
    step_ms: float
    is_busy: bool = False
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    used_ms: list[float] = field(default_factory=list[float])
    queues: list[deque[Job]] = field(default_factory=list[deque[Job]])
    is_dead: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_workers)]
        self.used_ms = [0.0] * self.num_workers
        self.is_dead = [False] * self.num_workers

    def add(self, worker: int, job: Job) -> None:
        """A job for a worker, counted within the pool."""
        self.queues[worker - self.first].append(job)

    def start_step(self, now_ns: int) -> float:
        """Takes the chunks of the next step; its time in ms, 0 if there is nothing to do now."""
        self.chunks.clear()
        longest_ms = 0.0
        for worker, queue in enumerate(self.queues):
            used_ms = 0.0
            if queue and not self.is_dead[worker]:
                used_ms = self._fill(worker, queue, now_ns)
                longest_ms = max(longest_ms, used_ms)
            self.used_ms[worker] = used_ms
        self.is_busy = bool(self.chunks)
        return self.cost.base_ms + longest_ms if self.is_busy else 0.0

    def next_ready_ns(self) -> int | None:
        """When the first head of a queue can start, if none can now."""
        times = [
            queue[0].ready_ns
            for queue, is_dead in zip(self.queues, self.is_dead, strict=True)
            if queue and not is_dead
        ]
        return min(times, default=None)

    def end_step(self) -> list[Job]:
        """Counts the chunks of the step; the jobs that it finished."""
        finished: list[Job] = []
        for chunk in self.chunks:
            job = chunk.job
            if job.attempt != chunk.attempt or self.is_dead[chunk.worker]:
                continue
            job.num_done += chunk.num_tokens
            job.num_left -= chunk.num_tokens
            if not job.num_left:
                left = self.queues[chunk.worker].popleft()
                assert left is job, f"worker {chunk.worker} finished a job that was not first"
                finished.append(job)
        self.chunks.clear()
        self.is_busy = False
        return finished

    def lose(self, worker: int) -> list[Job]:
        """Everything that a dead worker had."""
        queue = self.queues[worker - self.first]
        lost = list(queue)
        queue.clear()
        return lost

    def _fill(self, worker: int, queue: deque[Job], now_ns: int) -> float:
        """Adds the chunks of one worker; the time they take."""
        cost, budget_ms = self.cost, self.step_ms - self.cost.base_ms
        used_ms = 0.0
        for job in queue:
            if job.ready_ns > now_ns:
                break
            num_tokens = job.num_left
            chunk_ms = cost.chunk_ms(num_tokens, job.num_done)
            if used_ms + chunk_ms > budget_ms:
                num_tokens = cost.num_tokens_within(budget_ms - used_ms, job.num_done, num_tokens)
                num_tokens -= num_tokens % CHUNK_GRAIN
                if not num_tokens:
                    if used_ms:
                        break
                    # A step makes progress, however long the context and short the time.
                    num_tokens = min(CHUNK_GRAIN, job.num_left)
                chunk_ms = cost.chunk_ms(num_tokens, job.num_done)
            self.chunks.append(Chunk(worker, job, num_tokens, job.attempt))
            used_ms += chunk_ms
            if num_tokens < job.num_left:
                break
        return used_ms
