"""What decode steps really cost, learnt while they run.

Times measured at the start are those of short contexts on an idle machine. Steps of real requests
take longer, and longer by about as much for each token: contexts grow, experts are hit unevenly.
So what is learnt is one number, the time that a step takes beyond its measured one for each token
of its bucket, and not a new table: buckets that seldom run would never get theirs.

Medians on two levels keep single slow steps and single odd buckets out of it.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

from serving.core.buckets import Bucket

_WINDOW = 256
"""Newest steps of each bucket that count."""

_SAMPLES_MIN = 10
"""Steps of a bucket before it has a say."""

_REFRESH = 16
"""Steps between two looks at the medians, which take longer than a step may wait each time."""


class CostCorrection:
    """The correction of one engine's decode times.

    Args:
        step_ms: times measured at the start; steps of other buckets are passed over.
    """

    def __init__(self, step_ms: Mapping[Bucket, float]) -> None:
        self._step_ms = step_ms
        self._excess: dict[Bucket, deque[float]] = {}
        self._num_observed = 0
        self.slope_ms = 0.0
        """Milliseconds that a step takes beyond its measured time, for each token of its bucket;
        0 until enough steps have run. Below 0 if steps are faster than they were at the start."""

    def observe(self, bucket: Bucket, elapsed_ms: float) -> None:
        """Count one step that was alone on the device for `elapsed_ms`."""
        measured_ms = self._step_ms.get(bucket)
        if measured_ms is None:
            return
        excess = self._excess.setdefault(bucket, deque(maxlen=_WINDOW))
        excess.append((elapsed_ms - measured_ms) / bucket.num_tokens)
        self._num_observed += 1
        if self._num_observed % _REFRESH == 0:
            known = [median(some) for some in self._excess.values() if len(some) >= _SAMPLES_MIN]
            self.slope_ms = median(known) if known else 0.0
