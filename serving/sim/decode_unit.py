"""A group of simulated decode workers that step together, as GPUs that share experts do.

Every running request gets its tokens in every step, so a request that joins at a step leaves after
a number of steps that is known then; between joins and leaves a step is a few array operations over
the workers, however many requests run.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from serving.sim.options import DecodeOptions
from serving.sim.prefill_unit import Job


@dataclass(slots=True, eq=False)
class DecodeUnit:
    """Workers `first` to `first + num_workers - 1` of the pool.

    Attributes:
        cost_ms: [num_workers] float64, what each worker adds to the time of a step.
        num_running: over all workers.
        most_ms, mean_ms: summed over steps and weighted with their time: of the slowest worker
            and of the mean worker.
    """

    first: int
    num_workers: int
    options: DecodeOptions
    is_busy: bool = False
    num_running: int = 0
    most_ms: float = 0.0
    mean_ms: float = 0.0
    cost_ms: np.ndarray = field(default_factory=lambda: np.zeros(0))
    is_dead: list[bool] = field(default_factory=list[bool])
    _growth_ms: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _step: int = 0
    _arriving: list[tuple[int, int, Job]] = field(default_factory=list[tuple[int, int, Job]])
    _leaving: dict[int, list[tuple[Job, int]]] = field(
        default_factory=dict[int, list[tuple[Job, int]]]
    )
    _running: list[dict[int, Job]] = field(default_factory=list[dict[int, Job]])
    _stranded: list[list[Job]] = field(default_factory=list[list[Job]])

    def __post_init__(self) -> None:
        self.cost_ms = np.zeros(self.num_workers)
        self._growth_ms = np.zeros(self.num_workers)
        self.is_dead = [False] * self.num_workers
        self._running = [{} for _ in range(self.num_workers)]
        self._stranded = [[] for _ in range(self.num_workers)]

    def add(self, job: Job) -> None:
        """A job whose context arrives at `ready_ns`."""
        heapq.heappush(self._arriving, (job.ready_ns, job.index, job))

    def start_step(self, now_ns: int) -> float:
        """Takes in what has arrived; the time of the next step in ms, 0 if nothing runs."""
        while self._arriving and self._arriving[0][0] <= now_ns:
            self._join(heapq.heappop(self._arriving)[2])
        self.is_busy = self.num_running > 0
        if not self.is_busy:
            return 0.0
        most = float(self.cost_ms.max())
        step_ms = self.options.base_ms + most
        self.most_ms += most * step_ms
        self.mean_ms += float(self.cost_ms.mean()) * step_ms
        return step_ms

    def next_ready_ns(self) -> int | None:
        """When the next context arrives."""
        return self._arriving[0][0] if self._arriving else None

    def end_step(self) -> list[Job]:
        """The jobs that have all their tokens after this step."""
        self._step += 1
        self.cost_ms += self._growth_ms
        self.is_busy = False
        finished: list[Job] = []
        for job, attempt in self._leaving.pop(self._step, ()):
            if job.attempt == attempt:
                self._leave(job)
                finished.append(job)
        if not self.num_running:
            self.cost_ms[:] = 0.0  # Rounding does not pile up over a run.
        return finished

    def die(self, worker: int) -> None:
        """A worker stops with all it runs; nobody knows yet."""
        at = worker - self.first
        self.is_dead[at] = True
        for job in list(self._running[at].values()):
            self._leave(job)
            num_kept = int((self._step - job.joined_step) * job.rate)
            job.num_context += num_kept
            job.num_left_output -= num_kept
            job.attempt += 1
            self._stranded[at].append(job)

    def lose(self, worker: int) -> list[Job]:
        """What a dead worker had, and what arrived there since; contexts on their way included."""
        at = worker - self.first
        lost, self._stranded[at] = self._stranded[at], []
        staying: list[tuple[int, int, Job]] = []
        for entry in self._arriving:
            if _worker_of(entry[2]) == worker:
                lost.append(entry[2])
            else:
                staying.append(entry)
        heapq.heapify(staying)
        self._arriving = staying
        return lost

    def jobs(self) -> list[Job]:
        """Everything that is here or on its way."""
        found = [entry[2] for entry in self._arriving]
        for running, stranded in zip(self._running, self._stranded, strict=True):
            found += [*running.values(), *stranded]
        return found

    def _join(self, job: Job) -> None:
        at = _worker_of(job) - self.first
        if self.is_dead[at]:
            self._stranded[at].append(job)
            return
        job.joined_step = self._step
        self.cost_ms[at] += self.options.row_ms + self.options.context_ms * job.num_context
        self._growth_ms[at] += self.options.context_ms * job.rate
        self._leaving.setdefault(self._step + job.num_steps, []).append((job, job.attempt))
        self._running[at][job.index] = job
        self.num_running += 1

    def _leave(self, job: Job) -> None:
        at = _worker_of(job) - self.first
        num_tokens = job.num_context + (self._step - job.joined_step) * job.rate
        self.cost_ms[at] -= self.options.row_ms + self.options.context_ms * num_tokens
        self._growth_ms[at] -= self.options.context_ms * job.rate
        del self._running[at][job.index]
        self.num_running -= 1


def _worker_of(job: Job) -> int:
    assert job.decode is not None, f"request {job.index} is at no decode worker"
    return job.decode.worker
