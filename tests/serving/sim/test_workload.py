"""Goal: a scaled trace has the wanted rate, the lengths of the trace and its chances of a hit.
Method: the trace itself at scale one; many copies against counts over the whole trace.
"""

import numpy as np
import pytest

from serving.sim.traces import read_trace
from serving.sim.workload import make_workload
from tests.serving.sim.small_fleet import small_trace


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_at_its_own_rate_it_is_the_trace() -> None:
    trace = small_trace()
    workload = make_workload(trace, rng())
    np.testing.assert_array_equal(workload.rows, np.arange(len(trace.rows)))
    assert not workload.groups.any()
    assert workload.duration_s == pytest.approx(trace.duration_s)
    assert not workload.known_blocks(0).any()


def test_ties_are_spread_up_to_the_next_time() -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-01-01 00:00:0{second},1,1" for second in (0, 0, 2, 2)]
    workload = make_workload(read_trace(lines, "a"), rng())
    np.testing.assert_allclose(workload.arrivals_ns / 1e9, [0, 1, 2, 2 + (8 / 3 - 2) / 2])


def test_a_whole_run_of_copies_holds_every_row_as_often() -> None:
    trace = small_trace()
    workload = make_workload(trace, rng(), rate_rps=10.3 * len(trace.rows) / trace.duration_s)
    assert len(workload) == 10 * len(trace.rows)
    assert workload.duration_s == pytest.approx(trace.duration_s * 10 / 10.3)
    assert (np.bincount(workload.rows) == 10).all()
    assert (np.diff(workload.arrivals_ns) >= 0).all()
    assert workload.arrivals_ns[0] >= 0
    assert workload.arrivals_ns[-1] < workload.duration_s * 1e9


def test_every_request_finds_what_it_would_find_in_the_trace() -> None:
    trace = small_trace()
    workload = make_workload(trace, rng(), rate_rps=40.0, duration_s=60.0)
    assert workload.rate_rps == pytest.approx(40, rel=0.2)
    known = [workload.known_blocks(group) for group in range(workload.num_groups)]
    assert any(some.any() for some in known)
    for row, group in zip(workload.rows.tolist(), workload.groups.tolist(), strict=True):
        blocks = trace.rows[row].blocks
        is_known = known[group][list(blocks)]
        assert np.count_nonzero(np.cumprod(is_known)) == trace.best_depths[row]
        known[group][list(blocks)] = True


def test_copies_do_not_begin_together() -> None:
    workload = make_workload(small_trace(), rng(), rate_rps=60.0)
    assert len(set(workload.first_rows.tolist())) > len(workload.first_rows) // 2


@pytest.mark.parametrize(
    ("rate", "duration", "expected"),
    [
        (0.0, None, "rate: received 0"),
        (float("nan"), None, "rate: received nan"),
        (None, 0.0, "seconds: received 0"),
        (None, 1e9, "seconds: received 1000000000.0; expected a number above 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused(
    rate: float | None, duration: float | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        make_workload(small_trace(), rng(), rate, duration)


def test_a_run_without_requests_is_refused() -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-01-01 00:00:00,1,1"]
    trace = read_trace(lines, "a")
    assert len(make_workload(trace, rng())) == 1
    with pytest.raises(ValueError, match="expected a time in which a request comes"):
        make_workload(trace, np.random.default_rng(0), rate_rps=2.0, duration_s=1e-6)
