"""Goal: the correction follows how much longer steps take, and nothing single moves it.

Method: steps of made-up times.
"""

import pytest

from serving.core.buckets import Bucket
from serving.core.cost_correction import CostCorrection

SMALL, MIDDLE, LARGE = Bucket(4, 4, 1), Bucket(4, 8, 1), Bucket(4, 24, 1)
MEASURED = {SMALL: 2.0, MIDDLE: 3.0, LARGE: 5.0}


def observed(correction: CostCorrection, bucket: Bucket, slope_ms: float, times: int) -> None:
    for _ in range(times):
        correction.observe(bucket, MEASURED[bucket] + slope_ms * bucket.num_tokens)


def test_it_is_the_excess_per_token_once_there_are_enough_steps() -> None:
    correction = CostCorrection(MEASURED)
    observed(correction, LARGE, 0.25, 9)
    assert correction.slope_ms == 0.0
    observed(correction, LARGE, 0.25, 7)
    assert correction.slope_ms == pytest.approx(0.25)
    observed(correction, LARGE, -0.125, 300)
    assert correction.slope_ms == pytest.approx(-0.125), "what is long ago is forgotten"


def test_a_slow_step_and_an_odd_bucket_do_not_count() -> None:
    correction = CostCorrection(MEASURED)
    for bucket, slope_ms in ((SMALL, 0.5), (MIDDLE, 0.5), (LARGE, 9.0)):
        observed(correction, bucket, slope_ms, 20)
        correction.observe(bucket, 1e6)
    observed(correction, SMALL, 0.5, 1)
    assert correction.slope_ms == pytest.approx(0.5)


def test_buckets_without_a_measured_time_are_passed_over() -> None:
    correction = CostCorrection({})
    for _ in range(50):
        correction.observe(SMALL, 7.0)
    assert correction.slope_ms == 0.0
