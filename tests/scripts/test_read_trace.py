"""Goal: time is counted once, for the operation whose own it is, and shown by scope and step.

Method: events by hand; a trace of a small program, read as its users do.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from scripts import read_trace
from scripts.read_trace import Operation, Step, ms_by_run, ms_by_scope, operations_within
from serving.engine.profiler import SCOPES_FILE, STEPS_FILE, scopes_of

SCOPES = {"jit_a": {"dot.1": "draft/attention/inner", "sin": "draft"}}


def operation(name: str, own_ns: float, run_id: int = 1, program: str = "jit_a") -> Operation:
    start = 1e7 * run_id
    return Operation(program, name, run_id, start, own_ns, start + own_ns)


def test_time_inside_another_operation_is_its_own() -> None:
    named = [{"hlo_op": name, "hlo_module": "m", "run_id": 1} for name in ("while", "a", "b", "c")]
    runs = list(zip((0.0, 10.0, 40.0, 100.0), (100.0, 30.0, 90.0, 120.0), named, strict=True))
    own = {made.name: made.own_ns for made in read_trace._with_own_time(runs[::-1])}
    assert own == {"while": 30.0, "a": 20.0, "b": 50.0, "c": 20.0}


def test_scopes_add_up_to_a_depth_and_other_programs_do_not_count() -> None:
    some = [operation("dot.1", 2e6), operation("sin", 1e6), operation("copy", 5e5)]
    some.append(operation("dot.1", 9e6, program="jit_other"))
    assert ms_by_scope(some, SCOPES, 2) == {"draft/attention": 2.0, "draft": 1.0, "(none)": 0.5}
    assert ms_by_scope(some, SCOPES, 1) == {"draft": 3.0, "(none)": 0.5}


def test_runs_span_their_operations() -> None:
    some = [operation("sin", 1e6, run_id=2), operation("sin", 3e6), operation("copy", 1e6)]
    assert ms_by_run(some, SCOPES) == [3.0, 1.0]


def test_runs_around_the_steps_are_left_out() -> None:
    steps = [Step("decode", number, 2e7 + number, 1.0) for number in (0, 1)]
    some = [operation("sin", 1e6, run_id=run_id) for run_id in (5, 4, 3, 1)]
    some.append(operation("sin", 1e6, run_id=2, program="jit_other"))
    found = operations_within(some, SCOPES, steps)
    assert sorted(one.run_id for one in found) == [3, 4]
    assert operations_within(some, SCOPES, []) == []


@pytest.mark.parametrize("counted", [None, [8]])
def test_a_real_trace_is_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    counted: list[int] | None,
) -> None:
    def decode(x: jax.Array) -> jax.Array:
        with jax.named_scope("moe"):
            return jnp.tanh(x @ x)

    x = jnp.ones((64, 64))
    program = jax.jit(decode).lower(x).compile()
    (tmp_path / SCOPES_FILE).write_text(json.dumps(scopes_of([program.as_text() or ""])))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        for number in (7, 8, 9):
            with jax.profiler.StepTraceAnnotation("decode", step_num=number):
                program(x).block_until_ready()
    if counted is not None:
        (tmp_path / STEPS_FILE).write_text(json.dumps(counted))
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["read_trace", str(tmp_path), "--json", str(figures)])
    assert read_trace.main() == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    expected = counted or [7, 8, 9]
    shown_steps = lines[lines.index(["step", "kind", "dispatch", "ms", "device", "ms"]) + 1 :]
    assert [line[:2] for line in shown_steps] == [[str(number), "decode"] for number in expected]
    assert "-" not in sum(shown_steps, []), "every step has a time on the device"
    written = json.loads(figures.read_text())
    assert written["steps"] == expected and written["ms_by_scope"]["moe"] > 0


def test_what_is_no_trace_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["read_trace", str(tmp_path)])
    assert read_trace.main() == 2
    assert "no trace in it" in capsys.readouterr().err
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(b"")
    assert read_trace.main() == 2
    assert SCOPES_FILE in capsys.readouterr().err
    (tmp_path / SCOPES_FILE).write_text("{}")
    (tmp_path / STEPS_FILE).write_text("seven")
    assert read_trace.main() == 2
    assert STEPS_FILE in capsys.readouterr().err
