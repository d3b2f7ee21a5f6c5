"""Goal: the status of several engines counts all they hold. Method: two statuses by hand."""

from dataclasses import replace

from serving.core.engine_status import EngineStatus, total_status


def test_everything_is_a_sum_but_the_slope() -> None:
    one = EngineStatus(1, 2, 3, 4, 50, 6, 7, 8, 9, 10, 11, 12, (5, 4), (3, 2), 0.5)
    two = EngineStatus(10, 20, 30, 2, 50, 60, 7, 80, 90, 100, 110, 120, (1, 1), (1, 0), 0.25)
    total = total_status([one, two])
    assert total == EngineStatus(
        11, 22, 33, 6, 100, 66, 14, 88, 99, 110, 121, 132, (6, 5), (4, 2), 0.5
    )
    assert total.num_running == 55


def test_totals_are_sums() -> None:
    empty = total_status([])
    assert empty.num_slots == 0 and empty.num_verified == () and empty.slope_ms == 0.0
    one = replace(empty, num_slots=3, num_verified=(5, 2), num_accepted=(4, 1), slope_ms=0.5)
    assert total_status([one, one]) == replace(
        one, num_slots=6, num_verified=(10, 4), num_accepted=(8, 2)
    )
