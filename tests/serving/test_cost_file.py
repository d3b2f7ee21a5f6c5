"""Goal: costs are read as they were written, and what is none is refused by name. Method: files."""

from pathlib import Path

import pytest

from serving.core.cost import DecodeCost, PrefillCost
from serving.cost_file import read_cost_file, write_cost_file
from sharding.config_file import ConfigError

PREFILL, DECODE = PrefillCost(5.0, 0.0195, 1.4e-8), DecodeCost(6.0, 0.243, 1e-7)


def test_costs_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "cost.toml"
    write_cost_file(path, PREFILL, DECODE, "made up")
    assert path.read_text().startswith("# made up\n")
    costs = read_cost_file(path)
    assert costs.prefill_cost == PREFILL
    assert costs.changes() == (
        "prefill.base_ms=5.0",
        "prefill.token_ms=0.0195",
        "prefill.pair_ms=1.4e-08",
        "decode.base_ms=6.0",
        "decode.row_ms=0.243",
        "decode.context_ms=1e-07",
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "token_ms = 0.0195",
            "token_ms = -1.0",
            "prefill: token_ms: received -1.0",
        ),
        ("row_ms = 0.243", "row_ms = nan", "decode: row_ms: received nan"),
        ("row_ms = 0.243", "", "decode.row_ms: missing"),
        ("[decode]", "[decoder]", "decoder: unknown key"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "cost.toml"
    write_cost_file(path, PREFILL, DECODE, "made up")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=expected):
        read_cost_file(path)


def test_steps_that_cost_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.toml"
    write_cost_file(path, PREFILL, DecodeCost(0.0, 0.0, 0.0), "made up")
    with pytest.raises(ConfigError, match="decode: base_ms: received 0; expected one term above"):
        read_cost_file(path)
