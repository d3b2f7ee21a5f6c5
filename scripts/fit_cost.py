"""Fits what prefill and decode steps cost to measured ones, and writes the file that the serving
configuration (`engine.cost_file`) and the simulator (`simulate --costs`) read.

Steps come from files that a server has written (`engine.step_records`), or are measured now, full
ones of every compiled shape at both ends of the context.

    python scripts/fit_cost.py --records steps.jsonl [--records MORE.jsonl] --out cost.toml
    python scripts/fit_cost.py --measure [--config FILE] [--set KEY=VALUE] --out cost.toml
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving.core.blocks import BLOCK_SIZE
from serving.core.buckets import StepKind
from serving.core.cost import DecodeSample, PrefillSample, fit_decode_cost, fit_prefill_cost
from serving.cost_file import write_cost_file
from serving.engine.step_records import RecordsError, read_records
from sharding.config_file import ConfigError

Samples = tuple[list[PrefillSample], list[DecodeSample]]


def main(arguments: list[str] | None = None) -> int:
    """Fits, prints the terms and how far they are off, and writes the file; the exit code."""
    args = _arguments(arguments)
    try:
        samples = _measured(args) if args.measure else _recorded(args.records)
        figures = fit(samples, args.out, _source(args, samples))
    except (ConfigError, RecordsError, OSError) as error:
        print(f"fit_cost: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def fit(samples: Samples, out: Path, source: str) -> dict[str, Any]:
    """The terms, and the median error of what they predict; the terms are written to `out` too.

    Raises:
        RecordsError: there are no steps of a kind.
    """
    prefill_samples, decode_samples = samples
    if not prefill_samples or not decode_samples:
        raise RecordsError(
            f"{len(prefill_samples)} prefill and {len(decode_samples)} decode steps; expected "
            "some of both"
        )
    prefill, decode = fit_prefill_cost(prefill_samples), fit_decode_cost(decode_samples)
    write_cost_file(out, prefill, decode, source)
    prefill_off = [
        prefill.total_ms(s.num_tokens, s.num_pairs) / s.time_ms - 1 for s in prefill_samples
    ]
    decode_off = [decode.step_ms(s.num_rows, s.num_context) / s.time_ms - 1 for s in decode_samples]
    return {
        "prefill": asdict(prefill) | _off(prefill_off),
        "decode": asdict(decode) | _off(decode_off),
    }


def _off(errors: list[float]) -> dict[str, float | int]:
    return {"steps": len(errors), "median_error": statistics.median(map(abs, errors))}


def _recorded(paths: list[Path]) -> Samples:
    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    for path in paths:
        more_prefill, more_decode = read_records(path)
        prefill += more_prefill
        decode += more_decode
    return prefill, decode


def _measured(args: argparse.Namespace) -> Samples:
    # Only this loads a model.
    from serving.cluster import plan_capacity
    from serving.config import load_config
    from serving.engine import step_times
    from serving.loading import load_model
    from sharding.config_file import override_from_text

    config = override_from_text(load_config(args.config), args.set)
    executor = load_model(config, lambda line: print(line, file=sys.stderr)).executor
    table = plan_capacity(config.engine).buckets
    buckets = {kind: table.of(kind) for kind in StepKind}
    now_ns = time.perf_counter_ns
    return (
        step_times.prefill_samples(executor, buckets[StepKind.PREFILL], BLOCK_SIZE, now_ns),
        step_times.decode_samples(executor, buckets[StepKind.DECODE], BLOCK_SIZE, now_ns),
    )


def _source(args: argparse.Namespace, samples: Samples) -> str:
    where = "measured" if args.measure else ", ".join(path.name for path in args.records)
    return f"Fitted to {len(samples[0])} prefill and {len(samples[1])} decode steps: {where}"


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--records", type=Path, action="append", help="may be repeated")
    given.add_argument("--measure", action="store_true", help="measure the configured model")
    parser.add_argument("--config", help="serving configuration, for --measure")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="cost file to write")
    parser.add_argument("--json", type=Path, help="also write terms and errors there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
