"""Goal: a tile comes from the table of measured ones or from the heuristic, and a broken table is
refused. In the batch-invariant mode one tile serves every number of rows, and a row has the same
bits in every company.
Method: planted tables; kernels in the interpreter for all tokens of a case and for its first ones.
"""

import jax
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.cases import find
from pallas_kernels.mosaic import sample_tokens
from pallas_kernels.targets import H100, H200
from pallas_kernels.tiles import (
    AttentionTile,
    ProductTile,
    attention_tile,
    batch_invariant,
    parse_table,
    product_tile,
    settings,
    trial,
)
from tests.pallas_kernels.interpreted import TIME_LIMIT, run

ROW = """
[[tile]]
op = "scaled_matmul"
device = "h200"
shape = { n = 512, k = 5120, rows = 16 }
tile = { stages = 6 }
us = 1.5
date = "2026-01-01"
"""


def test_rows_are_the_smallest_size_that_holds_them() -> None:
    chosen = [product_tile(H200, "scaled_matmul", m, 640, 640).rows for m in (1, 8, 9, 100, 5000)]
    assert chosen == [8, 8, 16, 128, 128]


def test_the_table_goes_before_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_table", lambda: parse_table(ROW))
    monkeypatch.setattr(tiles, "_measured", tiles._measured.__wrapped__)
    assert product_tile(H200, "scaled_matmul", 9, 512, 5120) == ProductTile(rows=16, stages=6)
    for tile in (
        product_tile(H100, "scaled_matmul", 9, 512, 5120),
        product_tile(H200, "grouped_matmul", 9, 512, 5120),
        product_tile(H200, "scaled_matmul", 17, 512, 5120),
    ):
        assert tile.stages != 6


def test_attention_keeps_what_fits_in_flight() -> None:
    assert attention_tile(H200) == AttentionTile(2)
    with pytest.raises(ValueError, match="expected 1 or 2 stages"):
        AttentionTile(3)


def test_the_shipped_table_is_well_formed() -> None:
    assert tiles._table() == (), "no device has been measured"


def test_a_broken_table_is_refused() -> None:
    with pytest.raises(ValueError, match="tile 1 has keys .*; expected"):
        parse_table(ROW.replace('date = "2026-01-01"', ""))
    with pytest.raises(ValueError, match=r"tile 1 sets \['colour'\]; known: \['rows', 'stages'\]"):
        parse_table(ROW.replace("stages = 6", "colour = 6"))
    with pytest.raises(ValueError, match="expected rows in"):
        ProductTile(rows=24, stages=4)


def test_in_the_batch_invariant_mode_one_tile_serves_any_number_of_rows() -> None:
    before = settings()
    with batch_invariant():
        assert settings() != before
        made = {product_tile(H200, "scaled_matmul", m, 640, 640) for m in (1, 9, 64, 5000)}
    assert made == {ProductTile(rows=64, stages=2)}
    assert settings() == before


def test_a_trial_goes_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_measured", lambda *_: {"stages": 6})
    with trial({"stages": 3}):
        assert product_tile(H200, "scaled_matmul", 9, 512, 5120).stages == 3
    assert product_tile(H200, "scaled_matmul", 9, 512, 5120).stages == 6


@TIME_LIMIT
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("scaled_matmul", "odd_rows"),
        ("grouped_matmul", "few_rows"),
        ("hyper_mix", "odd_tokens"),
        # These have a block for each token, whatever the mode.
        pytest.param("sparse_attention", "two_sequences", marks=pytest.mark.slow),
        pytest.param("index_topk", "two_rows", marks=pytest.mark.slow),
        pytest.param("sample_tokens", "each_filter", marks=pytest.mark.slow),
    ],
)
def test_rows_have_the_same_bits_in_any_company(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_tokens, "LISTED", 16)
    case = next(case for case in find(op, "quick") if case.name == name)
    args, sizes = case.arguments(jax.random.key(5))
    with batch_invariant():
        whole = run(op, "interpret", args, sizes)
        alone = run(op, "interpret", case.first_tokens(args, 1), sizes)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:1], np.asarray(b))
