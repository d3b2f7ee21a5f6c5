"""Goal: what a part has measured is written when the part is over, beside what other runs have
measured of others. Method: parts that give known figures, the last of which fails.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_kv


def test_figures_are_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_part(part: str, *_: object) -> dict[str, Any]:
        assert part != "storage", "a part that fails"
        return {"match_64_ms": 0.5, "hash_1m_ms": 8.0}

    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"swap_in_hidden": 0.9, "match_64_ms": 7.0}))
    monkeypatch.setattr(bench_kv, "run_part", run_part)
    parts = ["--part", "storage", "--part", "match"]
    monkeypatch.setattr(sys, "argv", ["bench_kv", *parts, "--json", str(file)])
    with pytest.raises(AssertionError, match="a part that fails"):
        bench_kv.main()
    found = json.loads(file.read_text())
    assert found.keys() >= {name for names in bench_kv.FIGURES.values() for name in names}
    known = {name: value for name, value in found.items() if value is not None}
    assert known == {"swap_in_hidden": 0.9, "match_64_ms": 0.5, "hash_1m_ms": 8.0}
