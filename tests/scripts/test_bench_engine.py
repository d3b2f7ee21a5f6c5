"""Figures are kept from part to part, and input that cannot be used is one line."""

import json
import sys
from pathlib import Path

import pytest

from scripts import bench_engine, bench_grammar, bench_host


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar_figures = bench_grammar.grammar_figures
    monkeypatch.setattr(bench_grammar, "grammar_figures", lambda model: grammar_figures(model, 1))
    monkeypatch.setattr(bench_host, "NUM_SEQUENCES", (4,))
    monkeypatch.setattr(bench_engine, "HOST_STEPS", 2)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *arguments])
    return bench_engine.main()


def test_parts_are_merged_into_the_file_and_its_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    path.write_text('{"engine_over_raw_1": 1.5, "host_ms_4": -1.0}')

    assert run(monkeypatch, "--parts", "host", "grammar", "--json", str(path)) == 0

    figures = json.loads(path.read_text())
    assert figures["engine_over_raw_1"] == 1.5
    assert figures["host_ms_4"] > 0
    assert figures["grammar_us_per_token"] > 0
    table = path.with_suffix(".md").read_text()
    assert all(f"| `{name}` | {value:.3f} |" in table for name, value in figures.items())


def test_a_part_that_fails_loses_nothing_of_those_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(num_steps: int) -> dict[str, float]:
        raise RuntimeError(f"cannot do {num_steps} steps")

    monkeypatch.setattr(bench_host, "host_figures", fail)
    path = tmp_path / "figures.json"

    with pytest.raises(RuntimeError, match="cannot do"):
        run(monkeypatch, "--parts", "grammar", "host", "--json", str(path))

    assert list(json.loads(path.read_text())) == ["grammar_us_per_token"]
    assert "grammar_us_per_token" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/nope"], "/nope: no such directory"),
        (["--json", "/nope/figures.json"], "/nope: no such directory"),
        (["--json", __file__], "cannot be read as JSON"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    assert run(monkeypatch, "--parts", "grammar", *arguments) == 2

    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert expected in said
