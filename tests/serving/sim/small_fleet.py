"""A trace of a few hundred requests made for tests, and a fleet that it keeps busy.

The trace has what real ones have: prefixes shared in trees, lengths over several classes, times in
steps of three seconds.
"""

import json
import random

import numpy as np

from serving.sim.options import DecodeOptions, FleetOptions, PrefillOptions
from serving.sim.traces import Trace, read_trace
from serving.sim.workload import Workload, make_workload

FLEET = FleetOptions(
    PrefillOptions(5.0, 0.0195, 1.4e-8, unit=4),
    DecodeOptions(6.0, 0.243, 1.4e-7, 3.5, 0.7, unit=4),
    workers="8p8d",
)


def mooncake_lines(num_rows: int = 300, seed: int = 4) -> list[str]:
    """Rows in the Mooncake format."""
    source = random.Random(seed)
    chains: list[list[int]] = []
    next_block = 0
    lines: list[str] = []
    for number in range(num_rows):
        shared: list[int] = []
        if chains and source.random() < 0.5:
            chain = source.choice(chains)
            shared = chain[: source.randrange(1, len(chain) + 1)]
        num_tokens = (len(shared) + 1) * 512 + int(2 ** source.uniform(6, 15.5))
        num_blocks = -(-num_tokens // 512)
        blocks = shared + list(range(next_block, next_block + num_blocks - len(shared)))
        next_block += num_blocks - len(shared)
        chains.append(blocks)
        lines.append(
            json.dumps(
                {
                    "timestamp": number // 8 * 3000,
                    "input_length": num_tokens,
                    "output_length": source.randrange(1, 400),
                    "hash_ids": blocks,
                }
            )
        )
    return lines


def small_trace(num_rows: int = 300) -> Trace:
    """The same, read."""
    return read_trace(mooncake_lines(num_rows), "small")


def small_workload(rate_rps: float = 40.0, duration_s: float = 20.0, seed: int = 1) -> Workload:
    """About as much as `FLEET` can serve."""
    return make_workload(small_trace(), np.random.default_rng(seed), rate_rps, duration_s)
