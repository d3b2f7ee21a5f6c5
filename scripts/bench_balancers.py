"""Balancers against other policies on request traces, and how long one routing decision takes.

Every policy gets the same requests of a trace, at the same share of the balanced bound, on the same
simulated fleet. Figures are those of `python -m serving simulate`.

A decision takes a prompt whose keys are known already, looks up who holds how much of it, chooses a
prefill and a decode worker and counts the prompt there. Each of the workers holds blocks of its own
and those of some prefixes that many share, as a chat's first messages are shared.

    python scripts/bench_balancers.py [--trace FILE ...] [--load L] [--requests N] [--json FILE]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.core.balance_decode import DecodeBalancer
from serving.core.balance_prefill import PrefillBalancer, Prompt
from serving.core.balance_vision import VisionBalancer
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders
from serving.sim.fleet import Fleet
from serving.sim.options import FleetOptions
from serving.sim.policies import POLICIES
from serving.sim.report import make_report
from serving.sim.traces import Trace
from serving.simulate import fleet_options, load_trace, rate_of_load, scaled_workload

BLOCK_TOKENS = 128
SHARED_BLOCKS = 64
"""Blocks at the beginning of each prompt that half of the workers hold."""
PROMPT_BLOCKS = 256
NUM_DECISIONS = 2000
SEED = 1


def main() -> None:
    """Measures, prints a table and writes the figures as they come."""
    args = arguments()
    figures: dict[str, Any] = {"workers": args.workers, "load": args.load, "runs": {}}
    if not args.skip_decisions:
        num_workers = fleet_options(args.config, workers=args.workers).counts.prefill
        times = decision_times(num_workers, args.blocks)
        figures["decision_us"] = statistics.median(times)
        figures["vision_decision_us"] = statistics.median(vision_times(num_workers))
        print(f"one decision {figures['decision_us']:.1f} us (median)")
    for path in args.trace:
        options = fleet_options(args.config, tuple(args.set), args.workers)
        trace = load_trace(path)
        print(f"\n{path.name} at {args.load:g} of the balanced bound\n{HEADER}", flush=True)
        for policy in args.policy or POLICIES:
            report = run(options, trace, policy, args.load, args.requests)
            print(row(policy, report), flush=True)
            figures["runs"].setdefault(path.name, {})[policy] = report
            if args.json:
                args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--config", type=Path, help="fleet file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--workers", default="64p64d", help="GPUs of each role")
    parser.add_argument("--load", type=float, default=0.95, help="share of the balanced bound")
    parser.add_argument("--requests", type=int, default=50_000, help="about, for each run")
    parser.add_argument("--blocks", type=int, default=100_000, help="of each worker, for decisions")
    parser.add_argument("--skip-decisions", action="store_true", help="run the traces only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def run(
    options: FleetOptions, trace: Trace, policy: str, load: float, num_requests: int
) -> dict[str, Any]:
    """Figures of about `num_requests` requests of a trace under a policy."""
    started = time.perf_counter()
    rate_rps = rate_of_load(options, trace, load)
    # Within what the trace lasts at any rate, because copies run at its own speed but for rounding.
    duration_s = min(num_requests / rate_rps, trace.duration_s / 2)
    workload = scaled_workload(options, trace, SEED, rate_rps, duration_s=duration_s)
    report = make_report(options, workload, Fleet(options, workload, policy, SEED).run())
    del report["over_time"]
    return report | {"wall_s": time.perf_counter() - started}


COLUMNS = ("goodput/s", "/balanced", "kept", "TTFT p50", "p99", "ITL p99", "prefill", "decode")
HEADER = f"{'policy':>15} " + " ".join(f"{name:>9}" for name in COLUMNS)


def row(policy: str, report: dict[str, Any]) -> str:
    """One line of the table; times in ms, the last two are imbalances."""
    ttft, itl = report["ttft_ms"]["all"], report["itl_ms"]["all"]
    values = (
        f"{report['goodput_rps']:.1f}",
        f"{report['throughput_over_balanced']:.3f}",
        f"{report['kept']:.3f}",
        f"{ttft['p50']:.0f}",
        f"{ttft['p99']:.0f}",
        f"{itl['p99']:.1f}",
        f"{report['prefill_imbalance']:.2f}",
        f"{report['decode_imbalance']:.2f}",
    )
    return f"{policy:>15} " + " ".join(f"{value:>9}" for value in values)


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
