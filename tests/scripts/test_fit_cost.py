"""Goal: the costs that steps were made with are found again and written, and what cannot be fitted
is one line. Method: files of made-up steps.
"""

import json
from pathlib import Path

import pytest

from scripts.fit_cost import main
from serving.cost_file import read_cost_file


def write_steps(path: Path, kinds: tuple[str, ...] = ("prefill", "decode")) -> None:
    lines: list[str] = []
    for kind in kinds:
        for count in (1, 8, 64):
            for back in (0.0, 1e6, 5e7):
                ms = 2.0 + 0.5 * count + 1e-6 * back
                row = {"kind": kind, "num_rows": count, "num_tokens": count}
                lines.append(json.dumps(row | {"looked_back": back, "time_ms": ms}))
    path.write_text("\n".join(lines) + "\n")


def test_costs_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, out, figures = (tmp_path / name for name in ("steps.jsonl", "cost.toml", "f.json"))
    write_steps(steps)
    arguments = ["--records", str(steps), "--records", str(steps), "--out", str(out)]
    assert main([*arguments, "--json", str(figures)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(figures.read_text()) and shown["decode"]["steps"] == 18
    assert shown["prefill"]["median_error"] == pytest.approx(0, abs=1e-9)
    costs = read_cost_file(out)
    assert costs.prefill.token_ms == pytest.approx(0.5)
    assert costs.decode.context_ms == pytest.approx(1e-6)
    assert out.read_text().startswith("# Fitted to 18 prefill and 18 decode steps: steps.jsonl")


def test_what_cannot_be_fitted_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, out = tmp_path / "steps.jsonl", tmp_path / "cost.toml"
    write_steps(steps, ("prefill",))
    for arguments, expected in (
        (["--records", str(steps)], "9 prefill and 0 decode steps; expected some of both"),
        (["--records", str(tmp_path / "none")], "none: cannot be read"),
        (["--measure", "--set", "engine.num_blocks=1"], "engine.num_blocks is 1"),
    ):
        assert main([*arguments, "--out", str(out)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("fit_cost: ") and expected in error
        assert not out.exists()
