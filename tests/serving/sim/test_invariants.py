"""Goal: the checks see what must never be.
Method: a healthy run; then runs in which one thing is broken by hand, and the check that sees it.
"""

from collections import deque
from collections.abc import Callable

import pytest

from serving.sim.fleet import Fleet
from serving.sim.invariants import FleetWatch, InvariantError
from serving.sim.prefill_unit import Job
from tests.serving.sim.small_fleet import FLEET, small_workload


def run(spoil: Callable[[Fleet], None] | None = None) -> FleetWatch:
    """A run; `spoil` is tried after each event until it finds something to break."""
    fleet = Fleet(FLEET, small_workload(duration_s=3.0))
    watch = FleetWatch(fleet)

    def check() -> None:
        if spoil is not None and watch.num_checks >= 60:
            spoil(fleet)
        watch.check()

    fleet.run(check)
    return watch


def queued(fleet: Fleet) -> list[deque[Job]]:
    return [queue for unit in fleet.prefill_units for queue in unit.queues if queue]


def decoding(fleet: Fleet) -> list[Job]:
    return [job for unit in fleet.decode_units for job in unit.jobs()]


def test_a_healthy_run() -> None:
    watch = run()
    assert watch.num_checks > 100
    watch.check_drained()


def lose_a_request(fleet: Fleet) -> None:
    for queue in queued(fleet)[:1]:
        queue.pop()


def serve_a_request_twice(fleet: Fleet) -> None:
    fleet.waiting.extend(queue[-1] for queue in queued(fleet)[:1])


def lose_a_token(fleet: Fleet) -> None:
    for job in decoding(fleet)[:1]:
        job.num_left_output -= 1


def forget_a_reservation(fleet: Fleet) -> None:
    for job in decoding(fleet)[:1]:
        assert job.decode is not None
        fleet.decode_policy.finished(job.decode)


def reserve_for_nobody(fleet: Fleet) -> None:
    fleet.decode_policy.choose(100)


def forget_some_work(fleet: Fleet) -> None:
    for queue in queued(fleet)[:1]:
        assert queue[0].prefill is not None
        fleet.prefill_policy.finished(queue[0].prefill)


def ban_a_worker_with_work(fleet: Fleet) -> None:
    for queue in queued(fleet)[:1]:
        assert queue[0].prefill is not None
        fleet.gone_prefill.add(queue[0].prefill.worker)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lose_a_request, "s: requests {.*} are lost or undead"),
        (serve_a_request_twice, "are in two places"),
        (lose_a_token, "tokens in all; expected"),
        (forget_a_reservation, "requests; counted are"),
        (reserve_for_nobody, "requests; counted are"),
        (forget_some_work, "ms of work; counted are"),
        (ban_a_worker_with_work, "are known to be gone and have work"),
    ],
)
def test_what_must_never_be_is_seen(spoil: Callable[[Fleet], None], expected: str) -> None:
    with pytest.raises(InvariantError, match=expected):
        run(spoil)


def test_what_is_left_after_a_run_is_seen() -> None:
    fleet = Fleet(FLEET, small_workload(duration_s=3.0))
    watch = FleetWatch(fleet)
    fleet.run()
    watch.check_drained()
    reserve_for_nobody(fleet)
    with pytest.raises(InvariantError, match="requests are counted"):
        watch.check_drained()
    fleet.finish_ns[0] = -1
    with pytest.raises(InvariantError, match="an end before a beginning"):
        watch.check_drained()
