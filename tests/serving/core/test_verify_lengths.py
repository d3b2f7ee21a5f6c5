"""Goal: rows go where they make the most text per time, and no draft's fate depends on a later one.
Method: sharing against recorded cases of another implementation, a worked example of the total, a
search over all ways to share, and input that contradicts itself.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.verify_lengths import StepCost, share_rows, survival_rates, total_rows

A, B, C = (0.9, 0.8, 0.7, 0.6, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1), (0.99, 0.98, 0.97, 0.96, 0.95)
COST = StepCost((1, 2, 4, 8, 16, 24), (3.0, 3.0, 3.1, 3.3, 4.0, 5.2))
FIVE = np.full(3, 5)
KNOWN = np.ones(3, bool)


def rates_of(*confidences: tuple[float, ...]) -> np.ndarray:
    all_known, all_drafts = np.ones(len(confidences), bool), np.full(len(confidences), 5)
    return survival_rates(np.array(confidences), all_known, all_drafts)


def test_sharing_equals_the_recorded_cases(golden: Path) -> None:
    cases = json.loads((golden / "verify_schedule.json").read_text())
    assert len(cases) == 6
    for case in cases:
        before, remap = np.array(case["rates"]), np.array(case["remap"])
        num_drafts = np.full(len(remap), before.shape[1])
        # A sequence without a row in the round before has rates of zero, and still has drafts.
        confidences = np.where(remap[:, None] < 0, 0.0, before[remap])
        rates = survival_rates(confidences, np.ones(len(remap), bool), num_drafts)
        rows = share_rows(rates, num_drafts, case["total_q"])
        np.testing.assert_array_equal(rows, case["seqlens_q"])
        assert rows.sum() == case["total_q"]


def test_total_of_the_worked_example() -> None:
    rates = rates_of(A, B, C)
    expected = {3: 0.96774, 4: 1.28710, 8: 2.33477, 9: 2.14076, 16: 2.75016, 18: 2.11804}
    gains = np.concatenate(([0.0], np.cumsum(np.sort(rates.reshape(-1))[::-1])))
    for total, tokens_per_ms in expected.items():
        tokens = 3 + gains[total - 3]
        assert tokens / COST.time_ms(total) == pytest.approx(tokens_per_ms, abs=1e-5)
    total = total_rows(rates, FIVE, COST)
    assert total == 16
    np.testing.assert_array_equal(share_rows(rates, FIVE, total), [6, 4, 6])
    np.testing.assert_array_equal(share_rows(rates, FIVE, 9), [2, 1, 6])
    fresh = rates_of(C, (0.0,) * 5, A)
    np.testing.assert_array_equal(share_rows(fresh, FIVE, 10), [6, 1, 3])


def test_a_local_best_at_an_edge_does_not_stop_the_search() -> None:
    # Eight rows are better than nine, but sixteen are better than both.
    assert total_rows(rates_of(A, B, C), FIVE, COST) == 16
    short = StepCost((1, 2, 4, 8), (3.0, 3.0, 3.1, 3.3))
    assert total_rows(rates_of(A, B, C), FIVE, short) == 8


def test_equal_prospects_take_the_smaller_step() -> None:
    # One certain draft doubles the tokens and the time.
    certain = np.array([[1.0]])
    assert total_rows(certain, np.array([1]), StepCost((1, 2), (1.0, 2.0))) == 1
    assert total_rows(certain, np.array([1]), StepCost((1, 2), (1.0, 1.9))) == 2


@given(
    confidences=st.lists(
        st.lists(st.sampled_from((0.0, 0.3, 0.9, 1.0)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    stairs=st.dictionaries(st.integers(1, 20), st.sampled_from((1.0, 1.5, 2.0, 4.0)), max_size=5),
    slope_ms=st.sampled_from((0.0, 0.1)),
)
def test_the_total_is_the_best_of_all(
    confidences: list[list[float]], stairs: dict[int, float], slope_ms: float
) -> None:
    stairs[99] = 5.0
    sizes = tuple(sorted(size for size in stairs if size >= len(confidences)))
    cost = StepCost(sizes, tuple(stairs[size] for size in sizes), slope_ms)
    num_drafts = np.full(len(confidences), 3)
    rates = survival_rates(np.array(confidences), np.ones(len(confidences), bool), num_drafts)
    gains = np.cumsum(np.sort(rates.reshape(-1))[::-1])
    tokens = len(rates) + np.concatenate(([0.0], gains))
    times = [cost.time_ms(len(rates) + count) for count in range(len(tokens))]
    per_ms = tokens / np.array(times)
    total = total_rows(rates, num_drafts, cost)
    assert per_ms[total - len(rates)] == pytest.approx(per_ms.max())
    if list(cost.times_ms) == sorted(cost.times_ms):
        assert total == len(rates) + int(np.argmax(per_ms > per_ms.max() - 1e-9))


def test_slope_and_sampling_change_the_choice() -> None:
    rates = rates_of((0.8, 0.5, 0.5, 0.5, 0.5))
    flat = StepCost((1, 2, 3, 6), (1.0, 1.0, 1.0, 1.0))
    one = np.array([5])
    assert total_rows(rates, one, flat) == 6
    assert total_rows(rates, one, StepCost(flat.sizes, flat.times_ms, slope_ms=1.0)) == 2
    assert total_rows(rates, one, StepCost(flat.sizes, flat.times_ms, slope_ms=9.0)) == 1
    assert total_rows(rates, one, StepCost(flat.sizes, flat.times_ms, slope_ms=-1.0)) == 6
    # What a step costs whatever its size makes a longer one pay.
    dear = StepCost((1, 6), (1.0, 3.0))
    assert total_rows(rates, one, dear) == 1
    assert total_rows(rates, one, StepCost(dear.sizes, dear.times_ms, sampling_ms=9.0)) == 6


def test_without_a_measured_cost_everything_is_verified() -> None:
    num_drafts = np.array([5, 0, 2])
    total = total_rows(rates_of(A, B, C), num_drafts, None)
    assert total == 3 + 7
    np.testing.assert_array_equal(share_rows(rates_of(A, B, C), num_drafts, total), [6, 1, 3])


def test_drafts_that_a_sequence_lacks_get_no_row() -> None:
    num_drafts = np.array([1, 5, 0])
    rates = rates_of(A, B, C)
    np.testing.assert_array_equal(share_rows(rates, num_drafts, 18), [2, 6, 1])
    assert total_rows(rates, num_drafts, COST) <= 9


def test_unknown_rates_count_as_certain_where_there_are_drafts() -> None:
    known = np.array([True, False, False])
    rates = survival_rates(np.array([A, B, C]), known, np.array([5, 2, 0]))
    np.testing.assert_allclose(rates[0], np.cumprod(A))
    np.testing.assert_array_equal(rates[1:], [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_no_sequence_and_no_draft_at_all() -> None:
    empty, none = np.zeros((0, 5)), np.zeros(0, int)
    assert share_rows(empty, none, 0).tolist() == []
    assert total_rows(empty, none, COST) == 0
    no_drafts = np.zeros((2, 0))
    np.testing.assert_array_equal(share_rows(no_drafts, np.zeros(2, int), 5), [1, 1])


@given(
    st.lists(st.lists(st.sampled_from((0.1, 0.5, 0.9, 1.0)), min_size=2, max_size=2), max_size=3),
    st.integers(0, 6),
)
def test_sharing_is_the_best_of_all_ways(confidences: list[list[float]], num_extra: int) -> None:
    num_sequences = len(confidences)
    table = np.array(confidences).reshape(num_sequences, 2)
    num_drafts = np.full(num_sequences, 2)
    rates = survival_rates(table, np.ones(num_sequences, bool), num_drafts)
    rows = share_rows(rates, num_drafts, num_sequences + num_extra)
    spent = min(num_extra, 2 * num_sequences)
    assert rows.sum() == num_sequences + spent
    gain = sum(rates[s, : n - 1].sum() for s, n in enumerate(rows))
    ways = itertools.product(range(3), repeat=num_sequences)
    best = max(
        sum(rates[s, :n].sum() for s, n in enumerate(way)) for way in ways if sum(way) == spent
    )
    assert gain == pytest.approx(best)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(0, 4))
def test_a_draft_is_not_judged_by_later_ones(changed: list[float], number: int) -> None:
    before = np.array([A, B, C])
    after = before.copy()
    after[0, number + 1 :] = changed[number + 1 :]
    drafts = [
        share_rows(survival_rates(some, KNOWN, FIVE), FIVE, 9)[0] - 1 for some in (before, after)
    ]
    # Draft `number` is verified in both or in neither.
    assert (drafts[0] > number) == (drafts[1] > number)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="total is 2; expected at least 3"):
        share_rows(rates_of(A, B, C), FIVE, 2)
    with pytest.raises(ValueError, match="3 sequences; expected at most 2"):
        total_rows(rates_of(A, B, C), FIVE, StepCost((1, 2), (1.0, 1.0)))
    with pytest.raises(ValueError, match="2 sizes and 1 times"):
        StepCost((1, 2), (1.0,))
    for sizes in ((), (2, 2), (0, 1)):
        with pytest.raises(ValueError, match="expected ascending numbers"):
            StepCost(sizes, tuple(1.0 for _ in sizes))
    with pytest.raises(ValueError, match="times_ms"):
        StepCost((1,), (0.0,))
    with pytest.raises(ValueError, match="sampling_ms is -1"):
        StepCost((1,), (1.0,), sampling_ms=-1)
