"""Goal: a stored prompt is used as far as it is stored, and what storage takes for a token of the
released model is worked out from its layout. Method: the part of the benchmark with one short
prompt and one round.
"""

import pytest

from scripts.bench_kv import FIGURES, run_part
from scripts.kv_bench import swap_in


def test_bytes_for_a_token_of_the_released_model() -> None:
    found = swap_in.stored_bytes_per_token()
    # 113,920 bytes of a block and 80 of its header.
    assert found["stored_bytes_per_token_real"] == round(114_000 / 128, 1)
    with_states = found["stored_bytes_per_token_real_with_states"]
    assert with_states["1000"] > 3000 and 950 < with_states["32000"] < 1000


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"1": 2.0, "2": 1.0, "4": 0.5, "8": 0.2}, 4),
        ({"1": 0.9, "2": 1.1, "4": 0.5}, 4),
        ({"1": 0.9}, 1),
        ({"1": 1.2}, None),
    ],
)
def test_the_crossover_is_where_stored_prompts_stay_faster(
    ratios: dict[str, float], expected: int | None
) -> None:
    assert swap_in.crossover(ratios) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_in, "LENGTHS", (300,))
    monkeypatch.setattr(swap_in, "_ROUNDS", 1)
    found = run_part("swap_in")
    assert set(FIGURES["swap_in"]) <= set(found)
    assert found["ttft_hit_over_cold"].keys() == {"300"}
    assert 0 <= found["swap_in_hidden"] <= 1
