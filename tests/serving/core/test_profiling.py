"""Goal: what comes of a request for a trace is a value, so that it can be carried and compared.

Method: both outcomes made twice.
"""

import dataclasses

import pytest

from serving.core.profiling import ProfileCapture, ProfileProblem, ProfileRefusal


def test_outcomes_are_values() -> None:
    assert ProfileCapture("here", (3, 4)) == ProfileCapture("here", (3, 4))
    refusal = ProfileRefusal(ProfileProblem.BUSY, "later")
    assert refusal != ProfileRefusal(ProfileProblem.OFF, "later")
    with pytest.raises(dataclasses.FrozenInstanceError):
        refusal.detail = "now"  # type: ignore
