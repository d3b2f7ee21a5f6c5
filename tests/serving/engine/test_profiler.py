"""Goal: a trace holds the steps that were asked for, under their numbers, and says which part of
the model each operation belongs to.

Method: an executor whose step is a small compiled program with two scopes, run by hand and read
back with the profiler's own reader; texts of programs by hand.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.profiler import ProfileData

from scripts import read_trace
from serving.core.buckets import Bucket, StepKind
from serving.core.kv_transfer import KVTransfer
from serving.core.profiling import ProfileCapture, ProfileProblem, ProfileRefusal
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.profiler import StepProfiler, scopes_of
from serving.engine.step_times import TimedExecutor
from tests.serving.engine.checked_engine import (
    BUCKETS,
    make_limits,
)
from tests.serving.engine.simulated_device import SimulatedDevice


class SmallDevice:
    """Runs one compiled program per step, whatever the plan."""

    def __init__(self) -> None:
        def small_step(x: jax.Array) -> jax.Array:
            with jax.named_scope("outer"):
                with jax.named_scope("inner"):
                    y = jnp.tanh(x @ x)
                return jax.lax.fori_loop(0, 3, lambda _, a: jnp.sin(a @ x), y)

        self.x = jnp.ones((64, 64))
        self.program: Any = jax.jit(small_step).lower(self.x).compile()
        self._indexes: list[int] = []

    def submit(self, plan: StepPlan) -> None:
        self._indexes.append(plan.step_index)
        self.program(self.x).block_until_ready()

    def collect(self) -> StepResult:
        return StepResult(self._indexes.pop(0), np.zeros(1, np.int32))


@pytest.fixture(scope="module")
def device() -> SmallDevice:
    return SmallDevice()


def run(profiler: StepProfiler, index: int) -> None:
    submit(profiler, index)
    profiler.collect()


def submit(profiler: StepProfiler, index: int) -> None:
    one = np.ones(1, np.int32)
    columns = [one, one, one, one, one, one[:, None], one, one, one, one]
    profiler.submit(StepPlan(index, StepKind.DECODE, Bucket(1, 1, 1), *columns))


def run_until(profiler: StepProfiler, capture: Future[Any]) -> Any:
    """Runs steps, numbered from 5 on, until the trace is written."""
    index = 5
    while not capture.done():
        run(profiler, index)
        index += 1
    return capture.result()


def events_of(directory: str) -> list[tuple[str, dict[str, Any]]]:
    (file,) = Path(directory).glob("plugins/profile/*/*.xplane.pb")
    return [
        (event.name, {str(name): value for name, value in event.stats})
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
    ]


def test_a_trace_holds_its_steps_and_the_scopes_of_their_operations(
    device: SmallDevice, tmp_path: Path
) -> None:
    profiler = StepProfiler(device, tmp_path / "made", lambda: [device.program.as_text()])
    with ThreadPoolExecutor() as pool:
        result = run_until(profiler, pool.submit(profiler.capture, 3, 60.0))
    assert isinstance(result, ProfileCapture)
    first = result.step_indexes[0]
    assert result.step_indexes == (first, first + 1, first + 2)
    events = events_of(result.directory)
    steps = [stats["step_num"] for name, stats in events if name == "decode"]
    assert set(steps) >= set(result.step_indexes)
    scopes = msgspec.json.decode((Path(result.directory) / "scopes.json").read_bytes())
    operations = [stats for _, stats in events if "hlo_op" in stats]
    found = {scopes[stats["hlo_module"]].get(stats["hlo_op"]) for stats in operations}
    assert {"outer", "outer/inner"} <= found
    # The next trace gets a folder of its own.
    with ThreadPoolExecutor() as pool:
        again = run_until(profiler, pool.submit(profiler.capture, 1, 60.0))
    assert len(again.step_indexes) == 1 and again.directory != result.directory


def test_a_trace_of_steps_side_by_side_shows_the_ones_that_count(
    device: SmallDevice, tmp_path: Path
) -> None:
    """Two steps in flight, as in the server, so that others run when the trace begins and ends."""
    profiler = StepProfiler(device, tmp_path, lambda: [device.program.as_text()])
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    submitted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    oldest: list[int] = []

    def submit_all(capture: Future[Any]) -> None:
        index = 5
        while not capture.done():
            room.get()
            submit(profiler, index)
            submitted.put(index)
            index += 1
        submitted.put(None)

    def collect_all() -> None:
        room.put(None)
        room.put(None)
        while (index := submitted.get()) is not None:
            if profiler._counted and not oldest:
                oldest.append(index)
            profiler.collect()
            room.put(None)

    with ThreadPoolExecutor() as pool:
        capture = pool.submit(profiler.capture, 3, 60.0)
        pool.submit(submit_all, capture)
        pool.submit(collect_all).result()
    made = capture.result()
    assert isinstance(made, ProfileCapture) and len(made.step_indexes) == 3
    assert oldest == [made.step_indexes[0]], "it began when no other was running"
    directory = Path(made.directory)
    assert read_trace.counted_steps(directory) == set(made.step_indexes)
    profile, scopes = read_trace.read(directory)
    steps = [step for step in read_trace.steps_of(profile) if step.number in made.step_indexes]
    operations = read_trace.operations_within(read_trace.operations_of(profile), scopes, steps)
    spans = {run: [] for run in sorted({operation.run_id for operation in operations})}
    assert len(spans) == 3
    for operation in operations:
        spans[operation.run_id].append(operation.start_ns)
    # The made-up device runs a step while it is dispatched.
    for step, starts in zip(steps, sorted(spans.values(), key=min), strict=True):
        assert step.start_ns <= min(starts) <= max(starts) <= step.start_ns + step.dispatch_ns


def test_a_wait_without_steps_ends_with_its_time_or_with_the_server(
    device: SmallDevice, tmp_path: Path
) -> None:
    profiler = StepProfiler(device, tmp_path, tuple)
    nothing = profiler.capture(2, 0.01)
    assert isinstance(nothing, ProfileCapture) and nothing.step_indexes == ()

    def longer_trace() -> object:
        # One of the short ones below may be first.
        while refused_as(result := profiler.capture(2, 250.0), ProfileProblem.BUSY):
            pass
        return result

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(longer_trace)
        wait_until(lambda: refused_as(profiler.capture(1, 0.01), ProfileProblem.BUSY))
        profiler.close()
        assert waiting.result() == dataclasses.replace(nothing, directory=ANY)


def test_what_cannot_be_traced_is_refused(device: SmallDevice, tmp_path: Path) -> None:
    assert refused_as(StepProfiler(device, None, tuple).capture(1, 1.0), ProfileProblem.OFF)
    (tmp_path / "file").write_text("")
    result = StepProfiler(device, tmp_path / "file", tuple).capture(1, 1.0)
    assert refused_as(result, ProfileProblem.UNWRITABLE)


def test_transfers_pass_through_in_line(tmp_path: Path) -> None:
    limits = make_limits(num_snapshots=2)
    device = SimulatedDevice(limits, BUCKETS)
    profiler = StepProfiler(TimedExecutor(device, lambda: 0), None, tuple)
    block = np.array([3], np.int32)
    device._pool[3] = [4, 3, 2, 1]
    profiler.move(KVTransfer(7, read_blocks=block))
    read = profiler.collect_read()
    assert read.transfer_id == 7
    assert np.concatenate(read.groups, axis=1).view(np.int64).tolist() == [[4, 3, 2, 1]]


def refused_as(result: object, problem: ProfileProblem) -> bool:
    return isinstance(result, ProfileRefusal) and result.problem is problem


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def test_scopes_are_the_named_ones_around_an_operation() -> None:
    text = """HloModule jit_decode, is_scheduled=true
%body (p: f32[]) -> f32[] {
  ROOT %wrapped_sine = f32[] fusion(%a), metadata={op_name="jit(decode)/moe/while/body/sin" id=4}
}
ENTRY %main {
  %dot.1 = f32[8]{0} dot(%x, %y), metadata={op_name="jit(decode)/draft/attention/td,md->tm/dot"}
  plain.2 = (s32[], f32[2]) call(%z), metadata={op_name="jit(decode)/f.<locals>.one/cos"}, id=3
  %copy.3 = f32[] copy(%z)
}
"""
    assert scopes_of([text, "HloModule jit_empty"]) == {
        "jit_decode": {"wrapped_sine": "moe", "dot.1": "draft/attention"},
        "jit_empty": {},
    }
