"""The load sets are the published ones: checksums of their first three steps, made with the program
that the published figures come from."""

import numpy as np
import pytest

from scripts.eplb import load_sets

_CHECKSUMS = {
    "zipf_0.6": "34421dd5b92598b3",
    "zipf_0.9": "f5b82a3ec04cca38",
    "zipf_1.2": "00c7b8c4c6a1dae6",
    "drift_slow": "4aac8f4d380b019a",
    "drift_fast": "a6b841dd930c6033",
    "bursts": "733805751cabf97d",
    "bursts_long": "ce424611929a431d",
    "drift_gentle": "86b9d967a4a94503",
}


@pytest.mark.parametrize("name", load_sets.NAMES)
def test_the_first_steps_are_the_published_ones(name: str) -> None:
    assert load_sets.checksum(np.stack(list(load_sets.loads(name, 3)))) == _CHECKSUMS[name]


def test_no_expert_is_chosen_twice_by_a_token() -> None:
    popularity = np.array([[1000.0, 900.0, *[1.0] * 10]])
    chance = load_sets.choice_probability(popularity)
    assert chance[0, :2].tolist() == [1.0, 1.0]
    assert chance.sum() == pytest.approx(load_sets.NUM_CHOSEN)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'zipf_2' is unknown; expected one of zipf_0\.6"):
        next(load_sets.loads("zipf_2", 1))
