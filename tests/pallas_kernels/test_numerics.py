"""Goal: a comparison passes what is near enough and names the first value that is not.
Method: arrays with one planted difference.
"""

import numpy as np
import pytest

from pallas_kernels import numerics

VALUES = np.linspace(-2.0, 2.0, 12).reshape(3, 4)


def test_near_enough_passes_and_the_first_difference_is_named() -> None:
    numerics.check_close("scaled_matmul", VALUES + 1e-6, VALUES)
    wrong = VALUES.copy()
    wrong[1, 2], wrong[2, 0] = 9.0, 7.0
    with pytest.raises(AssertionError, match=r"scaled_matmul: 2 of 12 .* first at \(1, 2\): 9.0"):
        numerics.check_close("scaled_matmul", wrong, VALUES)


def test_what_is_not_a_number_is_wrong_and_an_expected_infinity_is_not() -> None:
    hole = VALUES.copy()
    hole[0, 0] = np.nan
    assert numerics.error(hole, VALUES) == float("inf")
    with pytest.raises(AssertionError, match=r"first at \(0, 0\): nan"):
        numerics.check_close("scaled_matmul", hole, VALUES)
    hole[0, 0] = np.inf
    assert numerics.error(hole, hole) == 0.0


def test_shapes_must_agree_and_nothing_equals_nothing() -> None:
    assert numerics.error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    with pytest.raises(ValueError, match=r"result has shape \(3,\); expected \(3, 1\)"):
        numerics.error(np.zeros(3), np.zeros((3, 1)))
