"""Goal: images get the published sizes and token spans, and no chunk cuts one. Method: the golden
sizes of independent implementations, spans widened by hand, and random sizes against the limits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.image_layout import (
    ImageGeometry,
    insert_spans,
    next_stop,
    plan_grid,
    whole_images_end,
)
from serving.core.request import RequestImage

RELEASED = ImageGeometry(9, 14, 3, 1024, 295936)
TINY = ImageGeometry(9, 14, 3, 64, 1764)


def _image(start: int, num_tokens: int) -> RequestImage:
    return RequestImage(start, num_tokens, 1, 1, b"", np.zeros((1, 588), np.uint8))


def test_sizes_equal_the_golden_ones(golden: Path) -> None:
    cases = json.loads((golden / "image_grid_cases.json").read_text())
    config = cases["config"]
    assert ImageGeometry(9, **config) == RELEASED
    assert len(cases["cases"]) == 60
    for case in cases["cases"]:
        grid = plan_grid(RELEASED, case["width"], case["height"])
        assert (grid.width, grid.height) == (case["target_width"], case["target_height"]), case
        assert (grid.patch_cols, grid.patch_rows) == (case["patch_cols"], case["patch_rows"])
        assert (grid.cell_cols, grid.cell_rows) == (case["cell_cols"], case["cell_rows"])
        assert grid.num_tokens == case["tokens"]
        assert not grid.is_stretched


def test_sizes_of_another_geometry_equal_the_golden_ones(golden: Path) -> None:
    data = np.load(golden / "image_patches.npz")
    names = [name.removeprefix("rgb_") for name in data.files if name.startswith("rgb_")]
    assert len(names) == 3
    for name in names:
        height, width, _ = data[f"rgb_{name}"].shape
        grid = plan_grid(TINY, width, height)
        assert [grid.patch_rows, grid.patch_cols] == data[f"grid_rows_cols_{name}"].tolist()


@given(
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.sampled_from([RELEASED, TINY, ImageGeometry(9, 14, 3, 4, 1)]),
    st.booleans(),
)
def test_every_size_stays_within_the_limit(
    width: int, height: int, geometry: ImageGeometry, is_low_detail: bool
) -> None:
    grid = plan_grid(geometry, width, height, is_low_detail=is_low_detail)
    assert 4 <= grid.num_tokens <= geometry.max_image_tokens
    assert (grid.width, grid.height) == (14 * grid.patch_cols, 14 * grid.patch_rows)
    assert grid.cell_rows == -(-grid.patch_rows // 3)
    assert grid.cell_cols == -(-grid.patch_cols // 3)


def test_low_detail_shrinks_first() -> None:
    # 2000 x 1000 becomes 512 x 256, which is enlarged to the least number of pixels.
    low = plan_grid(RELEASED, 2000, 1000, is_low_detail=True)
    assert (low.width, low.height, low.num_tokens) == (770, 392, 202)
    assert plan_grid(RELEASED, 2000, 1000).num_tokens == 992
    assert plan_grid(RELEASED, 512, 300, is_low_detail=True) == plan_grid(RELEASED, 512, 300)


def test_a_greatest_shape_stretches_wider_images() -> None:
    geometry = ImageGeometry(9, 14, 3, 1024, 1, 2.0)
    clipped = plan_grid(geometry, 800, 100)
    assert clipped.is_stretched
    assert (clipped.width, clipped.height) == (210, 112)
    assert not plan_grid(geometry, 199, 100).is_stretched
    assert not plan_grid(geometry, 100, 800).is_stretched


def test_placeholders_become_spans() -> None:
    assert insert_spans([1, 9, 2, 9], TINY, [3, 4]) == ((1, 9, 9, 9, 2, 9, 9, 9, 9), [1, 5])
    assert insert_spans([1, 2], TINY, []) == ((1, 2), [])
    for lengths in ([], [4], [4, 4, 4]):
        with pytest.raises(ValueError, match=f"2 placeholders for {len(lengths)} images"):
            insert_spans([9, 9], TINY, lengths)


def test_ends_of_chunks_lie_between_images() -> None:
    images = (_image(2, 4), _image(6, 3))
    ends = [whole_images_end(images, stop) for stop in range(11)]
    assert ends == [0, 1, 2, 2, 2, 2, 6, 6, 6, 9, 10]
    assert [next_stop(images, start) for start in (0, 1, 2, 6, 9)] == [1, 2, 6, 9, 10]
    assert whole_images_end((), 5) == 5
