"""Traces of steps by the profiler of jax, with the scopes of the model's parts beside them.

The profiler stands around an executor, so it sees every step: each is dispatched inside an
annotation with its number, which costs about a microsecond while no trace is made.

Events of a device name operations of a compiled program (`fusion.12`), not the parts of the model
they belong to. Those stand in the program's text, as the metadata of each operation; so a trace
directory also gets `scopes.json`: program -> operation -> scope, such as `draft/attention`.

A trace also holds the beginnings of steps around those that were asked for, because it is opened
and closed while steps run; `steps.json` has the numbers of those that count.
"""

import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import msgspec

from serving.core.kv_transfer import KVTransfer
from serving.core.profiling import ProfileCapture, ProfileProblem, ProfileRefusal
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.engine import Executor
from serving.engine.kv_moves import TransferPassage

SCOPES_FILE = "scopes.json"
STEPS_FILE = "steps.json"

_PROGRAM = re.compile(r"^HloModule ([^\s,]+)")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([^\s=]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")
_NOT_A_SCOPE = re.compile(
    r".*(\(|->|<locals>).*|while|body|cond|branch_\d+_fun|scan|closed_call|eval_jaxpr"
)
"""Parts of an operation's path that jax puts there for its own constructs."""


class StepProfiler(TransferPassage):
    """An executor around another one, whose steps can be traced.

    Args:
        executor: runs the steps. They are submitted and collected on different threads: the first
            step of a trace is held back until those before it are collected.
        directory: traces go to folders of their own in it; None makes none.
        programs: texts of the compiled programs that run, in the notation of XLA.
    """

    def __init__(
        self,
        executor: Executor,
        directory: Path | None,
        programs: Callable[[], Iterable[str]],
    ) -> None:
        self._executor = executor
        self._directory = directory
        self._programs = programs
        self._is_tracing = threading.Lock()
        self._changed = threading.Condition()
        self._num_wanted = 0
        self._counted: list[int] = []
        self._in_flight: deque[int] = deque()
        self._is_closed = False

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step under its number."""
        with self._changed:
            if self._num_wanted and not self._counted:
                # Events of the device have no numbers of steps. Whoever reads the trace can tell
                # whose they are because nothing that was dispatched before runs any more.
                self._changed.wait_for(self._may_begin)
            if len(self._counted) < self._num_wanted:
                self._counted.append(plan.step_index)
            self._in_flight.append(plan.step_index)
        try:
            with jax.profiler.StepTraceAnnotation(plan.kind.value, step_num=plan.step_index):
                self._executor.submit(plan)
        except BaseException:
            with self._changed:
                self._in_flight.pop()
                self._changed.notify_all()
            raise

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""
        try:
            return self._executor.collect()
        finally:
            with self._changed:
                self._in_flight.popleft()
                self._changed.notify_all()

    def move(self, transfer: KVTransfer) -> None:
        """Dispatch a transfer under its number."""
        with jax.profiler.TraceAnnotation("kv_transfer", transfer_id=transfer.transfer_id):
            super().move(transfer)

    def close(self) -> None:
        """Ends the wait for steps that will not come; the server is stopping."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def capture(self, num_steps: int, timeout_s: float) -> ProfileCapture | ProfileRefusal:
        """Trace the next steps; see `core.profiling.Profiler`. To be called on its own thread."""
        if self._directory is None:
            return ProfileRefusal(
                ProfileProblem.OFF, "no traces are made; start the server with server.profile_dir"
            )
        if not self._is_tracing.acquire(blocking=False):
            return ProfileRefusal(ProfileProblem.BUSY, "a trace is being made; ask again later")
        try:
            return self._capture(self._directory, num_steps, timeout_s)
        except OSError as error:
            detail = f"{self._directory}: traces cannot be written there ({error.strerror})"
            return ProfileRefusal(ProfileProblem.UNWRITABLE, detail)
        finally:
            self._is_tracing.release()

    def _capture(self, parent: Path, num_steps: int, timeout_s: float) -> ProfileCapture:
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="trace-", dir=parent))
        (directory / SCOPES_FILE).write_bytes(msgspec.json.encode(scopes_of(self._programs())))
        options = jax.profiler.ProfileOptions()
        # Every call of every Python function would be ten times the rest.
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=options)
        try:
            with self._changed:
                self._counted = []
                self._num_wanted = num_steps
                self._changed.wait_for(self._is_over, timeout_s)
                self._num_wanted = 0
                step_indexes = tuple(self._counted)
                self._changed.notify_all()
        finally:
            jax.profiler.stop_trace()
        (directory / STEPS_FILE).write_bytes(msgspec.json.encode(step_indexes))
        return ProfileCapture(str(directory), step_indexes)

    def _may_begin(self) -> bool:
        return not self._in_flight or not self._num_wanted or self._is_closed

    def _is_over(self) -> bool:
        has_all = len(self._counted) == self._num_wanted and not (
            self._in_flight and self._in_flight[0] <= self._counted[-1]
        )
        return has_all or self._is_closed


def scopes_of(programs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Program -> operation -> scope, from the texts of compiled programs.

    The scope of an operation is the path of `jax.named_scope` names around it, joined by slashes;
    operations outside of any are left out.
    """
    scopes: dict[str, dict[str, str]] = {}
    for text in programs:
        program: dict[str, str] = {}
        name = ""
        for line in text.splitlines():
            if match := _OPERATION.match(line):
                operation, path = match.groups()
                if scope := _scope(path):
                    program[operation] = scope
            elif match := _PROGRAM.match(line):
                name = match.group(1)
        scopes[name] = program
    return scopes


def _scope(path: str) -> str:
    """The named scopes of an operation's path: without its last part, the primitive."""
    return "/".join(part for part in path.split("/")[:-1] if not _NOT_A_SCOPE.fullmatch(part))
