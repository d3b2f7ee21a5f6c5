"""Goal: a vision worker's encoder gives the features that the whole model would compute, and
refuses a model that takes no images.

Method: the golden checkpoint, whose encoder is also called uncompiled.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import checkpoint, vision
from serving.core.image_layout import plan_grid
from serving.core.request import RequestImage
from serving.engine.image_executor import ImageExecutor, NoEncoderError
from sharding.plan import load_plan
from tests.deepinfer_jax import golden_model


@pytest.mark.slow
def test_features_are_those_of_the_model() -> None:
    executor = ImageExecutor(golden_model.DIRECTORY, load_plan("single"))
    grid = plan_grid(executor.image_geometry, 90, 60)
    pixels = np.random.default_rng(3).integers(
        0, 256, (grid.patch_rows * grid.patch_cols, 588), np.uint8
    )
    image = RequestImage(0, grid.num_tokens, grid.patch_rows, grid.patch_cols, b"x", pixels)
    rows = executor.encode(image)
    assert rows.shape == (grid.num_tokens, executor.feature_bytes) and rows.dtype == np.uint8
    model, _ = golden_model.load("noq")
    config = executor.model_config
    # The image encoder alone is what the whole checkpoint has of it.
    whole = checkpoint.load(golden_model.DIRECTORY, config, parts={"text", "vision"}).vision
    alone = checkpoint.load_vision(golden_model.DIRECTORY, config)
    assert whole is not None and alone is not None
    jax.tree.map(np.testing.assert_array_equal, whole, alone)
    shape = jnp.array([grid.patch_rows, grid.patch_cols])
    expected = vision.encode_image(config, model.precision, whole, jnp.asarray(pixels), shape)
    got = rows.view(np.float32)
    np.testing.assert_allclose(got, expected[: grid.num_tokens], rtol=1e-4, atol=1e-5)
    ticks: Iterator[int] = count(0, 10**8)
    # Each of its images takes a tenth of a second by this clock.
    speed = executor.tokens_per_s(lambda: next(ticks))
    assert speed == 10 * executor.image_geometry.max_image_tokens


def test_a_model_without_an_encoder_is_refused(tmp_path: Path) -> None:
    config = json.loads((golden_model.DIRECTORY / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NoEncoderError, match=r"no vision_config in config\.json.*remove its node"):
        ImageExecutor(tmp_path, load_plan("single"))
