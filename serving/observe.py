"""What the service counts about itself, as plain numbers.

The frontend adds to a `ServiceMetrics`; its exposition for scrapers is made elsewhere, so that
this module can be used by code that may not know of threads or sockets.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

LATENCY_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of latency buckets, in seconds: from one fast decode step to a long answer."""


class Histogram:
    """Counts of observations per bucket. An observation belongs to the first bound it fits."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds `times` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many observations were made."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations at or below it), the last bound being infinite."""
        running = 0
        pairs = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


TENANTS_MAX = 100
"""Tenants that are counted by name; those that come later are counted together."""

OTHER_TENANTS = "other tenants"
"""No tenant can have this name, since it has a blank."""


@dataclass(slots=True)
class TenantCounters:
    """What one tenant's calls took, since the start."""

    num_calls: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpanNote:
    """What somebody has done for a call that is traced.

    Attributes:
        parent: the span that it is a part of, as a `traceparent` header names it.
        name: of what was done.
        start_ns, end_ns: clock readings.
        attributes: names and counts, never texts.
        fault: why it ended badly; empty if it did not.
    """

    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int]
    fault: str = ""


@dataclass(slots=True)
class ServiceMetrics:
    """Counters and latencies of one service, since its start."""

    num_requests: int = 0
    num_refused: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=Histogram)
    request_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    tenants: dict[str, TenantCounters] = field(default_factory=dict[str, TenantCounters])

    def add_finished(self, reason: str) -> None:
        """Counts the end of one request, by reason."""
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1

    def tenant(self, name: str) -> TenantCounters:
        """The counters of a tenant, or those that all tenants beyond the first many share."""
        if name not in self.tenants and len(self.tenants) >= TENANTS_MAX:
            name = OTHER_TENANTS
        return self.tenants.setdefault(name, TenantCounters())
