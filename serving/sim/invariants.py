"""What must hold in a fleet after every event, checked from outside.

1. A request that has arrived and not ended is in one place: it waits at the router, is in the queue
   of one prefill worker, is on its way to a decode worker, or runs or is stranded at one.
2. No token is lost or made twice: context and tokens to come always add up to the same.
3. What balancers have counted is what is there: every reservation belongs to a request, and no
   worker has more than it can hold.
4. Nobody gives a request to a worker that is known to be gone.
5. When the run is over nothing is left: no reservation, no load, no place taken.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from serving.core.balance_decode import DecodeLoads
from serving.core.balance_prefill import PrefillBalancer
from serving.sim.fleet import Fleet
from serving.sim.prefill_unit import Job


class InvariantError(AssertionError):
    """Something is true of a fleet that must never be; says what, and when."""


class FleetWatch:
    """Checks a fleet: give `check` to `Fleet.run`, and call `check_drained` afterwards."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        trace, rows = fleet.workload.trace, fleet.workload.rows.tolist()
        self._totals = [trace.rows[row].num_prompt + trace.rows[row].num_output for row in rows]
        self.num_checks = 0

    def check(self) -> None:
        """Looks at everything that is alive.

        Raises:
            InvariantError: one of the rules is broken.
        """
        self.num_checks += 1
        places = list(self._places())
        self._check_places(places)
        for _, job in places:
            total = job.num_context + job.num_left_output
            self._expect(
                total == self._totals[job.index],
                "request {} has {} tokens in all; expected {}",
                job.index,
                total,
                self._totals[job.index],
            )
        self._check_decode([job for place, job in places if place != "waiting"])
        self._check_prefill()

    def check_drained(self) -> None:
        """After the run.

        Raises:
            InvariantError: something is left.
        """
        fleet = self._fleet
        self._expect(not list(self._places()), "requests are left after the run")
        self._expect(bool((fleet.finish_ns >= fleet.first_ns).all()), "an end before a beginning")
        loads = fleet.decode_policy
        assert isinstance(loads, DecodeLoads)
        self._expect(not loads.num_requests.any(), "requests are counted: {}", loads.num_requests)
        self._expect(not loads.num_tokens.any(), "context is reserved: {}", loads.num_tokens)
        if isinstance(fleet.prefill_policy, PrefillBalancer):
            left = fleet.prefill_policy.load_ms
            self._expect(float(np.abs(left).max()) < 1e-6, "load is left: {}", left)

    def _places(self) -> Iterator[tuple[str, Job]]:
        fleet = self._fleet
        for job in fleet.waiting:
            yield "waiting", job
        for unit in fleet.prefill_units:
            for queue in unit.queues:
                for job in queue:
                    yield "prefill", job
        for unit in fleet.decode_units:
            for job in unit.jobs():
                yield "decode", job

    def _check_places(self, places: list[tuple[str, Job]]) -> None:
        fleet = self._fleet
        found = Counter(job.index for _, job in places)
        twice = [index for index, count in found.items() if count > 1]
        self._expect(not twice, "requests {} are in two places", twice)
        is_open = fleet.finish_ns[: fleet.num_arrived] < 0
        alive = set(np.flatnonzero(is_open).tolist())
        self._expect(alive == set(found), "requests {} are lost or undead", alive ^ set(found))

    def _check_decode(self, jobs: list[Job]) -> None:
        policy = self._fleet.decode_policy
        assert isinstance(policy, DecodeLoads)
        counts, tokens = np.zeros_like(policy.num_requests), np.zeros_like(policy.num_tokens)
        for job in jobs:
            assert job.decode is not None
            if policy.is_current(job.decode):
                counts[job.decode.worker] += 1
                tokens[job.decode.worker] += job.decode.num_tokens
        self._expect(
            bool((counts == policy.num_requests).all()),
            "decode workers have {} requests; counted are {}",
            counts,
            policy.num_requests,
        )
        self._expect(
            bool((tokens == policy.num_tokens).all()),
            "decode workers have {} tokens; counted are {}",
            tokens,
            policy.num_tokens,
        )
        options = self._fleet.options.decode
        self._expect(int(counts.max()) <= options.requests_max, "too many requests: {}", counts)
        self._expect(int(tokens.max()) <= options.context_max, "too much context: {}", tokens)

    def _check_prefill(self) -> None:
        fleet = self._fleet
        work_ms = np.zeros(fleet.options.counts.prefill)
        for unit in fleet.prefill_units:
            for at, queue in enumerate(unit.queues):
                for job in queue:
                    assert job.prefill is not None
                    self._expect(
                        job.prefill.worker == unit.first + at,
                        "request {} stands at another worker than it was given to",
                        job.index,
                    )
                    work_ms[unit.first + at] += job.prefill.work_ms
        gone = [worker for worker in fleet.gone_prefill if work_ms[worker]]
        self._expect(not gone, "prefill workers {} are known to be gone and have work", gone)
        if isinstance(fleet.prefill_policy, PrefillBalancer):
            counted = fleet.prefill_policy.load_ms
            self._expect(
                np.allclose(work_ms, counted, rtol=1e-6, atol=1e-3),
                "prefill workers have {} ms of work; counted are {}",
                work_ms,
                counted,
            )

    def _expect(self, is_right: bool, what: str, *values: object) -> None:
        # Put into words only when it is needed: that takes longer than all the checks.
        if not is_right:
            said = what.format(*values)
            raise InvariantError(f"at {self._fleet.now_ns / 1e9:.6f} s: {said}")
