"""Goal: bytes take their time, and those behind others wait.
Method: one link by hand.
"""

import pytest

from serving.sim.links import Link


def test_bytes_pass_one_after_another() -> None:
    link = Link(2.0)
    assert link.carry(100, 50) == 125
    assert link.carry(110, 10) == 130
    assert link.carry(500, 10) == 505


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="gb_s is 0; expected a number above 0"):
        Link(0)
