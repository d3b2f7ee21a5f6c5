"""Goal: latencies land in the right buckets and counts add up.

Method: observations at, below and above bounds, checked against sums done by hand.
"""

from serving.observe import (
    LATENCY_BOUNDS_S,
    OTHER_TENANTS,
    TENANTS_MAX,
    Histogram,
    ServiceMetrics,
)


def test_observation_on_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [(1.0, 2), (2.0, 4), (float("inf"), 5)]
    assert histogram.total == 8.0 and histogram.count == 5


def test_weighted_observation() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, times=6)
    assert histogram.counts == [6, 0] and histogram.total == 3.0


def test_bounds_ascend() -> None:
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))


def test_finished_requests_are_counted_by_reason() -> None:
    metrics = ServiceMetrics()
    for reason in ("stop", "abort", "stop"):
        metrics.add_finished(reason)
    assert metrics.num_finished == {"stop": 2, "abort": 1}
    assert ServiceMetrics().num_finished == {}, "services must not share counters"


def test_tenants_beyond_the_first_many_are_counted_together() -> None:
    metrics = ServiceMetrics()
    for index in range(TENANTS_MAX + 5):
        metrics.tenant(f"t{index}").num_calls += 1
    assert len(metrics.tenants) == TENANTS_MAX + 1
    assert metrics.tenant("t0").num_calls == 1
    assert metrics.tenant("new") is metrics.tenants[OTHER_TENANTS]
    assert metrics.tenants[OTHER_TENANTS].num_calls == 5
