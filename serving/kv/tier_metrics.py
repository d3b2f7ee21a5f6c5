"""What the tiers of one cache process do and how long it takes, as numbers under flat names.

A histogram is spelled as scrapers know it: `NAME_bucket{le="0.1"}` counts what took up to 0.1,
beside `NAME_sum` and `NAME_count`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from serving.observe import Histogram

AGE_BOUNDS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0)
"""Upper bounds for the age of what is evicted: a second to a week."""

Numbers = Mapping[str, float | int]


@runtime_checkable
class EvictingStore(Protocol):
    """A storage tier that decides by itself what goes."""

    @property
    def evicted_age_s(self) -> Histogram:
        """How old was what made room for others."""
        ...


@dataclass(slots=True)
class TierMetrics:
    """One tier since its start.

    Attributes:
        num_hits, num_misses: payloads that a request wanted and that were, or were not, there.
        bytes_hit: of the payloads that were there.
        look_up_s, read_s: how long calls of the tier took.
    """

    num_hits: int = 0
    num_misses: int = 0
    bytes_hit: int = 0
    look_up_s: Histogram = field(default_factory=Histogram)
    read_s: Histogram = field(default_factory=Histogram)

    def numbers(self, tier: str) -> dict[str, float | int]:
        """All of it, under names that begin with that of the tier."""
        return {
            f"{tier}_hits": self.num_hits,
            f"{tier}_misses": self.num_misses,
            f"{tier}_bytes_hit": self.bytes_hit,
            **histogram_numbers(f"{tier}_look_up_seconds", self.look_up_s),
            **histogram_numbers(f"{tier}_read_seconds", self.read_s),
        }


def histogram_numbers(name: str, histogram: Histogram) -> dict[str, float | int]:
    """A histogram under flat names; nothing if nothing was observed."""
    if not histogram.count:
        return {}
    buckets = {f'{name}_bucket{{le="{bound:g}"}}': count for bound, count in histogram.cumulative()}
    return {**buckets, f"{name}_sum": histogram.total, f"{name}_count": histogram.count}
