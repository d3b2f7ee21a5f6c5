"""Compiles every kernel at the sizes of the real model for GPUs that are not there.

One row for a case and target: registers, spilled bytes, shared memory, tensor-core instruction,
and the bound on paper: bytes, operations, and the microseconds below which that GPU cannot finish.
A target without a kernel for an operation has no row. Exits 1 if a kernel spills, lacks its
tensor-core instruction or does not compile. Needs the extra `gpu-aot`.

    JAX_PLATFORMS=cpu python scripts/kernel_report.py [--op NAME] [--target NAME] [--json FILE]

Each row holds the *fingerprint* of what it was made from: the source of the kernel and of all that
it imports from the package, the sizes of the case, and the version of JAX. With

    ... scripts/kernel_report.py --since FILE [--at-most N]

rows of an earlier report whose fingerprint still holds are taken over and only the others are
compiled, at most N of them. `--check FILE` compiles nothing, needs no extra, and exits 1 unless
every row of FILE still holds.
"""

import argparse
import ast
import functools
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from pallas_kernels import cases, ops, roofline, tiles
from pallas_kernels.targets import TARGETS, Target, by_name
from scripts.deviceless import KernelFacts, compile_for

ROOT = Path(__file__).resolve().parents[1]
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
    parser.add_argument("--since", type=Path, help="an earlier report; compile what has changed")
    parser.add_argument("--check", type=Path, help="an earlier report; only say what has changed")
    parser.add_argument("--at-most", type=int, help="compile no more rows than this")
    args = parser.parse_args()
    targets = TARGETS if args.target is None else (by_name(args.target),)
    source = args.check or args.since
    earlier = json.loads(source.read_text()) if source else []
    wanted = [(t, case) for t in targets for case in cases.find(args.op, "model") if has(case, t)]
    known = still_true(earlier, wanted)
    missing = [pair for pair in wanted if place(*pair) not in known]
    if args.check:
        for of, case in missing:
            print(f"{case.op} {case.name} on {of.name} has changed", file=sys.stderr)
        sys.exit(bool(missing))
    chosen = missing[: args.at_most]
    print(
        f"{'case':34} {'target':6} {'regs':>4} {'spills':>6} {'shared':>7} {'tensor core':17} "
        f"{'MB':>8} {'GFLOP':>8} {'bound us':>8} {'s':>5}"
    )
    rows = known | compiled(chosen)
    ordered = [rows[place(*pair)] for pair in wanted if place(*pair) in rows]
    faults = [fault for row in ordered for fault in row_faults(row)]
    print(
        f"{len(known)} rows still true, {len(chosen)} compiled, {len(wanted) - len(rows)} left out"
    )
    if args.json:
        args.json.write_text(json.dumps(ordered, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(bool(faults) or not wanted)


def has(case: cases.Case, target: Target) -> bool:
    """Whether the operation of a case has a kernel for a target."""
    return kernel_file(case.op, target).exists()


def kernel_file(op: str, target: Target) -> Path:
    """Where the kernel of an operation lies; a later architecture has files of its own."""
    suffix = "" if target.architecture == "sm90" else f"_{target.architecture}"
    return ROOT / "pallas_kernels" / "mosaic" / f"{op}{suffix}.py"


def place(target: Target, case: cases.Case) -> tuple[str, str, str]:
    """What a row is found by."""
    return target.name, case.op, case.name


def still_true(
    earlier: list[dict[str, Any]], wanted: list[tuple[Target, cases.Case]]
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows of an earlier report that would come out the same if they were compiled again."""
    made = {(row["target"], row["op"], row["shape"]): row for row in earlier}
    return {
        place(*pair): made[place(*pair)]
        for pair in wanted
        if made.get(place(*pair), {}).get("fingerprint") == fingerprint(*pair)
    }


def fingerprint(target: Target, case: cases.Case) -> str:
    """A number of everything that a row is made from."""
    sources = _sources(kernel_file(case.op, target), ROOT)
    parts = [f"{jax.__version__} {target} {sorted(case.sizes.items(), key=str)}"]
    parts += [f"{path.relative_to(ROOT)} {text}" for path, text in sorted(sources.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _sources(path: Path, root: Path) -> dict[Path, str]:
    """Text of a module and of all that it imports from `pallas_kernels`, and measured tiles."""
    found = {path: path.read_text(encoding="utf-8")}
    unread = [path]
    while unread:
        tree = ast.parse(found[unread.pop()])
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                module = root / f"{name.replace('.', '/')}.py"
                if name.startswith("pallas_kernels") and module.exists() and module not in found:
                    found[module] = module.read_text(encoding="utf-8")
                    unread.append(module)
    table = root / "pallas_kernels" / "tuned.toml"
    return found | {table: table.read_text(encoding="utf-8")}


def compiled(
    pairs: list[tuple[Target, cases.Case]],
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows of cases on targets, each printed when it is there.

    GPUs of one architecture without measured tiles of their own run the same code, which is
    compiled once.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    facts: dict[tuple[str, str, str], KernelFacts] = {}
    # A process reports what it compiles only once, so each case has a process of its own.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for target, case in sorted(pairs, key=lambda pair: (pair[1].op, pair[1].name)):
            code = (case.op, case.name, code_of(target))
            if code not in facts:
                facts[code] = pool.submit(compile_case, case, target).result()
            row = report_row(case, target, facts[code])
            rows[place(target, case)] = row
            print(_line(case, row), flush=True)
    return rows


def code_of(target: Target) -> str:
    """Name of what runs on a target: the architecture, or the target if it has its own tiles."""
    return target.name if tiles.has_measured(target.name) else target.architecture


def compile_case(case: cases.Case, target: Target) -> KernelFacts:
    """Facts of the kernels of a case on a target."""
    args, sizes = case.abstract()
    function = functools.partial(getattr(ops, case.op), implementation="mosaic", **sizes)
    return compile_for(target, function, args)[1]


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
        "fingerprint": fingerprint(target, case),
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
