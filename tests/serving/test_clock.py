"""Goal: seconds and nanoseconds convert without loss at the scales that services use.

Method: values worked out by hand, and a round trip.
"""

from serving.clock import ns_of_s, s_of_ns


def test_seconds_to_nanoseconds() -> None:
    assert ns_of_s(0.25) == 250_000_000
    assert ns_of_s(120) == 120_000_000_000
    # 0.1 has no exact binary form; the result is rounded, not cut.
    assert ns_of_s(0.1) == 100_000_000


def test_round_trip() -> None:
    assert s_of_ns(ns_of_s(1.5)) == 1.5
