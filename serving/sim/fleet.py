"""A whole fleet in virtual time: router, pools, store and links, with the balancers of production.

What a request goes through:

1. The router finds how much of its prompt the store has, reserves room at a decode worker, and
   gives it to a prefill worker; without room it waits, in order of arrival. Images are encoded by
   a vision worker meanwhile.
2. The prefill worker fetches the stored prefix that is not in its host memory, and computes the
   rest, in the order of its queue (`prefill_unit`). The first token is out then.
3. The decode worker pulls the context and generates (`decode_unit`).

If a worker dies, that is noticed after a while, and its requests start again elsewhere, those of a
decode worker with the tokens that they have.

*Why this is no simulation of the nodes*: a fleet serves a million requests in an hour. Decisions
are made by the code that makes them in production: balancers, prefix depths, the cost model that
cuts chunks; what those decide on is reduced to arithmetic.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.core.balance_prefill import NoWorkerError, Prompt
from serving.core.balance_vision import VisionBalancer, VisionDispatch
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders
from serving.sim.decode_unit import DecodeUnit
from serving.sim.links import Link
from serving.sim.options import FleetOptions
from serving.sim.policies import make_policies
from serving.sim.prefill_unit import Job, PrefillUnit
from serving.sim.stores import BoundedStore, EndlessStore, HostCopies
from serving.sim.workload import Workload

NUM_WINDOWS = 60
"""Parts of a run for which loads are kept, for plots and imbalance."""

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class FleetRecord:
    """What happened in a run. `M` requests in order of arrival, `W` windows of equal length.

    Attributes:
        first_ns, finish_ns: [M] int64, when the first and the last token was out.
        prefill_workers, decode_workers: [M] int32, where it was served, in the end; a request of
            one token has no decode worker and -1.
        depths: [M] int32, blocks of the prompt that the store had.
        attempts: [M] int32, starts of a request.
        prefill_busy_ms: [W + 1, prefill workers], time with something to compute; the last row
            is what came after the run's length.
        decode_imbalance: [units] float64, slowest over mean worker, weighted with time.
        decode_running: [W + 1] float64, requests at decode workers, mean over steps.
    """

    first_ns: np.ndarray
    finish_ns: np.ndarray
    prefill_workers: np.ndarray
    decode_workers: np.ndarray
    depths: np.ndarray
    attempts: np.ndarray
    prefill_busy_ms: np.ndarray
    decode_imbalance: np.ndarray
    decode_running: np.ndarray


class Fleet:
    """One run; `run` may be called once.

    Args:
        policy: one of `policies.POLICIES`.
        seed: of everything that is drawn: rates of requests, failures, policies.

    Raises:
        ValueError: options that cannot serve the workload, or an unknown policy.
    """

    def __init__(
        self, options: FleetOptions, workload: Workload, policy: str = "production", seed: int = 0
    ) -> None:
        _check(options, workload)
        self._options, self._workload = options, workload
        counts, trace = options.counts, workload.trace
        self._counts = counts
        source = random.Random(seed)
        rng = np.random.default_rng(seed)
        d = options.decode
        # Bounded by what one step can give: a token for sure, and as many as drafts allow.
        rates = rng.normal(d.tokens_per_step, d.tokens_spread, len(workload))
        self._rates = np.clip(rates, 1.0, 2 * d.tokens_per_step - 1)
        self._block_tokens = max(trace.block_tokens, 1)
        holders = PrefixHolders(counts.prefill)
        self._prefill, self._decode = make_policies(
            policy, options, holders, self._block_tokens, source
        )
        self._vision = VisionBalancer([1.0] * counts.vision) if counts.vision else None
        self._vision_free_ns = [0.0] * counts.vision
        store = options.store
        if store.tokens_max:
            blocks_max = max(store.tokens_max // self._block_tokens, 1)
            self._store = BoundedStore(trace.num_blocks, blocks_max)
        else:
            self._store = EndlessStore(workload)
        host_blocks = store.host_tokens // self._block_tokens if trace.num_blocks else 0
        self._host = HostCopies(holders, host_blocks) if host_blocks else None
        p = options.prefill
        cost = PrefillCost(p.base_ms, p.token_ms, p.pair_ms)
        self._prefill_units = [
            PrefillUnit(first, min(p.unit, counts.prefill - first), cost, p.step_ms)
            for first in range(0, counts.prefill, p.unit)
        ]
        self._decode_units = [
            DecodeUnit(first, min(d.unit, counts.decode - first), d)
            for first in range(0, counts.decode, d.unit)
        ]
        self._make_links()
        self._waiting: deque[Job] = deque()
        self._now = 0
        self._num_events = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._window_ns = workload.duration_s * 1e9 / NUM_WINDOWS
        self._make_record()
        self._draw_failures(source)

    def run(self) -> FleetRecord:
        """Runs until every request has ended."""
        arrivals = self._workload.arrivals_ns.tolist()
        rows, groups = self._workload.rows.tolist(), self._workload.groups.tolist()
        trace_rows, rates = self._workload.trace.rows, self._rates.tolist()
        events, index, num_requests = self._events, 0, len(arrivals)
        while events or index < num_requests:
            if index < num_requests and (not events or arrivals[index] <= events[0][0]):
                self._now = arrivals[index]
                row = trace_rows[rows[index]]
                job = Job(
                    index, row.num_prompt, row.num_output, row.blocks, groups[index], rates[index]
                )
                index += 1
                self._encode(job, row.num_images)
            else:
                self._now, _, action = heapq.heappop(events)
                action()
        assert not self._waiting, f"{len(self._waiting)} requests were never served"
        assert (self._finish >= 0).all(), "a request was accepted and did not end"
        return FleetRecord(
            self._first,
            self._finish,
            self._prefill_workers,
            self._decode_workers,
            self._depths,
            self._attempts,
            self._busy_ms,
            np.array([unit.most_ms / max(unit.mean_ms, 1e-9) for unit in self._decode_units]),
            self._running / np.maximum(self._num_steps, 1),
        )

    def _make_links(self) -> None:
        links, counts = self._options.links, self._counts

        def machines(num_gpus: int) -> list[Link]:
            return [Link(links.machine_gb_s) for _ in range(-(-num_gpus // links.gpus_per_machine))]

        self._prefill_links = machines(counts.prefill)
        self._decode_links = machines(counts.decode)
        self._store_link = Link(self._options.store.read_gb_s)
        self._between = Link(links.between_gb_s) if links.between_gb_s else None

    def _make_record(self) -> None:
        num_requests = len(self._workload)
        self._first = np.full(num_requests, -1, np.int64)
        self._finish = np.full(num_requests, -1, np.int64)
        self._prefill_workers = np.full(num_requests, -1, np.int32)
        self._decode_workers = np.full(num_requests, -1, np.int32)
        self._depths = np.zeros(num_requests, np.int32)
        self._attempts = np.zeros(num_requests, np.int32)
        self._busy_ms = np.zeros((NUM_WINDOWS + 1, self._counts.prefill))
        self._running = np.zeros(NUM_WINDOWS + 1)
        self._num_steps = np.zeros(NUM_WINDOWS + 1)

    def _at(self, time_ns: float, action: Callable[[], None]) -> None:
        """Calls `action` at a time, behind what is due at the same time."""
        self._num_events += 1
        time = max(int(time_ns), self._now)
        heapq.heappush(self._events, (time, self._num_events, action))

    def _window(self) -> int:
        return min(int(self._now / self._window_ns), NUM_WINDOWS)

    # Arrival.

    def _encode(self, job: Job, num_images: int) -> None:
        if not num_images or self._vision is None:
            self._route(job)
            return
        vision = self._options.vision
        dispatch = self._vision.choose(num_images * vision.image_tokens)
        work_ns = dispatch.num_tokens * vision.token_ms * _NS_PER_MS
        free_ns = max(self._vision_free_ns[dispatch.worker], self._now) + work_ns
        self._vision_free_ns[dispatch.worker] = free_ns
        job.ready_ns = int(free_ns)
        self._at(free_ns, lambda: self._encoded(dispatch))
        self._route(job)

    def _encoded(self, dispatch: VisionDispatch) -> None:
        assert self._vision is not None
        self._vision.finished(dispatch)

    def _route(self, job: Job) -> None:
        if self._waiting or not self._start(job):
            self._waiting.append(job)

    def _admit_waiting(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _start(self, job: Job) -> bool:
        """Gives a request to its two workers, unless one of them cannot be had."""
        store, blocks = self._store, job.blocks
        depth = store.depth(job.group, blocks) if blocks else 0
        num_cached = min(depth * self._block_tokens, job.num_context - 1)
        try:
            job.decode = self._decode.choose(job.num_context, self._options.decode.expected_output)
        except NoWorkerError:
            return False
        keys = self._keys(job) if self._host is not None else ()
        try:
            job.prefill = self._prefill.choose(Prompt(job.num_context, num_cached, keys))
        except NoWorkerError:
            self._decode.finished(job.decode)
            return False
        if blocks and self._options.store.visible == "dispatched":
            store.write(job.group, blocks)
        if not job.attempt:
            self._depths[job.index] = depth
        self._attempts[job.index] += 1
        job.num_done, job.num_left = num_cached, job.num_context - num_cached
        job.ready_ns = max(job.ready_ns, self._fetched_ns(job, num_cached, keys))
        worker = job.prefill.worker
        unit = self._prefill_units[worker // self._options.prefill.unit]
        unit.add(worker, job)
        if not unit.is_busy:
            self._at(job.ready_ns, lambda: self._start_prefill(unit))
        return True

    def _keys(self, job: Job) -> list[int]:
        first = job.group * self._workload.trace.num_blocks
        return [first + block for block in job.blocks]

    def _fetched_ns(self, job: Job, num_cached: int, keys: "list[int] | tuple[()]") -> int:
        """When the cached prefix is in the host memory of the prefill worker."""
        if not num_cached:
            return self._now
        assert job.prefill is not None
        worker, links = job.prefill.worker, self._options.links
        num_here = 0
        if self._host is not None:
            num_here = self._host.depth(worker, keys) * self._block_tokens
        if num_here >= num_cached:
            return self._now
        num_bytes = (num_cached - num_here) * links.kv_bytes_per_token + links.state_bytes
        start = self._now + self._options.store.fetch_ms * _NS_PER_MS
        read_ns = self._store_link.carry(start, num_bytes)
        machine = self._prefill_links[worker // links.gpus_per_machine]
        return int(max(read_ns, machine.carry(start, num_bytes)))

    # Prefill.

    def _start_prefill(self, unit: PrefillUnit) -> None:
        if unit.is_busy:
            return
        step_ms = unit.start_step(self._now)
        if step_ms:
            self._at(self._now + step_ms * _NS_PER_MS, lambda: self._end_prefill(unit))
            busy = self._busy_ms[self._window()]
            busy[unit.first : unit.first + unit.num_workers] += unit.used_ms
            return
        ready_ns = unit.next_ready_ns()
        if ready_ns is not None:
            self._at(ready_ns, lambda: self._start_prefill(unit))

    def _end_prefill(self, unit: PrefillUnit) -> None:
        for job in unit.end_step():
            self._prefilled(job)
        self._start_prefill(unit)

    def _prefilled(self, job: Job) -> None:
        assert job.prefill is not None and job.decode is not None
        self._prefill.finished(job.prefill)
        if job.blocks:
            if self._options.store.visible == "computed":
                self._store.write(job.group, job.blocks)
            if self._host is not None:
                self._host.add(job.prefill.worker, self._keys(job))
        if self._first[job.index] < 0:
            self._first[job.index] = self._now
        self._prefill_workers[job.index] = job.prefill.worker
        job.num_left_output -= 1
        if job.num_left_output <= 0:
            self._finish_job(job)
            return
        job.num_context += 1
        if not self._decode.is_current(job.decode) and not self._reserve_again(job):
            return
        job.num_steps = int(-(-job.num_left_output // job.rate))
        job.ready_ns = self._handed_over_ns(job)
        self._decode_workers[job.index] = job.decode.worker
        unit = self._decode_units[job.decode.worker // self._options.decode.unit]
        unit.add(job)
        if not unit.is_busy:
            self._at(job.ready_ns, lambda: self._start_decode(unit))

    def _reserve_again(self, job: Job) -> bool:
        """The decode worker has died meanwhile: another one, or a new start if none has room."""
        try:
            job.decode = self._decode.choose(job.num_context, self._options.decode.expected_output)
        except NoWorkerError:
            self._restart([job])
            return False
        return True

    def _handed_over_ns(self, job: Job) -> int:
        """When the context is at the decode worker: through both machines' links and between."""
        assert job.prefill is not None and job.decode is not None
        links = self._options.links
        num_bytes = job.num_context * links.kv_bytes_per_token + links.state_bytes
        start = self._now + links.between_ms * _NS_PER_MS
        ways = [
            self._prefill_links[job.prefill.worker // links.gpus_per_machine],
            self._decode_links[job.decode.worker // links.gpus_per_machine],
        ]
        if self._between is not None:
            ways.append(self._between)
        return int(max(way.carry(start, num_bytes) for way in ways))

    # Decode.

    def _start_decode(self, unit: DecodeUnit) -> None:
        if unit.is_busy:
            return
        step_ms = unit.start_step(self._now)
        if step_ms:
            self._at(self._now + step_ms * _NS_PER_MS, lambda: self._end_decode(unit))
            window = self._window()
            self._running[window] += unit.num_running
            self._num_steps[window] += 1
            return
        ready_ns = unit.next_ready_ns()
        if ready_ns is not None:
            self._at(ready_ns, lambda: self._start_decode(unit))

    def _end_decode(self, unit: DecodeUnit) -> None:
        for job in unit.end_step():
            self._finish_job(job)
        self._start_decode(unit)

    def _finish_job(self, job: Job) -> None:
        assert job.decode is not None
        assert self._finish[job.index] < 0, f"request {job.index} ended twice"
        self._finish[job.index] = self._now
        self._decode.finished(job.decode)
        self._admit_waiting()

    # Failures.

    def _draw_failures(self, source: random.Random) -> None:
        f = self._options.failures
        for mean_s, num_workers, die in (
            (f.prefill_mean_s, self._counts.prefill, self._prefill_dies),
            (f.decode_mean_s, self._counts.decode, self._decode_dies),
        ):
            for worker in range(num_workers if mean_s else 0):
                time_s = source.expovariate(1 / mean_s)
                # After the last arrival nobody dies, so that the run ends.
                while time_s < self._workload.duration_s:
                    self._at(time_s * 1e9, lambda die=die, worker=worker: die(worker))
                    time_s += f.repair_s + source.expovariate(1 / mean_s)

    def _prefill_dies(self, worker: int) -> None:
        unit = self._prefill_units[worker // self._options.prefill.unit]
        unit.is_dead[worker - unit.first] = True
        f = self._options.failures
        self._at(self._now + f.detect_ms * _NS_PER_MS, lambda: self._prefill_lost(unit, worker))
        self._at(self._now + f.repair_s * 1e9, lambda: self._prefill_back(unit, worker))

    def _prefill_lost(self, unit: PrefillUnit, worker: int) -> None:
        self._prefill.set_available(worker, False)
        if self._host is not None:
            self._host.lose(worker)
        self._restart(unit.lose(worker))

    def _prefill_back(self, unit: PrefillUnit, worker: int) -> None:
        unit.is_dead[worker - unit.first] = False
        self._prefill.set_available(worker, True)
        self._admit_waiting()

    def _decode_dies(self, worker: int) -> None:
        unit = self._decode_units[worker // self._options.decode.unit]
        unit.die(worker)
        f = self._options.failures
        self._at(self._now + f.detect_ms * _NS_PER_MS, lambda: self._decode_lost(unit, worker))
        self._at(self._now + f.repair_s * 1e9, lambda: self._decode_back(unit, worker))

    def _decode_lost(self, unit: DecodeUnit, worker: int) -> None:
        self._decode.set_available(worker, False)
        self._restart(unit.lose(worker))

    def _decode_back(self, unit: DecodeUnit, worker: int) -> None:
        unit.is_dead[worker - unit.first] = False
        self._decode.set_available(worker, True)
        self._admit_waiting()

    def _restart(self, jobs: list[Job]) -> None:
        """Requests of a dead worker go first, as they have waited longest."""
        for job in jobs:
            assert job.decode is not None
            job.attempt += 1
            job.ready_ns = self._now
            # Room at a worker that is gone is gone with it.
            self._decode.finished(job.decode)
        self._waiting.extendleft(reversed(jobs))
        self._admit_waiting()


def _check(options: FleetOptions, workload: Workload) -> None:
    rows = workload.trace.rows
    longest = max(row.num_prompt + row.num_output for row in rows)
    needed = longest + options.decode.expected_output
    if needed > options.decode.context_max:
        raise ValueError(
            f"decode.context_max: received {options.decode.context_max}; expected at least "
            f"{needed}: the longest request of the trace and decode.expected_output"
        )
    if any(row.num_images for row in rows) and not options.counts.vision:
        raise ValueError(
            f"workers: received {options.workers!r}; expected vision workers too, such as "
            f"{options.workers}1v, because requests of the trace have images"
        )
    if options.failures.repair_s * 1e3 <= options.failures.detect_ms:
        raise ValueError(
            f"failures.repair_s: received {options.failures.repair_s}; expected more than "
            f"detect_ms, {options.failures.detect_ms}"
        )
