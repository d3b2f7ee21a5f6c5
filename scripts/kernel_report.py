"""Compiles every kernel at the sizes of the real model for GPUs that are not there.

One row for a case and target: registers, spilled bytes, shared memory, tensor-core instruction,
and the bound on paper: bytes, operations, and the microseconds below which that GPU cannot finish.
A target without a kernel for an operation has no row. Exits 1 if a kernel spills, lacks its
tensor-core instruction or does not compile. Needs the extra `gpu-aot`.

    JAX_PLATFORMS=cpu python scripts/kernel_report.py [--op NAME] [--target NAME] [--json FILE]
"""

import argparse
import functools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels import cases, ops, roofline
from pallas_kernels.targets import TARGETS, Target, by_name
from scripts.deviceless import KernelFacts, compile_for

WITHOUT_TENSOR_CORE = {"hyper_mix": 1, "cache_append": 1, "sample_tokens": 1}
"""Kernels of an operation that multiply no matrices."""


def main() -> None:
    """Prints the table, writes the figures and fails if a row does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", help="only this operation")
    parser.add_argument("--target", help="only this GPU: h100, h200 or b200")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    targets = TARGETS if args.target is None else (by_name(args.target),)
    rows, faults = [], []
    print(
        f"{'case':34} {'target':6} {'regs':>4} {'spills':>6} {'shared':>7} {'tensor core':17} "
        f"{'MB':>8} {'GFLOP':>8} {'bound us':>8} {'s':>5}"
    )
    # A process compiles, and reports, a kernel once for all GPUs of an architecture. So each target
    # has a process of its own.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for target in targets:
            for line, row in pool.submit(report_target, target.name, args.op).result():
                rows.append(row)
                faults += row_faults(row)
                print(line, flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(bool(faults) or not rows)


def report_target(name: str, op: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Line and figures of every case, or of those of `op`, that the named target has a kernel
    for."""
    target, found = by_name(name), []
    for case in cases.find(op, "model"):
        facts = compile_case(case, target)
        if facts is not None:
            row = report_row(case, target, facts)
            found.append((_line(case, row), row))
    return found


def compile_case(case: cases.Case, target: Target) -> KernelFacts | None:
    """Facts of the kernels of a case on a target; None where the operation has no kernel."""
    args, sizes = case.abstract()
    function = functools.partial(getattr(ops, case.op), implementation="mosaic", **sizes)
    try:
        _, facts = compile_for(target, function, args)
    except RuntimeError as error:
        if f"there is no kernel for {target.architecture}" in str(error):
            return None
        raise
    return facts


def report_row(case: cases.Case, target: Target, facts: KernelFacts) -> dict[str, Any]:
    """The figures of one case on one target."""
    cost = roofline.cost(case)
    return {
        "op": case.op,
        "target": target.name,
        "shape": case.name,
        "registers": facts.registers,
        "spills": facts.spills,
        "shared_bytes": facts.shared_bytes,
        "tensor_core": facts.tensor_core,
        "without_tensor_core": facts.num_without,
        "bytes": cost.num_bytes,
        "flops": cost.num_flops,
        "bound_us": cost.bound_us(target),
        "compile_s": facts.compile_s,
    }


def row_faults(row: dict[str, Any]) -> list[str]:
    """What a row must not show, in words."""
    place = f"{row['op']} {row['shape']} on {row['target']}"
    faults = []
    if not row["registers"]:
        faults.append(f"{place}: no kernel was compiled")
    if row["spills"]:
        faults.append(f"{place}: spills {row['spills']} bytes; expected 0")
    if row["without_tensor_core"] > WITHOUT_TENSOR_CORE.get(row["op"], 0):
        faults.append(f"{place}: a kernel without a tensor-core instruction")
    return faults


def _line(case: cases.Case, row: dict[str, Any]) -> str:
    return (
        f"{case.op + ' ' + case.name:34} {row['target']:6} {row['registers']:4} {row['spills']:6} "
        f"{row['shared_bytes']:7} {row['tensor_core'] or '-':17} {row['bytes'] / 1e6:8.1f} "
        f"{row['flops'] / 1e9:8.1f} {row['bound_us']:8.1f} {row['compile_s']:5.1f}"
    )


if __name__ == "__main__":
    main()
