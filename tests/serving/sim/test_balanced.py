"""Goal: the bound is the work over the workers, whichever pool is slower.
Method: round numbers by hand; no run beats it.
"""

import numpy as np
import pytest

from serving.sim.balanced import BalancedBound, best_rows
from serving.sim.options import DecodeOptions, FleetOptions, PrefillOptions, TargetOptions

OPTIONS = FleetOptions(
    PrefillOptions(100.0, 1.0, 0.001, step_ms=200.0),
    DecodeOptions(10.0, 1.0, 0.01, tokens_per_step=2.0, requests_max=8),
    "2p4d",
    target=TargetOptions(itl_ms=10.0),
)


def test_prefill_is_the_work_in_full_steps() -> None:
    bound = BalancedBound.of(OPTIONS, np.array([1000, 100]), np.array([900, 0]), np.ones(2))
    # 200 tokens, 100 * 900 + 5,000 and 5,000 pairs; half of a step is its base.
    assert bound.prefill_rps == pytest.approx(2 / ((200 + 0.001 * 100_000) * 2 / 1e3 / 2))
    assert bound.decode_rps == float("inf")
    assert bound.rps == bound.prefill_rps


def test_decode_runs_as_many_as_the_service_level_allows() -> None:
    # 20 ms a step leave 10 for rows of 1 ms and 100 tokens of 0.01 ms: five rows.
    assert best_rows(OPTIONS.decode, 100, 10.0) == (5, 20.0)
    assert best_rows(OPTIONS.decode, 100, 1.0) == (1, 12.0)
    assert best_rows(OPTIONS.decode, 0, 1e6) == (8, 18.0)
    bound = BalancedBound.of(OPTIONS, np.array([99]), np.array([98]), np.array([21]))
    context = 99 + 21 / 2
    rows, step_ms = best_rows(OPTIONS.decode, context, 10.0)
    assert bound.decode_rps == pytest.approx(4 * rows / (10 * step_ms / 1e3))


def test_memory_bounds_the_rows() -> None:
    assert best_rows(DecodeOptions(1.0, 0.0, 0.0, context_max=1000), 300, 50.0) == (3, 1.0)
