"""Times every tile of the tunable kernels on the GPU of this machine, and keeps the fastest.

For each shape of the released model: the tile that the heuristic or the table takes
now, the fastest one, and the median microseconds of both. With --tune, tiles that beat the present
one by more than the noise go to `pallas_kernels/tuned.toml`, in place of what stood there for the
same operation, device and shape.

    python scripts/bench_kernels.py [--op NAME] [--repeats N] [--tune] [--json FILE]
"""

import argparse
import datetime
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from pallas_kernels import cases, ops, tiles
from pallas_kernels.targets import Target, current_target
from scripts.device_check import seconds

TABLE = Path(tiles.__file__).with_name("tuned.toml")
NOISE = 0.02
"""Share of the present time that a tile has to save before it replaces the present one."""

Tile = dict[str, int]


class Place(NamedTuple):
    """What a measured tile is looked up by, and the tile that is taken now."""

    op: str
    device: str
    shape: dict[str, int]
    tile: Tile


def main() -> None:
    """Prints a line for each case and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=sorted(PLACES), help="only this operation")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each tile")
    parser.add_argument("--tune", action="store_true", help="write faster tiles to the table")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    target = current_target()
    if target is None:
        sys.exit(
            f"bench_kernels: {jax.devices()[0].device_kind} is not an H100, H200 or B200; tiles "
            "can only be measured on a GPU, and without a measurement the heuristics stand"
        )
    rows = []
    for place, alike in places([args.op] if args.op else sorted(PLACES), target):
        row = measure(place, functools.partial(time_tile, alike, args.repeats))
        rows.append(row)
        print(
            f"{place.op} {' '.join(case.name for case in alike)}: {row['before']} "
            f"{row['before_us']:.1f} us, fastest {row['tile']} {row['us']:.1f} us",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.tune:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        TABLE.write_text(updated(TABLE.read_text(encoding="utf-8"), rows, today), encoding="utf-8")


def places(names: list[str], target: Target) -> list[tuple[Place, list[cases.Case]]]:
    """Every place in the table that cases of these operations need, each with all of its cases."""
    found: list[tuple[Place, list[cases.Case]]] = []
    for case in itertools.chain.from_iterable(cases.find(op, "model") for op in names):
        place = PLACES[case.op](case, target)
        alike = next((some for at, some in found if at == place), None)
        if alike is None:
            found.append((place, [case]))
        else:
            alike.append(case)
    return found


def measure(at: Place, timer: Callable[[Tile], float | None]) -> dict[str, Any]:
    """The fastest tile of a place by `timer`, which gives seconds, or None for one that does not
    fit the GPU.

    Raises:
        RuntimeError: the present tile does not fit.
    """
    before = timer(at.tile)
    if before is None:
        raise RuntimeError(f"{at.op} {at.shape}: the present tile {at.tile} does not run")
    best, best_s = at.tile, before
    for tile in candidates(at.tile):
        took = timer(tile) if tile != at.tile else None
        if took is not None and took < best_s:
            best, best_s = tile, took
    if best_s > before * (1 - NOISE):
        best, best_s = at.tile, before
    return {
        "op": at.op,
        "device": at.device,
        "shape": at.shape,
        "before": at.tile,
        "before_us": 1e6 * before,
        "tile": best,
        "us": 1e6 * best_s,
    }


def candidates(tile: Tile) -> Iterable[Tile]:
    """Every tile of the same kind that can be written down."""
    sizes = {"rows": tiles.ROW_SIZES, "stages": range(1, 9)}
    kind = tiles.ProductTile if "rows" in tile else tiles.AttentionTile
    for values in itertools.product(*(sizes[name] for name in tile)):
        made = dict(zip(tile, values, strict=True))
        try:
            kind(**made)
        except ValueError:
            continue
        yield made


def time_tile(alike: list[cases.Case], repeats: int, tile: Tile) -> float | None:
    """Median seconds of cases with a tile, added up; None if the compiler refuses it."""
    total = 0.0
    for case in alike:
        args, sizes = case.arguments(jax.random.key(0))
        call = jax.jit(functools.partial(getattr(ops, case.op), implementation="mosaic", **sizes))
        with tiles.trial(tile):
            try:
                total += seconds(call, args, repeats)
            except (ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                print(f"{case.op} {case.name} {tile}: {reason}", file=sys.stderr)
                return None
    return total


def updated(text: str, rows: list[dict[str, Any]], date: str) -> str:
    """The table after tiles that differ from what was taken before were put into it."""
    comment = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(True)))
    faster = [row for row in rows if row["tile"] != row["before"]]
    replaced = [(row["op"], row["device"], row["shape"]) for row in faster]
    kept = [
        row
        for row in tiles.parse_table(text)
        if (row["op"], row["device"], row["shape"]) not in replaced
    ]
    made = [
        {key: row[key] for key in ("op", "device", "shape", "tile", "us")} | {"date": date}
        for row in faster
    ]
    return comment + "".join(_entry(row) for row in (*kept, *made))


def _entry(row: dict[str, Any]) -> str:
    def inline(table: dict[str, int]) -> str:
        return "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"

    return (
        f'\n[[tile]]\nop = "{row["op"]}"\ndevice = "{row["device"]}"\n'
        f"shape = {inline(row['shape']) if row['shape'] else '{}'}\ntile = {inline(row['tile'])}\n"
        f'us = {row["us"]:.2f}\ndate = "{row["date"]}"\n'
    )


def _product_place(case: cases.Case, target: Target) -> Place:
    sizes = case.sizes
    if case.op == "scaled_matmul":
        num_rows, n, k = sizes["num_rows"], sizes["n"], sizes["k"]
    else:
        num_rows = -(-sizes["num_tokens"] * sizes["num_chosen"] // sizes["num_experts"])
        n, k = sizes["ffn"], sizes["width"]
    tile = asdict(tiles.product_tile(target, case.op, num_rows, n, k))
    rows = next((size for size in tiles.ROW_SIZES if size >= num_rows), tiles.ROW_SIZES[-1])
    return Place(case.op, target.name, {"n": n, "k": k, "rows": rows}, tile)


def _attention_place(case: cases.Case, target: Target) -> Place:
    return Place(case.op, target.name, {}, asdict(tiles.attention_tile(target)))


PLACES: dict[str, Callable[[cases.Case, Target], Place]] = {
    "scaled_matmul": _product_place,
    "grouped_matmul": _product_place,
    "sparse_attention": _attention_place,
}
"""Operations whose kernels have tiles to choose from."""


if __name__ == "__main__":
    main()
