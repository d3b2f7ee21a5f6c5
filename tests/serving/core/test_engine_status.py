"""Goal: the status of several engines counts all they hold. Method: two statuses by hand."""

from serving.core.engine_status import EngineStatus, total_status


def test_everything_is_a_sum_but_the_slope() -> None:
    one = EngineStatus(1, 2, 3, 4, 50, 6, 7, 8, 9, 10, 11, 12, (5, 4), (3, 2), 0.5)
    two = EngineStatus(10, 20, 30, 2, 50, 60, 7, 80, 90, 100, 110, 120, (1, 1), (1, 0), 0.25)
    total = total_status([one, two], num_steps=17, in_flight=2)
    assert total == EngineStatus(
        11, 22, 33, 2, 100, 66, 14, 88, 17, 110, 121, 132, (6, 5), (4, 2), 0.5
    )
    assert total.num_running == 55
