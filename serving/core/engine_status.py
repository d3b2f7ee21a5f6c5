"""An engine as others see it: what plans steps, and what it holds at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from serving.core.request import TokenDelta
from serving.core.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of what the engine holds; padding blocks and slots are not counted.

    Blocks that a step in flight still uses are not free, even if their sequence is over.
    `num_cached_blocks` are the free ones that hold a prefix, `num_snapshots` the prefixes that
    can be gone on from. `num_steps` and `num_preemptions` count since the start, and so do
    `num_verified` and `num_accepted`: drafts by their place after the last token. `slope_ms` is how
    much longer decode steps take than was measured at the start, for each token of their bucket.
    """

    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_steps_in_flight: int
    num_blocks: int
    num_free_blocks: int
    num_slots: int
    num_free_slots: int
    num_steps: int
    num_preemptions: int
    num_cached_blocks: int = 0
    num_snapshots: int = 0
    num_verified: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    slope_ms: float = 0.0

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return self.num_prefilling + self.num_decoding


class Scheduler(Protocol):
    """What plans steps and takes their results: one engine, or several that step together."""

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit."""
        ...

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take over the results of the oldest step in flight."""
        ...

    def status(self) -> EngineStatus:
        """Counts for metrics and health."""
        ...


def total_status(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """The status of several engines together; of none, one that holds nothing.

    Everything is a sum but the slope, of which the largest counts: the slowest one sets the pace.
    """
    totals = {
        field.name: sum(getattr(status, field.name) for status in statuses)
        for field in fields(EngineStatus)
        if field.name not in ("num_verified", "num_accepted", "slope_ms")
    }
    return EngineStatus(
        **totals,
        num_verified=_columns([status.num_verified for status in statuses]),
        num_accepted=_columns([status.num_accepted for status in statuses]),
        slope_ms=max((status.slope_ms for status in statuses), default=0.0),
    )


def _columns(counts: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*counts, strict=True))
