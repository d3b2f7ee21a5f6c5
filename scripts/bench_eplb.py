"""How well experts are balanced, with and without moving them: one table over eight load sets.

Per load set: every expert once, DeepSeek's published greedy placement planned on the first half of
the steps, and the balancer, which moves at most `--copies` weights of an expert in all layers
together after each step. All are scored on the second half by `moe_lb`: the sum of the largest
device loads over the sum of the mean ones.

    python scripts/bench_eplb.py [--sets NAME ...] [--steps N] [--copies N] [--json FILE]
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.eplb import load_sets
from scripts.eplb.replay import Score, Sizes, score

NUM_DEVICES = 64
NUM_REDUNDANT = 64


def main() -> None:
    """Scores, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", default=load_sets.NAMES, choices=load_sets.NAMES)
    parser.add_argument("--steps", type=int, default=200, help="half of them are scored")
    parser.add_argument("--copies", type=int, default=64, help="copies that a step may move")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    if args.steps < 2 or args.copies < 1:
        parser.error(f"--steps {args.steps} --copies {args.copies}; expected at least 2 and 1")
    sizes = Sizes(NUM_DEVICES, NUM_REDUNDANT, args.copies)
    scores: dict[str, Score] = {}
    print(
        f"{'set':<13} {'none':>7} {'DeepSeek':>8} {'moved':>6} {'ours':>6} {'copies/step':>11} "
        f"{'at most':>7} {'plan ms':>7}"
    )
    for name in args.sets:
        row = scores[name] = score(load_sets.loads(name, args.steps), args.steps, sizes)
        print(
            f"{name:<13} {row.moe_lb_none:7.3f} {row.moe_lb_deepseek:8.3f} "
            f"{row.moved_deepseek:6.0%} {row.moe_lb_ours:6.3f} {row.copies_moved_per_step:11.1f} "
            f"{row.copies_moved_per_step_max:7d} {row.plan_s * 1e3:7.1f}",
            flush=True,
        )
    if args.json:
        figures = {name: row._asdict() for name, row in scores.items()}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
