"""Goal: the fastest tile is found and kept, noise keeps the present one, and a machine without a
GPU is told so.
Method: a pretended timer; tables before and after as text.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import tiles
from pallas_kernels.targets import H200
from scripts import bench_kernels
from scripts.bench_kernels import PLACES, Place, Tile, candidates, measure, places, updated

PLACE = Place("scaled_matmul", "h200", {"n": 512, "k": 5120, "rows": 64}, {"rows": 64, "stages": 2})


def pretended(tile: Tile) -> float | None:
    """Best with 32 rows and 5 stages; many stages of many rows do not fit."""
    if tile["rows"] * tile["stages"] > 400:
        return None
    return 1e-6 * (10 + abs(tile["rows"] - 32) + abs(tile["stages"] - 5))


def test_the_fastest_of_all_tiles_that_fit_is_found() -> None:
    row = measure(PLACE, pretended)
    assert row["tile"] == {"rows": 32, "stages": 5}
    assert (row["before"], round(row["before_us"]), round(row["us"])) == (PLACE.tile, 45, 10)


def test_a_gain_within_the_noise_changes_nothing() -> None:
    row = measure(PLACE, lambda tile: 1.0 if tile == PLACE.tile else 0.99)
    assert (row["tile"], row["us"]) == (PLACE.tile, 1e6)
    tie = measure(PLACE, lambda tile: 1.0)
    assert tie["tile"] == PLACE.tile


def test_a_present_tile_that_does_not_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="scaled_matmul .* the present tile .* does not run"):
        measure(PLACE, lambda tile: None)


def test_candidates_are_all_tiles_that_can_be_written_down() -> None:
    assert len(list(candidates({"rows": 8, "stages": 2}))) == len(tiles.ROW_SIZES) * 7
    assert list(candidates({"stages": 2})) == [{"stages": 1}, {"stages": 2}]


def test_the_table_takes_faster_tiles_and_keeps_the_others() -> None:
    before = (bench_kernels.TABLE).read_text(encoding="utf-8")
    row = measure(PLACE, pretended)
    once = updated(before, [row], "2026-01-01")
    assert once.startswith("# Measured tiles.")
    (entry,) = tiles.parse_table(once)
    assert entry == {
        "op": "scaled_matmul",
        "device": "h200",
        "shape": PLACE.shape,
        "tile": {"rows": 32, "stages": 5},
        "us": 10.0,
        "date": "2026-01-01",
    }
    other = {**row, "shape": {}, "op": "sparse_attention", "tile": {"stages": 1}}
    twice = updated(once, [other, {**row, "us": 9.0}], "2026-01-02")
    assert [(e["op"], e["us"]) for e in tiles.parse_table(twice)] == [
        ("sparse_attention", 10.0),
        ("scaled_matmul", 9.0),
    ]
    unchanged = {**row, "tile": row["before"]}
    assert tiles.parse_table(updated(once, [unchanged], "2026-01-03")) == (entry,)


def test_what_is_measured_is_what_the_kernel_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, alike in places(sorted(PLACES), H200):
        assert alike
        asked = []

        def recorded(op: str, device: str, shape: tuple[tuple[str, int], ...]) -> Tile:
            asked.append((op, device, dict(shape)))  # noqa: B023
            return {}

        monkeypatch.setattr(tiles, "_measured", recorded)
        PLACES[place.op](alike[0], H200)
        assert asked == [(place.op, place.device, place.shape)]
        monkeypatch.undo()


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, bench_kernels.__file__, "--tune"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "tiles can only be measured on a GPU" in done.stderr


def test_one_place_has_all_cases_that_share_it() -> None:
    ((_, alike),) = places(["sparse_attention"], H200)
    assert len(alike) == 3
    assert Path(bench_kernels.TABLE).name == "tuned.toml"
