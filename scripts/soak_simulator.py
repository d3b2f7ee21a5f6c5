"""Runs fleets with faults, each drawn from a seed, and checks every invariant after every event.

A fleet has a few workers of each role and requests that share prefixes; workers die, the network
between prefill and decode is cut and slow, the store does not answer or is small. The first seed
that breaks an invariant is named and ends the run with exit code 1; run it again by its number.

    python scripts/soak_simulator.py [--first SEED] [--seeds N]
"""

import argparse
import random
import sys
import traceback
from dataclasses import dataclass

import numpy as np

from serving.sim.fleet import Fleet
from serving.sim.invariants import FleetWatch
from serving.sim.options import (
    DecodeOptions,
    FailureOptions,
    FleetOptions,
    LinkOptions,
    PrefillOptions,
    StoreOptions,
)
from serving.sim.policies import POLICIES
from serving.sim.report import digest
from serving.sim.traces import Trace, TraceRow
from serving.sim.workload import make_workload

NUM_REQUESTS = 30
BLOCK_TOKENS = 512
SHARED_BLOCKS_MAX = 40
"""Keeps every request small enough for the smallest decode worker."""


@dataclass(frozen=True)
class Outcome:
    """What a seed did: the digest of its run, and how much went wrong in it."""

    digest: str
    num_faults: int
    num_restarts: int


def main() -> int:
    """Runs the seeds; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds")
    args = parser.parse_args()
    num_faults = 0
    for seed in range(args.first, args.first + args.seeds):
        try:
            num_faults += run_seed(seed).num_faults
        except AssertionError:
            traceback.print_exc()
            print(f"seed {seed} failed; run it again with --first {seed} --seeds 1")
            return 1
    print(f"{args.seeds} seeds, {num_faults} faults: every invariant held")
    return 0


def run_seed(seed: int) -> Outcome:
    """One run of the fleet that a seed stands for.

    Raises:
        AssertionError: an invariant is broken.
    """
    source = random.Random(seed)
    options = make_options(source)
    workload = make_workload(make_trace(source), np.random.default_rng(seed))
    fleet = Fleet(options, workload, source.choice(POLICIES), seed)
    watch = FleetWatch(fleet)
    record = fleet.run(watch.check)
    watch.check_drained()
    return Outcome(digest(record), len(fleet.faults), int((record.attempts - 1).sum()))


def make_options(source: random.Random) -> FleetOptions:
    """A small fleet in which much goes wrong."""

    def sometimes(value: float) -> float:
        return value * source.uniform(0.5, 2) if source.random() < 0.7 else 0.0

    detect_ms = source.choice((1.0, 100.0, 900.0))
    return FleetOptions(
        PrefillOptions(
            5.0, 0.05, 1e-7, unit=source.randint(1, 4), step_ms=source.choice((20.0, 200.0))
        ),
        DecodeOptions(
            20.0,
            1.0,
            1e-5,
            tokens_per_step=source.choice((1.0, 3.5)),
            tokens_spread=0.7,
            unit=source.randint(1, 4),
            requests_max=source.randint(1, 8),
            context_max=source.choice((60_000, 10**7)),
        ),
        f"{source.randint(1, 5)}p{source.randint(1, 5)}d",
        links=LinkOptions(between_gb_s=sometimes(0.05), between_ms=sometimes(50.0)),
        store=StoreOptions(
            fetch_ms=sometimes(20.0),
            tokens_max=int(sometimes(100_000)),
            host_tokens=int(sometimes(50_000)),
        ),
        failures=FailureOptions(
            prefill_mean_s=sometimes(4.0),
            decode_mean_s=sometimes(4.0),
            repair_s=1.0 + source.random(),
            detect_ms=detect_ms,
            network_mean_s=sometimes(4.0),
            network_s=source.uniform(0.1, 2.0),
            store_mean_s=sometimes(4.0),
            store_s=source.uniform(0.1, 2.0),
        ),
    )


def make_trace(source: random.Random) -> Trace:
    """Requests over some ten seconds, half of which go on from the prompt of another."""
    rows: list[TraceRow] = []
    time_s, num_blocks = 0.0, 0
    for _ in range(NUM_REQUESTS):
        shared: tuple[int, ...] = ()
        if rows and source.random() < 0.5:
            shared = source.choice(rows).blocks
            shared = shared[: source.randint(0, min(len(shared), SHARED_BLOCKS_MAX))]
        num_tokens = len(shared) * BLOCK_TOKENS + int(2 ** source.uniform(1, 14))
        count = -(-num_tokens // BLOCK_TOKENS) - len(shared)
        blocks = shared + tuple(range(num_blocks, num_blocks + count))
        num_blocks += count
        rows.append(TraceRow(time_s, num_tokens, source.randint(1, 200), blocks))
        time_s += source.expovariate(3.0)
    return Trace(tuple(rows), BLOCK_TOKENS, num_blocks)


if __name__ == "__main__":
    sys.exit(main())
