"""Time per part of the model, from a trace that `POST /profile` wrote.

Of each operation the time that is its own counts, without that of operations inside of it, and is
added to its scope. On a CPU these are the times of the operations themselves, wherever they ran;
threads that an operation uses besides are not counted. Only the steps that `POST /profile` named
count, not those that ran beside them while the trace was opened and closed. Traces of other
programs work too, if a `scopes.json` (see `serving/engine/profiler.py`) lies beside them; without a
`steps.json` all their steps count.

    python scripts/read_trace.py DIRECTORY [--depth N] [--json FILE]
"""

import argparse
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from serving.engine.profiler import SCOPES_FILE, STEPS_FILE

NO_SCOPE = "(none)"


@dataclass(frozen=True, slots=True)
class Operation:
    """One run of an operation of a compiled program; times in nanoseconds."""

    program: str
    name: str
    run_id: int
    start_ns: float
    own_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it is called, its number, and how long its dispatch took on the host."""

    name: str
    number: int
    start_ns: float
    dispatch_ns: float


class UnreadableTraceError(ValueError):
    """The folder holds no trace, or not one of ours; the message says what was expected."""


def main() -> int:
    """Prints tables of scopes and steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="what POST /profile answered")
    parser.add_argument("--depth", type=int, default=2, help="parts of a scope that are shown")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    # About types of the reader in jaxlib; nothing that whoever reads a trace could change.
    warnings.filterwarnings("ignore", "builtin type", DeprecationWarning)
    try:
        profile, scopes = read(args.directory)
        counted = counted_steps(args.directory)
    except UnreadableTraceError as error:
        print(f"read_trace: {error}", file=sys.stderr)
        return 2
    steps, operations = list(steps_of(profile)), list(operations_of(profile))
    if counted is not None:
        steps = [step for step in steps if step.number in counted]
        operations = operations_within(operations, scopes, steps)
    by_scope = ms_by_scope(operations, scopes, args.depth)
    device_ms = ms_by_run(operations, scopes)
    total = sum(by_scope.values())
    print(f"{'scope':<34} {'ms':>9} {'share':>6} {'ms/step':>8}")
    for scope, ms in sorted(by_scope.items(), key=lambda item: -item[1]):
        print(f"{scope:<34} {ms:9.3f} {ms / total:6.1%} {ms / max(len(steps), 1):8.3f}")
    print(f"\n{'step':>6} {'kind':<8} {'dispatch ms':>11} {'device ms':>9}")
    for index, step in enumerate(steps):
        on_device = f"{device_ms[index]:9.3f}" if index < len(device_ms) else f"{'-':>9}"
        print(f"{step.number:6d} {step.name:<8} {step.dispatch_ns / 1e6:11.3f} {on_device}")
    if args.json:
        figures = {"ms_by_scope": by_scope, "steps": [step.number for step in steps]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def read(directory: Path) -> tuple[Any, dict[str, dict[str, str]]]:
    """The newest trace below a folder, and program -> operation -> scope.

    Raises:
        UnreadableTraceError: there is none.
    """
    files = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise UnreadableTraceError(
            f"{directory}: no trace in it; expected a folder that POST /profile answered"
        )
    try:
        scopes = json.loads((directory / SCOPES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UnreadableTraceError(
            f"{directory / SCOPES_FILE}: cannot be read; expected it beside the trace"
        ) from None
    return ProfileData.from_file(str(files[-1])), scopes


def counted_steps(directory: Path) -> set[int] | None:
    """The numbers of the steps that were asked for; None for all that are in the trace.

    Raises:
        UnreadableTraceError: they are there but cannot be read.
    """
    path = directory / STEPS_FILE
    try:
        return set(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise UnreadableTraceError(f"{path}: cannot be read; expected numbers of steps") from None


def operations_within(
    operations: Iterable[Operation], scopes: dict[str, dict[str, str]], steps: Sequence[Step]
) -> list[Operation]:
    """The operations of the runs of `steps`, which are consecutive.

    Steps run in the order in which they are dispatched, and when the first of them was, nothing
    before it was running any more (`StepProfiler.submit`).
    """
    if not steps:
        return []
    some = [operation for operation in operations if operation.program in scopes]
    starts: dict[int, float] = {}
    for operation in some:
        starts[operation.run_id] = min(
            operation.start_ns, starts.get(operation.run_id, operation.start_ns)
        )
    later = [run_id for run_id, start in starts.items() if start >= steps[0].start_ns]
    within = set(sorted(later, key=lambda run_id: starts[run_id])[: len(steps)])
    return [operation for operation in some if operation.run_id in within]


def steps_of(profile: Any) -> Iterator[Step]:
    """The annotated steps in the order of their dispatch."""
    found: list[Step] = []
    for event in _events(profile):
        stats = _stats(event)
        if "step_num" in stats:
            found.append(
                Step(event.name, int(stats["step_num"]), event.start_ns, event.duration_ns)
            )
    return iter(sorted(found, key=lambda step: step.start_ns))


def operations_of(profile: Any) -> Iterator[Operation]:
    """Every run of an operation, with the time that is its own.

    On one thread or stream a later operation that begins before the end of an earlier one is
    inside of it, as the body of a loop is inside of the loop.
    """
    for plane in profile.planes:
        for line in plane.lines:
            runs = [
                (event.start_ns, event.start_ns + event.duration_ns, stats)
                for event in line.events
                if "hlo_op" in (stats := _stats(event))
            ]
            yield from _with_own_time(runs)


def _with_own_time(runs: list[tuple[float, float, dict[str, Any]]]) -> Iterator[Operation]:
    runs.sort(key=lambda run: (run[0], -run[1]))
    own = [end - start for start, end, _ in runs]
    around: list[int] = []
    for index, (start, end, _) in enumerate(runs):
        while around and runs[around[-1]][1] <= start:
            around.pop()
        if around:
            own[around[-1]] -= end - start
        around.append(index)
    for (start, end, stats), own_ns in zip(runs, own, strict=True):
        yield Operation(
            program=str(stats.get("hlo_module", "")),
            name=str(stats["hlo_op"]),
            run_id=int(stats.get("run_id", 0)),
            start_ns=start,
            own_ns=max(own_ns, 0.0),
            end_ns=end,
        )


def ms_by_scope(
    operations: Iterable[Operation], scopes: dict[str, dict[str, str]], depth: int
) -> dict[str, float]:
    """Milliseconds of each scope, cut to `depth` parts; only of programs that have scopes."""
    total: defaultdict[str, float] = defaultdict(float)
    for operation in operations:
        if operation.program in scopes:
            scope = scopes[operation.program].get(operation.name, NO_SCOPE)
            total["/".join(scope.split("/")[:depth])] += operation.own_ns / 1e6
    return dict(total)


def ms_by_run(operations: Iterable[Operation], scopes: dict[str, dict[str, str]]) -> list[float]:
    """Milliseconds from the first operation of each run of a program to its last, in order.

    Steps run in the order in which they are dispatched, so these are the runs of the steps.
    """
    spans: dict[int, tuple[float, float]] = {}
    for operation in operations:
        if operation.program in scopes:
            start, end = spans.get(operation.run_id, (operation.start_ns, operation.end_ns))
            spans[operation.run_id] = (
                min(start, operation.start_ns),
                max(end, operation.end_ns),
            )
    return [(end - start) / 1e6 for start, end in sorted(spans.values())]


def _events(profile: Any) -> Iterator[Any]:
    for plane in profile.planes:
        for line in plane.lines:
            yield from line.events


def _stats(event: Any) -> dict[str, Any]:
    return {name: value for name, value in event.stats if name is not None}


if __name__ == "__main__":
    sys.exit(main())
