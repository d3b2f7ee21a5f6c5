"""Scoring: figures of loads whose balance is known, and the balancer's delay of two steps."""

import numpy as np
import pytest

from scripts.eplb.replay import Sizes, score

_SIZES = Sizes(num_devices=4, num_redundant=4, copies_per_step=4)


def test_even_loads_score_one_and_move_nothing() -> None:
    result = score([np.full((1, 8), 100)] * 6, 6, _SIZES)
    assert result.moe_lb_none == pytest.approx(1.0)
    assert result.moe_lb_ours == pytest.approx(1.0, abs=0.02)
    assert result.copies_moved_per_step_max == 0


def test_a_hot_expert_is_worked_off() -> None:
    hot = np.array([[800, 100, 100, 100, 100, 100, 100, 100]])
    result = score([hot] * 40, 40, _SIZES)
    # The device of expert 0 has 900 of 1,500 tokens, a mean of 375.
    assert result.moe_lb_none == pytest.approx(2.4)
    assert result.moe_lb_ours < 1.1
    assert 0 < result.copies_moved_per_step_max <= 4


def test_what_is_planned_after_a_step_is_in_use_two_steps_later() -> None:
    hot = np.array([[800, 100, 100, 100, 100, 100, 100, 100]])
    # Scored are the last two steps of four: the first of them runs with the plan after step 0.
    late = score([hot] * 4, 4, _SIZES).moe_lb_ours
    # Of two steps only the second is scored, with the placement of the start.
    start = score([hot] * 2, 2, _SIZES).moe_lb_ours
    assert late < start
