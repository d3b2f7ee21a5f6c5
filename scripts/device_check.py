"""Checks every kernel on the GPU of this machine, and times it against what the GPU can do.

For each case at the sizes of the real model: the largest difference from the reference, the median
time, and bytes and operations per second as shares of two ceilings that are measured first in the
same run, a copy of device memory and a bfloat16 matrix product. The reference computes the first
tokens of a case only, since it widens what a kernel does not. Exits 1 if a result is wrong.

    python scripts/device_check.py [--op NAME] [--repeats N] [--json FILE]
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cases, numerics, ops, roofline
from pallas_kernels.targets import Target, current_target

COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
COMPARED_TOKENS = 32


class Ceilings(NamedTuple):
    """What this device reached: bytes per second of a copy, operations of a product."""

    bytes_per_s: float
    flops_per_s: float


def main() -> None:
    """Prints the table, writes the figures and fails if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", help="only this operation")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each case")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    target = current_target()
    if target is None:
        sys.exit(
            f"device_check: {jax.devices()[0].device_kind} is not an H100, H200 or B200; there is "
            "nothing to check here (scripts/kernel_report.py compiles for one that is not there)"
        )
    ceilings = measure_ceilings(args.repeats)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy "
        f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    print(f"{'case':34} {'error':>9} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'of ceiling':>10}")
    rows = []
    for case in cases.find(args.op, "model"):
        row = check_case(case, target, ceilings, args.repeats)
        rows.append(row)
        print(_line(case, row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row["is_wrong"] for row in rows))


def measure_ceilings(repeats: int) -> Ceilings:
    """A copy counts each byte twice, read and written."""
    block = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    copy_s = seconds(jax.jit(lambda x: x + 1), (block,), repeats)
    square = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), jnp.bfloat16)
    product_s = seconds(jax.jit(jnp.matmul), (square, square), repeats)
    return Ceilings(2 * COPY_BYTES / copy_s, 2 * PRODUCT_SIZE**3 / product_s)


def check_case(
    case: cases.Case, target: Target, ceilings: Ceilings, repeats: int
) -> dict[str, Any]:
    """The figures of one case: `auto` against the reference."""
    args, sizes = jax.jit(lambda key: case.arguments(key)[0])(jax.random.key(0)), case.abstract()[1]
    call = getattr(ops, case.op)
    kernel = jax.jit(functools.partial(call, implementation="auto", **sizes))
    reference = jax.jit(functools.partial(call, implementation="reference", **sizes))
    expected = reference(*case.first_tokens(args, COMPARED_TOKENS))
    error = largest_error(kernel(*args), expected)
    took_s = seconds(kernel, args, repeats)
    cost = roofline.cost(case)
    return {
        "op": case.op,
        "target": target.name,
        "shape": case.name,
        "error": error,
        "is_wrong": not error <= numerics.TOLERANCE[case.op],
        "us": 1e6 * took_s,
        "bytes": cost.num_bytes,
        "flops": cost.num_flops,
        "bytes_per_s": cost.num_bytes / took_s,
        "flops_per_s": cost.num_flops / took_s,
        "of_ceiling": max(
            cost.num_bytes / took_s / ceilings.bytes_per_s,
            cost.num_flops / took_s / ceilings.flops_per_s,
        ),
    }


def largest_error(made: Any, meant: Any) -> float:
    """Largest difference among the tokens of `meant`, as a share of the largest value."""
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(meant), strict=True)
    return max(numerics.error(np.asarray(a[: b.shape[0]]), np.asarray(b)) for a, b in pairs)


def seconds(function: Callable[..., Any], args: Any, repeats: int) -> float:
    """Median seconds of a call, compiled and warm."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _line(case: cases.Case, row: dict[str, Any]) -> str:
    return (
        f"{case.op + ' ' + case.name:34} {row['error']:9.2e} {row['us']:9.1f} "
        f"{row['bytes_per_s'] / 1e12:6.2f} {row['flops_per_s'] / 1e12:8.1f} "
        f"{row['of_ceiling']:10.1%}{'  WRONG' if row['is_wrong'] else ''}"
    )


if __name__ == "__main__":
    main()
