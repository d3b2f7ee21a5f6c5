"""Goal: a tile comes from the table of measured ones or from the heuristic, and a broken table is
refused.
Method: planted tables.
"""

import pytest

from pallas_kernels import tiles
from pallas_kernels.targets import H100, H200
from pallas_kernels.tiles import (
    AttentionTile,
    ProductTile,
    attention_tile,
    parse_table,
    product_tile,
)

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
