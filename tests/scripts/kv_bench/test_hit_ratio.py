"""Goal: the curves of a trace are bounded by the endless cache, and are drawn. Method: a small
trace in the format of the public ones.
"""

import json
import random
from pathlib import Path

from scripts.bench_kv import FIGURES, run_part


def write_trace(path: Path) -> None:
    rng = random.Random(1)
    lines = []
    for time in range(60):
        talk = rng.randrange(8)
        ids = [100 * talk + turn for turn in range(rng.randrange(1, 9))]
        row = {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1}
        lines.append(json.dumps(row | {"hash_ids": ids}))
    path.write_text("\n".join(lines))


def test_curves_and_plot(tmp_path: Path) -> None:
    for name in ("conversation", "synthetic"):
        write_trace(tmp_path / f"{name}_trace.jsonl")
    found = run_part("hit_ratio", tmp_path, tmp_path / "plot.svg")
    assert set(found) == set(FIGURES["hit_ratio"])
    for ratios in found["hit_ratio_conversation"].values():
        assert 0.5 < ratios["endless"] < 1 and max(ratios.values()) == ratios["endless"]
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert run_part("hit_ratio") == {}
