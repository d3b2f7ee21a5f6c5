"""How long one routing decision takes: a prompt to one of many workers, whose copies are known.

Each of the workers holds its own blocks and those of some prefixes that many share, as a chat's
first messages are shared. A decision takes a prompt whose keys are known already, looks up who
holds how much of it, chooses a prefill and a decode worker and counts the prompt there.

    python scripts/bench_balancers.py [--workers N] [--blocks N] [--json FILE]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from serving.core.balance_decode import DecodeBalancer
from serving.core.balance_prefill import PrefillBalancer, Prompt
from serving.core.balance_vision import VisionBalancer
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders

BLOCK_TOKENS = 128
SHARED_BLOCKS = 64
"""Blocks at the beginning of each prompt that half of the workers hold."""
PROMPT_BLOCKS = 256
NUM_DECISIONS = 2000


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=64, help="workers of each kind")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of each worker")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    times = decision_times(args.workers, args.blocks)
    figures = {
        "decision_us": statistics.median(times),
        "decision_us_p99": statistics.quantiles(times, n=100)[98],
        "vision_decision_us": statistics.median(vision_times(args.workers)),
    }
    for name, value in figures.items():
        print(f"{name:>20} {value:9.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def decision_times(num_workers: int, num_blocks: int) -> list[float]:
    """Microseconds of each of many decisions for prompts of `PROMPT_BLOCKS` blocks."""
    source = random.Random(1)
    holders = PrefixHolders(num_workers)
    prompts: list[Prompt] = []
    for worker in range(num_workers):
        # Keys as long as real ones; each worker's are its own.
        holders.add(worker, (source.randbytes(16) for _ in range(num_blocks - SHARED_BLOCKS)))
    for _ in range(16):
        shared = [source.randbytes(16) for _ in range(SHARED_BLOCKS)]
        for worker in source.sample(range(num_workers), num_workers // 2):
            holders.add(worker, shared[: source.randrange(1, SHARED_BLOCKS + 1)])
        own = [source.randbytes(16) for _ in range(PROMPT_BLOCKS - SHARED_BLOCKS)]
        holders.add(source.randrange(num_workers), own)
        prompts.append(
            Prompt(PROMPT_BLOCKS * BLOCK_TOKENS, SHARED_BLOCKS * BLOCK_TOKENS, shared + own)
        )
    prefill = PrefillBalancer(num_workers, PrefillCost(5.0, 0.02, 2e-8), holders=holders, tie_ms=50)
    decode = DecodeBalancer(num_workers, 10**6, 10**12)

    def decide() -> None:
        prompt = source.choice(prompts)
        prefill.choose(prompt)
        decode.choose(prompt.num_tokens)

    return measure(decide)


def vision_times(num_workers: int) -> list[float]:
    """Microseconds of each of many decisions for images."""
    pool = VisionBalancer([1.0] * num_workers)
    return measure(lambda: pool.choose(1000))


def measure(decide: Callable[[], object]) -> list[float]:
    """Microseconds of each call, after some that do not count."""
    times: list[float] = []
    for _ in range(NUM_DECISIONS):
        started = time.perf_counter()
        decide()
        times.append((time.perf_counter() - started) * 1e6)
    return times[NUM_DECISIONS // 10 :]


if __name__ == "__main__":
    main()
