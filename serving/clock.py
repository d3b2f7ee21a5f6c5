"""How the rest of `serving` learns the time: it is handed a `Clock` and never reads one itself.

*Why*: whatever takes its time from a `Clock` runs unchanged under a virtual one, so a whole
cluster can be simulated, and a test never waits.
"""

from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """A source of time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes backwards."""
        ...

    def unix_s(self) -> int:
        """Whole seconds since 1970, for timestamps that people read. May jump."""
        ...


def ns_of_s(seconds: float) -> int:
    """Seconds, as configurations give them, in nanoseconds, as clocks count them."""
    return round(seconds * NS_PER_S)


def s_of_ns(nanoseconds: int) -> float:
    """Nanoseconds in seconds, the unit of published metrics."""
    return nanoseconds / NS_PER_S
