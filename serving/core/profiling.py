"""Traces of running steps: what can be asked for, and what comes of it."""

import enum
from dataclasses import dataclass
from typing import Protocol

STEPS_MAX = 1000
"""Steps in one trace. A step of a large model leaves some thousands of events."""

SECONDS_MAX = 600.0
"""Longest wait for the steps of one trace."""


class ProfileProblem(enum.Enum):
    """Why there is no trace: none are configured, one is being made, it cannot be written, or the
    profiler broke.
    """

    OFF = "off"
    BUSY = "busy"
    UNWRITABLE = "unwritable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProfileCapture:
    """A trace that was written.

    Attributes:
        directory: what `scripts/read_trace.py` takes.
        step_indexes: the steps in it, in order; fewer than asked for if the time was over before.
    """

    directory: str
    step_indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProfileRefusal:
    """There is no trace; `detail` is for the person who asked."""

    problem: ProfileProblem
    detail: str


class Profiler(Protocol):
    """Makes traces of the steps that run meanwhile."""

    def capture(self, num_steps: int, timeout_s: float) -> ProfileCapture | ProfileRefusal:
        """Trace the next `num_steps` steps; waits for them, but at most `timeout_s` seconds."""
        ...
