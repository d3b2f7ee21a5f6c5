"""Goal: faults come as often as asked, do not overlap on one thing, and stop before the end.
Method: long runs against their means.
"""

import random

import pytest

from serving.sim.failures import FaultKind, draw_faults
from serving.sim.options import FailureOptions, WorkerCounts

COUNTS = WorkerCounts(3, 2)


def test_nothing_breaks_unless_asked() -> None:
    assert draw_faults(FailureOptions(), COUNTS, 1e6, random.Random(1)) == []


def test_faults_come_as_often_as_asked() -> None:
    options = FailureOptions(
        prefill_mean_s=90, decode_mean_s=40, repair_s=10, network_mean_s=95, store_mean_s=195
    )
    faults = draw_faults(options, COUNTS, 100_000, random.Random(1))
    numbers = {kind: sum(fault.kind is kind for fault in faults) for kind in FaultKind}
    assert numbers[FaultKind.PREFILL] == pytest.approx(3 * 1000, rel=0.1)
    assert numbers[FaultKind.DECODE] == pytest.approx(2 * 2000, rel=0.1)
    assert numbers[FaultKind.NETWORK] == pytest.approx(1000, rel=0.15)
    assert numbers[FaultKind.STORE] == pytest.approx(500, rel=0.2)
    for kind in FaultKind:
        for worker in range(3):
            mine = [f for f in faults if (f.kind, f.worker) == (kind, worker)]
            for before, after in zip(mine, mine[1:], strict=False):
                assert before.start_ns < before.end_ns < after.start_ns
    assert all(0 <= fault.start_ns < 100_000e9 for fault in faults)
