"""What goes wrong in a simulated run, drawn from its seed before it begins.

Four kinds: a prefill or a decode worker dies and comes back empty after a repair; the network
between prefill and decode is cut for a while, so that nothing starts across it; the store of
prefixes does not answer, so that nothing is found in it and nothing is written. After the last
arrival nothing new breaks, so every run ends.
"""

import enum
import random
from dataclasses import dataclass

from serving.sim.options import FailureOptions, WorkerCounts


class FaultKind(enum.Enum):
    """What breaks."""

    PREFILL = "prefill"
    DECODE = "decode"
    NETWORK = "network"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is broken from `start_ns` to `end_ns`; `worker` says which, 0 if there is one."""

    kind: FaultKind
    worker: int
    start_ns: int
    end_ns: int


def draw_faults(
    options: FailureOptions, counts: WorkerCounts, duration_s: float, source: random.Random
) -> list[Fault]:
    """The faults of a run of `duration_s`; times between two of one thing are exponential."""
    faults: list[Fault] = []
    for kind, number, mean_s, broken_s in (
        (FaultKind.PREFILL, counts.prefill, options.prefill_mean_s, options.repair_s),
        (FaultKind.DECODE, counts.decode, options.decode_mean_s, options.repair_s),
        (FaultKind.NETWORK, 1, options.network_mean_s, options.network_s),
        (FaultKind.STORE, 1, options.store_mean_s, options.store_s),
    ):
        for worker in range(number if mean_s else 0):
            start_s = source.expovariate(1 / mean_s)
            while start_s < duration_s:
                end_s = start_s + broken_s
                faults.append(Fault(kind, worker, int(start_s * 1e9), int(end_s * 1e9)))
                start_s = end_s + source.expovariate(1 / mean_s)
    return faults
