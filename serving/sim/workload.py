"""A trace as the load of a fleet: laid over itself until it is as dense as wanted.

A trace of one cluster is far too thin for a large fleet. Playing it faster would shorten the times
after which prefixes are used again. Instead, copies of it run at once, at its own speed but for
rounding. Each copy has users of its own (its prefixes are its own) and begins at another place of
the trace, with everything stored that came before that place; where the trace ends it begins anew,
with other users. So every request finds what it would find in the trace, however short the run.

*Why ties are spread*: published times are rounded, to whole seconds and more, so that requests seem
to come in bursts. Requests with one time stamp are spread evenly up to the next one.
"""

from dataclasses import dataclass

import numpy as np

from serving.sim.traces import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The requests of a run, by time of arrival.

    Attributes:
        trace: its rows, to which `rows` point.
        duration_s: length of the run.
        arrivals_ns: [M] int64, ascending.
        rows: [M] int64, row of the trace.
        groups: [M] int64, whose prefixes a request may share: copy `c` of the trace is group `c`,
            and `c + num_copies` after its end.
        first_rows: [num_copies] int64, rows at which the copies begin.
    """

    trace: Trace
    duration_s: float
    arrivals_ns: np.ndarray
    rows: np.ndarray
    groups: np.ndarray
    first_rows: np.ndarray

    def __len__(self) -> int:
        return len(self.arrivals_ns)

    @property
    def num_groups(self) -> int:
        """Groups of requests that share nothing with each other."""
        return 2 * len(self.first_rows)

    def known_blocks(self, group: int) -> np.ndarray:
        """[blocks of the trace] bool: what the group has used before the run begins."""
        copies = len(self.first_rows)
        first_row = self.first_rows[group] if group < copies else 0
        return self.trace.first_rows < first_row

    @property
    def rate_rps(self) -> float:
        """Requests a second."""
        return len(self) / self.duration_s


def make_workload(
    trace: Trace,
    rng: np.random.Generator,
    rate_rps: float | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Copies of a trace that together make a rate.

    Args:
        rng: of the places at which the copies begin; a single copy begins at its beginning.
        rate_rps: requests a second; that of the trace if None.
        duration_s: length of the run; that of the trace if None.

    Raises:
        ValueError: a rate that is not above 0, or a length that is not or is above the trace's.
    """
    num_rows, own_rps = len(trace.rows), len(trace.rows) / trace.duration_s
    rate = own_rps if rate_rps is None else rate_rps
    if not 0 < rate < np.inf:
        raise ValueError(f"rate: received {rate}; expected requests a second, above 0")
    num_copies = max(round(rate / own_rps), 1)
    # The rest of the rate, which is no whole number of copies, is made by their speed.
    length_s = num_copies * num_rows / rate
    run_s = length_s if duration_s is None else duration_s
    if not 0 < run_s <= length_s:
        raise ValueError(
            f"seconds: received {run_s}; expected a number above 0 and at most {length_s:.0f}, "
            "what the trace lasts at this rate"
        )
    places = _spread_ties(trace) * length_s / trace.duration_s
    starts = rng.uniform(0.0, length_s, num_copies) if num_copies > 1 else np.zeros(1)
    first_rows = np.searchsorted(places, starts)
    times: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    groups: list[np.ndarray] = []
    for copy in range(num_copies):
        end = starts[copy] + run_s
        here = np.arange(first_rows[copy], np.searchsorted(places, end))
        again = np.arange(np.searchsorted(places, end - length_s))
        times += [places[here] - starts[copy], places[again] + length_s - starts[copy]]
        rows += [here, again]
        groups += [np.full(len(here), copy), np.full(len(again), copy + num_copies)]
    arrivals = np.round(np.concatenate(times) * 1e9).astype(np.int64)
    if not len(arrivals):
        raise ValueError(f"seconds: received {run_s}; expected a time in which a request comes")
    order = np.argsort(arrivals, kind="stable")
    return Workload(
        trace,
        run_s,
        arrivals[order],
        np.concatenate(rows)[order],
        np.concatenate(groups)[order],
        first_rows,
    )


def _spread_ties(trace: Trace) -> np.ndarray:
    """[rows] seconds of arrival, those of one time spread evenly up to the next time."""
    times = np.array([row.arrival_s for row in trace.rows])
    firsts = np.searchsorted(times, times, "left")
    ends = np.searchsorted(times, times, "right")
    later = np.append(times, trace.duration_s)[ends]
    return times + (later - times) * (np.arange(len(times)) - firsts) / (ends - firsts)
