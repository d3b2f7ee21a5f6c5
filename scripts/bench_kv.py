"""The KV cache system in figures: each a time, or a ratio of two things run in turn in one run.

    python scripts/bench_kv.py [--part NAME ...] [--traces DIR] [--plot FILE] [--json FILE]

Parts are the modules of `scripts/kv_bench` that have `figures`; `FIGURES` says what each is to
give. What a part has measured is printed and written when the part is over. FILE keeps what it has
of parts that are not run; a figure that was never measured is null. `swap_in` takes most of the
time: it compiles the small model, and gives each length three quarters of a minute.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

FIGURES = {
    "match": ("match_64_ms", "match_1m_ms", "index_bytes_per_token"),
    "hit_ratio": ("hit_ratio_conversation", "hit_ratio_synthetic"),
    "storage": (
        "disk_read_over_raw",
        "disk_write_over_raw",
        "ec_encode_over_lib",
        "ec_decode_over_lib",
        "degraded_over_healthy",
        "host_over_memcpy",
    ),
    "swap_in": ("ttft_hit_over_cold", "swap_in_hidden", "stored_bytes_per_token_real"),
}
"""The figures of each part. `figures` of a part takes no arguments, but for `hit_ratio`, which
takes the folder of the traces and the file of the plot."""


def main() -> None:
    """Measures, prints the figures and writes them."""
    args = arguments()
    found: dict[str, Any] = {name: None for names in FIGURES.values() for name in names}
    if args.json and args.json.exists():
        found |= json.loads(args.json.read_text(encoding="utf-8"))
    for part in FIGURES:
        if part not in (args.part or FIGURES):
            continue
        began = time.perf_counter()
        print(f"--- {part}", flush=True)
        measured = run_part(part, args.traces, args.plot)
        for name in (*FIGURES[part], *sorted(measured.keys() - FIGURES[part])):
            print(f"{name:28} {measured.get(name, 'not measured')}")
        print(f"--- {part}: {time.perf_counter() - began:.0f} s", flush=True)
        found |= measured
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=FIGURES, action="append", help="default: all")
    parser.add_argument("--traces", type=Path, help="folder of the Mooncake traces")
    parser.add_argument("--plot", type=Path, help="picture of the hit ratios, e.g. as svg")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def run_part(part: str, traces: Path | None = None, plot: Path | None = None) -> dict[str, Any]:
    """The figures of one part."""
    name = f"scripts.kv_bench.{part}"
    if importlib.util.find_spec(name) is None:
        return {}
    module = importlib.import_module(name)
    return module.figures(traces, plot) if part == "hit_ratio" else module.figures()


if __name__ == "__main__":
    main()
