"""A whole fleet in virtual time: router, pools, store and links, with the balancers of production.

What a request goes through:

1. The router finds how much of its prompt the store has, reserves room at a decode worker, and
   gives it to a prefill worker; without room it waits, in order of arrival. Images are encoded by
   a vision worker meanwhile.
2. The prefill worker fetches the stored prefix that is not in its host memory, and computes the
   rest, in the order of its queue (`prefill_unit`). The first token is out then.
3. The decode worker pulls the context and generates (`decode_unit`).

If a worker dies, that is noticed after a while, and its requests start again elsewhere, those of a
decode worker with the tokens that they have. What else breaks is in `failures`.

*Why this is no simulation of the nodes*: a fleet serves a million requests in an hour. Decisions
are made by the code that makes them in production: balancers, prefix depths, the cost model that
cuts chunks; what those decide on is reduced to arithmetic.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from serving.core.balance_prefill import NoWorkerError, Prompt
from serving.core.balance_vision import VisionBalancer, VisionDispatch
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders
from serving.sim.decode_unit import DecodeUnit
from serving.sim.failures import Fault, FaultKind, draw_faults
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

    Attributes:
        options, workload: as given.
        now_ns: virtual time.
        num_arrived: requests that have come; they are numbered in that order.
        first_ns, finish_ns: [M] int64, as in `FleetRecord`; -1 before.
        waiting: requests that no worker has room for, the next one first.
        prefill_policy, decode_policy, prefill_units, decode_units: what the fleet is made of.
        gone_prefill: prefill workers that are known to be gone.
        faults: what breaks in this run.

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
        self.options, self.workload = options, workload
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
        self.prefill_policy, self.decode_policy = make_policies(
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
        self.prefill_units = [
            PrefillUnit(first, min(p.unit, counts.prefill - first), cost, p.step_ms)
            for first in range(0, counts.prefill, p.unit)
        ]
        self.decode_units = [
            DecodeUnit(first, min(d.unit, counts.decode - first), d)
            for first in range(0, counts.decode, d.unit)
        ]
        self._make_links()
        self.waiting: deque[Job] = deque()
        self.gone_prefill: set[int] = set()
        self.num_arrived = 0
        self.now_ns = 0
        self._cut_until_ns = self._store_until_ns = 0
        self._num_events = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._window_ns = workload.duration_s * 1e9 / NUM_WINDOWS
        self._make_record()
        self.faults = draw_faults(options.failures, counts, workload.duration_s, source)
        for fault in self.faults:
            self._at(fault.start_ns, partial(self._break, fault))

    def run(self, watch: Callable[[], None] | None = None) -> FleetRecord:
        """Runs until every request has ended; `watch` is called after every event."""
        arrivals = self.workload.arrivals_ns.tolist()
        rows, groups = self.workload.rows.tolist(), self.workload.groups.tolist()
        trace_rows, rates = self.workload.trace.rows, self._rates.tolist()
        events, num_requests = self._events, len(arrivals)
        while events or self.num_arrived < num_requests:
            index = self.num_arrived
            if index < num_requests and (not events or arrivals[index] <= events[0][0]):
                self.now_ns = arrivals[index]
                row = trace_rows[rows[index]]
                job = Job(
                    index, row.num_prompt, row.num_output, row.blocks, groups[index], rates[index]
                )
                self.num_arrived += 1
                self._encode(job, row.num_images)
            else:
                self.now_ns, _, action = heapq.heappop(events)
                action()
            if watch is not None:
                watch()
        assert not self.waiting, f"{len(self.waiting)} requests were never served"
        assert (self.finish_ns >= 0).all(), "a request was accepted and did not end"
        return FleetRecord(
            self.first_ns,
            self.finish_ns,
            self._prefill_workers,
            self._decode_workers,
            self._depths,
            self._attempts,
            self._busy_ms,
            np.array([unit.most_ms / max(unit.mean_ms, 1e-9) for unit in self.decode_units]),
            self._running / np.maximum(self._num_steps, 1),
        )

    def _make_links(self) -> None:
        links, counts = self.options.links, self._counts

        def machines(num_gpus: int) -> list[Link]:
            return [Link(links.machine_gb_s) for _ in range(-(-num_gpus // links.gpus_per_machine))]

        self._prefill_links = machines(counts.prefill)
        self._decode_links = machines(counts.decode)
        self._store_link = Link(self.options.store.read_gb_s)
        self._between = Link(links.between_gb_s) if links.between_gb_s else None

    def _make_record(self) -> None:
        num_requests = len(self.workload)
        self.first_ns = np.full(num_requests, -1, np.int64)
        self.finish_ns = np.full(num_requests, -1, np.int64)
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
        time = max(int(time_ns), self.now_ns)
        heapq.heappush(self._events, (time, self._num_events, action))

    def _window(self) -> int:
        return min(int(self.now_ns / self._window_ns), NUM_WINDOWS)

    # Arrival.

    def _encode(self, job: Job, num_images: int) -> None:
        if not num_images or self._vision is None:
            self._route(job)
            return
        vision = self.options.vision
        dispatch = self._vision.choose(num_images * vision.image_tokens)
        work_ns = dispatch.num_tokens * vision.token_ms * _NS_PER_MS
        free_ns = max(self._vision_free_ns[dispatch.worker], self.now_ns) + work_ns
        self._vision_free_ns[dispatch.worker] = free_ns
        job.ready_ns = int(free_ns)
        self._at(free_ns, lambda: self._encoded(dispatch))
        self._route(job)

    def _encoded(self, dispatch: VisionDispatch) -> None:
        assert self._vision is not None
        self._vision.finished(dispatch)

    def _route(self, job: Job) -> None:
        if self.waiting or not self._start(job):
            self.waiting.append(job)

    def _admit_waiting(self) -> None:
        while self.waiting and self._start(self.waiting[0]):
            self.waiting.popleft()

    def _start(self, job: Job) -> bool:
        """Gives a request to its two workers, unless one of them cannot be had."""
        store, blocks = self._store, job.blocks
        is_store_up = self.now_ns >= self._store_until_ns
        depth = store.depth(job.group, blocks) if blocks and is_store_up else 0
        num_cached = min(depth * self._block_tokens, job.num_context - 1)
        try:
            job.decode = self.decode_policy.choose(
                job.num_context, self.options.decode.expected_output
            )
        except NoWorkerError:
            return False
        keys = self._keys(job) if self._host is not None else ()
        try:
            job.prefill = self.prefill_policy.choose(Prompt(job.num_context, num_cached, keys))
        except NoWorkerError:
            self.decode_policy.finished(job.decode)
            return False
        if blocks and self.options.store.visible == "dispatched":
            store.write(job.group, blocks)
        if not job.attempt:
            self._depths[job.index] = depth
        self._attempts[job.index] += 1
        job.num_done, job.num_left = num_cached, job.num_context - num_cached
        job.ready_ns = max(job.ready_ns, self._fetched_ns(job, num_cached, keys))
        worker = job.prefill.worker
        unit = self.prefill_units[worker // self.options.prefill.unit]
        unit.add(worker, job)
        if not unit.is_busy:
            self._at(job.ready_ns, lambda: self._start_prefill(unit))
        return True

    def _keys(self, job: Job) -> list[int]:
        first = job.group * self.workload.trace.num_blocks
        return [first + block for block in job.blocks]

    def _fetched_ns(self, job: Job, num_cached: int, keys: "list[int] | tuple[()]") -> int:
        """When the cached prefix is in the host memory of the prefill worker."""
        if not num_cached:
            return self.now_ns
        assert job.prefill is not None
        worker, links = job.prefill.worker, self.options.links
        num_here = 0
        if self._host is not None:
            num_here = self._host.depth(worker, keys) * self._block_tokens
        if num_here >= num_cached:
            return self.now_ns
        num_bytes = (num_cached - num_here) * links.kv_bytes_per_token + links.state_bytes
        start = self.now_ns + self.options.store.fetch_ms * _NS_PER_MS
        read_ns = self._store_link.carry(start, num_bytes)
        machine = self._prefill_links[worker // links.gpus_per_machine]
        return int(max(read_ns, machine.carry(start, num_bytes)))

    # Prefill.

    def _start_prefill(self, unit: PrefillUnit) -> None:
        if unit.is_busy:
            return
        step_ms = unit.start_step(self.now_ns)
        if step_ms:
            self._at(self.now_ns + step_ms * _NS_PER_MS, lambda: self._end_prefill(unit))
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
        self.prefill_policy.finished(job.prefill)
        if job.blocks:
            if self.options.store.visible == "computed" and self.now_ns >= self._store_until_ns:
                self._store.write(job.group, job.blocks)
            if self._host is not None:
                self._host.add(job.prefill.worker, self._keys(job))
        if self.first_ns[job.index] < 0:
            self.first_ns[job.index] = self.now_ns
        self._prefill_workers[job.index] = job.prefill.worker
        job.num_left_output -= 1
        if job.num_left_output <= 0:
            self._finish_job(job)
            return
        job.num_context += 1
        if not self.decode_policy.is_current(job.decode) and not self._reserve_again(job):
            return
        job.num_steps = int(-(-job.num_left_output // job.rate))
        job.ready_ns = self._handed_over_ns(job)
        self._decode_workers[job.index] = job.decode.worker
        unit = self.decode_units[job.decode.worker // self.options.decode.unit]
        unit.add(job)
        if not unit.is_busy:
            self._at(job.ready_ns, lambda: self._start_decode(unit))

    def _reserve_again(self, job: Job) -> bool:
        """The decode worker has died meanwhile: another one, or a new start if none has room."""
        try:
            job.decode = self.decode_policy.choose(
                job.num_context, self.options.decode.expected_output
            )
        except NoWorkerError:
            self._restart([job])
            return False
        return True

    def _handed_over_ns(self, job: Job) -> int:
        """When the context is at the decode worker: through both machines' links and between."""
        assert job.prefill is not None and job.decode is not None
        links = self.options.links
        num_bytes = job.num_context * links.kv_bytes_per_token + links.state_bytes
        start = max(self.now_ns, self._cut_until_ns) + links.between_ms * _NS_PER_MS
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
        step_ms = unit.start_step(self.now_ns)
        if step_ms:
            self._at(self.now_ns + step_ms * _NS_PER_MS, lambda: self._end_decode(unit))
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
        assert self.finish_ns[job.index] < 0, f"request {job.index} ended twice"
        self.finish_ns[job.index] = self.now_ns
        self.decode_policy.finished(job.decode)
        self._admit_waiting()

    # Failures.

    def _break(self, fault: Fault) -> None:
        detected_ns = self.now_ns + self.options.failures.detect_ms * _NS_PER_MS
        worker = fault.worker
        match fault.kind:
            case FaultKind.PREFILL:
                unit = self.prefill_units[worker // self.options.prefill.unit]
                unit.is_dead[worker - unit.first] = True
                self._at(detected_ns, lambda: self._prefill_lost(unit, worker))
                self._at(fault.end_ns, lambda: self._prefill_back(unit, worker))
            case FaultKind.DECODE:
                group = self.decode_units[worker // self.options.decode.unit]
                group.die(worker)
                self._at(detected_ns, lambda: self._decode_lost(group, worker))
                self._at(fault.end_ns, lambda: self._decode_back(group, worker))
            case FaultKind.NETWORK:
                self._cut_until_ns = fault.end_ns
            case FaultKind.STORE:
                self._store_until_ns = fault.end_ns

    def _prefill_lost(self, unit: PrefillUnit, worker: int) -> None:
        self.prefill_policy.set_available(worker, False)
        self.gone_prefill.add(worker)
        if self._host is not None:
            self._host.lose(worker)
        self._restart(unit.lose(worker))

    def _prefill_back(self, unit: PrefillUnit, worker: int) -> None:
        unit.is_dead[worker - unit.first] = False
        self.prefill_policy.set_available(worker, True)
        self.gone_prefill.discard(worker)
        self._admit_waiting()

    def _decode_lost(self, unit: DecodeUnit, worker: int) -> None:
        self.decode_policy.set_available(worker, False)
        self._restart(unit.lose(worker))

    def _decode_back(self, unit: DecodeUnit, worker: int) -> None:
        unit.is_dead[worker - unit.first] = False
        self.decode_policy.set_available(worker, True)
        self._admit_waiting()

    def _restart(self, jobs: list[Job]) -> None:
        """Requests of a dead worker go first, as they have waited longest."""
        for job in jobs:
            assert job.decode is not None
            job.attempt += 1
            job.ready_ns = self.now_ns
            # Room at a worker that is gone is gone with it.
            self.decode_policy.finished(job.decode)
        self.waiting.extendleft(reversed(jobs))
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
