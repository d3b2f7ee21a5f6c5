"""Goal: the command reads its input, refuses what cannot be used, and writes what it found.
Method: the command line on a small trace and fleet, run twice; one wrong input of each kind.
"""

import json
from pathlib import Path

import pytest

from serving.__main__ import main
from serving.core.cost import DecodeCost, PrefillCost
from serving.cost_file import write_cost_file
from serving.simulate import SimulateOptions, simulate
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError
from tests.serving.sim.small_fleet import mooncake_lines

SMALL = ("--workers", "4p4d", "--set", "prefill.unit=4", "--load", "0.8", "--seconds", "10")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(mooncake_lines()) + "\n")
    return path


def test_the_command_writes_the_same_digest_twice(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    arguments = ["simulate", "--trace", str(trace), *SMALL, "--report", str(report)]
    assert main([*arguments, "--plot", str(tmp_path / "plot.svg")]) == 0
    first, shown = json.loads(report.read_text()), capsys.readouterr().out
    assert shown.startswith("production on 4p4d: ")
    assert f"digest {first['digest']}" in shown
    assert (tmp_path / "plot.svg").read_text().lstrip().startswith("<?xml")
    assert first["throughput_over_balanced"] > 0.5
    assert first["offered_rps"] == pytest.approx(0.8 * first["balanced_rps"], rel=0.3)
    for name in ("goodput_rps", "hit_ratio", "prefill_imbalance", "decode_imbalance"):
        assert first[name] > 0
    assert main(arguments) == 0
    second = json.loads(report.read_text())
    del first["wall_s"], second["wall_s"]
    assert first == second
    assert main([*arguments, "--policy", "round_robin", "--seed", "3"]) == 0
    assert json.loads(report.read_text())["digest"] != first["digest"]


def test_costs_of_a_file_take_the_place_of_the_fleets(trace: Path, tmp_path: Path) -> None:
    costs, report = tmp_path / "cost.toml", tmp_path / "report.json"
    ttfts: list[float] = []
    for token_ms in (0.02, 0.2):
        write_cost_file(
            costs, PrefillCost(5.0, token_ms, 0.0), DecodeCost(6.0, 0.2, 0.0), "made up"
        )
        arguments = ["simulate", "--trace", str(trace), *SMALL[:4], "--rate", "0.5"]
        arguments += ["--seconds", "5", "--report", str(report), "--costs", str(costs)]
        assert main(arguments) == 0
        ttfts.append(json.loads(report.read_text())["ttft_ms"]["all"]["p50"])
    assert ttfts[1] > 3 * ttfts[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "4p0d"], "workers: received '4p0d'; expected a number of prefill and one"),
        (["--policy", "best"], "policy: received 'best'; expected one of production, round_robin"),
        (["--load", "0"], "load: received 0.0"),
        (["--load", "1", "--rate", "3"], "rate 3.0 and load 1.0: expected at most one of them"),
        (["--rate", "-1"], "rate: received -1.0"),
        (["--seconds", "1e9"], "seconds: received 1000000000.0"),
        (["--config", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--set", "prefill.speed=1"], "unknown key"),
        (["--set", "decode.context_max=5"], "context_max: received 5; expected at least"),
        (["--report", "nowhere/r.json"], "nowhere/r.json: there is no folder to write it to"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    trace: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(trace), *arguments]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and shown.count("\n") == 1


def test_a_trace_that_cannot_be_read_is_refused(trace: Path) -> None:
    clock = SystemClock()
    with pytest.raises(ConfigError, match="nowhere.jsonl: cannot be read"):
        simulate(SimulateOptions(Path("nowhere.jsonl")), clock)
    trace.write_text("\n".join([*mooncake_lines(3), '{"timestamp": 1}']))
    with pytest.raises(ConfigError, match="trace.jsonl:4: input_length is nothing"):
        simulate(SimulateOptions(trace), clock)
    trace.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="trace.jsonl: cannot be read"):
        simulate(SimulateOptions(trace), clock)
    lines = ["TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "2025-01-01 00:00:00,1,9,1"]
    trace.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="expected vision workers too, such as 64p64d1v"):
        simulate(SimulateOptions(trace), clock)
