"""Goal: the cost of a prefill step is predicted as written, found again from measured steps, and
inverted exactly.

Method: the worked example of the model by hand, neighbours of every inverse, and samples made from
known terms, with and without noise.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.cost import (
    DecodeCost,
    DecodeSample,
    PrefillCost,
    PrefillSample,
    fit_decode_cost,
    fit_prefill_cost,
    num_pairs,
)

EXAMPLE = PrefillCost(base_ms=5.0, token_ms=0.010, pair_ms=2e-7)

terms = st.floats(1e-9, 1e3)
costs = st.builds(PrefillCost, st.floats(0, 100), terms, st.just(0.0) | st.floats(1e-12, 1e-2))


def sample(
    cost: PrefillCost, num_tokens: int, num_before: int, noise: float = 1.0
) -> PrefillSample:
    time_ms = cost.step_ms([(num_tokens, num_before)]) * noise
    return PrefillSample(num_tokens, num_pairs(num_tokens, num_before), time_ms)


def test_a_step_costs_what_its_chunks_do_and_the_base_once() -> None:
    # 5 + (1 + 0) + (2 + 2e-7 * (200 * 1000 + 20000))
    assert EXAMPLE.step_ms([(100, 0), (200, 1000)]) == pytest.approx(5 + 1.001 + 2.044)
    assert EXAMPLE.step_ms([]) == 5.0


def test_the_work_of_a_prompt_does_not_depend_on_how_it_is_cut() -> None:
    whole = EXAMPLE.chunk_ms(5000, 300)
    cut = EXAMPLE.chunk_ms(1234, 300) + EXAMPLE.chunk_ms(5000 - 1234, 1534)
    assert cut == pytest.approx(whole, rel=1e-12)


def test_the_worked_example_is_inverted() -> None:
    assert EXAMPLE.num_tokens_within(95.0, 0, 10**6) == 8736
    assert EXAMPLE.num_tokens_within(95.0, 262_144, 10**6) == 1518
    # Without pairs the linear time is all there is: 95 / 0.01.
    assert PrefillCost(5.0, 0.010, 0.0).num_tokens_within(95.0, 262_144, 10**6) in (9499, 9500)


@given(
    cost=costs,
    budget_ms=st.floats(-1, 1e5),
    num_before=st.integers(0, 2**20),
    limit=st.integers(0, 2**20),
    is_padding=st.booleans(),
)
def test_one_token_more_would_exceed_the_budget(
    cost: PrefillCost, budget_ms: float, num_before: int, limit: int, is_padding: bool
) -> None:
    num_tokens = cost.num_tokens_within(budget_ms, num_before, limit, is_padding)
    assert 0 <= num_tokens <= limit

    def time_ms(count: int) -> float:
        linear = 0 if is_padding else cost.token_ms * count
        return linear + cost.pair_ms * num_pairs(count, num_before)

    assert num_tokens == 0 or time_ms(num_tokens) <= budget_ms
    assert num_tokens == limit or time_ms(num_tokens + 1) > budget_ms or budget_ms < 0


@given(cost=costs, num_before=st.integers(0, 2**20), more=st.integers(0, 2**20))
def test_longer_contexts_and_smaller_budgets_get_no_longer_chunks(
    cost: PrefillCost, num_before: int, more: int
) -> None:
    near = cost.num_tokens_within(50.0, num_before, 10**6)
    assert cost.num_tokens_within(50.0, num_before + more, 10**6) <= near
    assert cost.num_tokens_within(40.0, num_before, 10**6) <= near


@pytest.mark.parametrize(
    "cost", [EXAMPLE, PrefillCost(0.5, 0.02, 0.0), PrefillCost(0.0, 0.0, 1e-6)]
)
def test_terms_are_found_again(cost: PrefillCost) -> None:
    samples = [sample(cost, q, h) for q in (64, 512, 2048) for h in (0, 4096, 100_000)]
    found = fit_prefill_cost(samples)
    assert found.base_ms == pytest.approx(cost.base_ms, abs=1e-6)
    assert found.token_ms == pytest.approx(cost.token_ms, rel=1e-6, abs=1e-9)
    assert found.pair_ms == pytest.approx(cost.pair_ms, rel=1e-6, abs=1e-12)


def test_noise_makes_no_term_negative_and_moves_predictions_little() -> None:
    source = random.Random(3)
    flat = PrefillCost(20.0, 0.001, 0.0)
    for _ in range(20):
        samples = [
            sample(flat, q, h, source.uniform(0.9, 1.1)) for q in (64, 512) for h in (0, 4096)
        ]
        found = fit_prefill_cost(samples)
        assert min(found.base_ms, found.token_ms, found.pair_ms) >= 0
        for each in samples:
            predicted = found.base_ms + found.token_ms * each.num_tokens
            predicted += found.pair_ms * each.num_pairs
            assert predicted == pytest.approx(each.time_ms, rel=0.25)


def test_terms_of_decode_steps_are_found_again() -> None:
    cost = DecodeCost(3.0, 0.05, 2e-6)
    samples = [
        DecodeSample(rows, rows * each, cost.step_ms(rows, rows * each))
        for rows in (1, 8, 64)
        for each in (100, 50_000)
    ]
    found = fit_decode_cost(samples)
    assert found.base_ms == pytest.approx(3.0) and found.row_ms == pytest.approx(0.05)
    assert found.context_ms == pytest.approx(2e-6)
    with pytest.raises(ValueError, match="expected some, all above 0"):
        fit_decode_cost([])


def test_samples_of_one_kind_give_one_term() -> None:
    found = fit_prefill_cost([PrefillSample(64, 2048.0, 4.0)] * 3)
    assert (found.base_ms, found.token_ms, found.pair_ms) == pytest.approx((4.0, 0.0, 0.0))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected numbers of 0 or more"):
        PrefillCost(1.0, -0.1, 0.0)
    with pytest.raises(ValueError, match="one above 0"):
        PrefillCost(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected some, all above 0"):
        fit_prefill_cost([])
    with pytest.raises(ValueError, match="all above 0"):
        fit_prefill_cost([PrefillSample(1, 0.5, 0.0)])
