"""Goal: images become the embeddings that the published model computes, whatever they are padded
to. Method: independent golden numbers for the encoder, the aligner and the text model behind
them, the same image in several buckets, and spans laid out by hand.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import checkpoint, vision
from deepinfer_jax.batch import IMAGE_FEATURE, StepShape
from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.model import forward, logits
from deepinfer_jax.parameters import VisionParameters
from deepinfer_jax.precision import Precision
from sharding.mesh import DeviceMesh
from sharding.plan import load_plan
from tests.deepinfer_jax import golden_model

_FLOAT = Precision(jnp.float32)
_PIXELS = 3 * 14 * 14


@functools.cache
def _load() -> tuple[ModelConfig, VisionParameters]:
    config = checkpoint.read_config(golden_model.DIRECTORY)
    parameters = checkpoint.load(golden_model.DIRECTORY, config, parts={"text", "vision"})
    assert parameters.vision is not None
    return config, parameters.vision


@functools.cache
def _jitted(function: Any) -> Any:
    return jax.jit(functools.partial(function, _load()[0], _FLOAT))


def _padded(patches: np.ndarray, num_patches: int) -> jax.Array:
    rest = np.full((num_patches - len(patches), *patches.shape[1:]), 7, patches.dtype)
    return jnp.asarray(np.concatenate([patches, rest]))


def _vision(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


@pytest.mark.parametrize("num_patches", (42, 64))
def test_encoder_and_aligner_equal_the_golden_ones(golden: Path, num_patches: int) -> None:
    data = np.load(golden / "vision.npz")
    _, parameters = _load()
    patches = _padded(data["patches"].reshape(42, -1), num_patches)
    grid = jnp.asarray(data["grid_hw"])
    encoded = _jitted(vision.encode)(parameters, patches, grid)
    np.testing.assert_allclose(encoded[:42], data["vit_out"], rtol=0, atol=1e-4)
    cells = _jitted(vision.align)(parameters.aligner, encoded, grid)
    np.testing.assert_allclose(cells[:6], data["aligned"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_text_model_takes_image_features(golden: Path, cache_format: str) -> None:
    data = np.load(golden / "vision.npz")
    model, weights = golden_model.load(cache_format)
    _, parameters = _load()
    grid = jnp.asarray(data["grid_hw"])
    encoded = _jitted(vision.encode)(parameters, _padded(data["patches"].reshape(42, -1), 64), grid)
    cells = _jitted(vision.align)(parameters.aligner, encoded, grid)
    rows = vision.arrange(model.config, parameters, cells, grid)
    shape = StepShape(num_rows=1, num_tokens=32, num_blocks=1, samples_every_token=True)
    is_image = data["types"] >= 0
    start, num_image = int(np.argmax(is_image)), int(is_image.sum())
    assert np.array_equal(data["ids"] == model.config.image_token_id, is_image)
    stale = jnp.full((40, model.config.hidden_size), 1e3)
    features = vision.insert(stale, rows, jnp.array([start, num_image]))
    ids = np.where(is_image, IMAGE_FEATURE, data["ids"])
    arrays = golden_model.batch_arrays(shape, [(ids, 0, 1, [1])])

    @jax.jit
    def run(features: jax.Array) -> Any:
        seen: dict[str, Any] = {}
        batch = golden_model.to_batch(shape, arrays)
        cache = golden_model.layout(model).zeros()
        residual, _ = forward(model, weights, cache, batch, seen.__setitem__, features)
        hashes = [seen[f"engram_hashes_{layer}"] for layer in model.config.engram_layer_ids]
        return logits(model, weights, residual, jnp.arange(32)), jnp.stack(hashes, axis=1)

    received, hashes = run(features)
    # Single roundings of the quantised cache may fall to the other side.
    atol = 1e-4 if cache_format == "noq" else 5e-3
    np.testing.assert_allclose(received[:30], data[f"logits_{cache_format}"], rtol=0, atol=atol)
    np.testing.assert_array_equal(hashes[:30], data["engram_hashes"])


def test_normalise_equals_the_golden_patches(golden: Path) -> None:
    data = np.load(golden / "image_patches.npz")
    for name in (key for key in data.files if key.startswith("patches_")):
        values = data[name]
        pixels = np.rint((values.astype(np.float64) * 0.5 + 0.5) * 255).astype(np.uint8)
        np.testing.assert_array_equal(vision.normalise(jnp.asarray(pixels), _FLOAT), values)


def test_padding_and_chunks_do_not_change_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    config, parameters = _load()
    pixels = np.random.default_rng(3).integers(0, 256, (20, _PIXELS)).astype(np.uint8)
    grid = jnp.array([4, 5])
    expected = _jitted(vision.encode_image)(parameters, _padded(pixels, 20), grid)
    # Start, two rows of two cells and a newline, end.
    assert np.abs(expected[:8]).max(axis=1).min() > 0
    assert np.abs(expected[8:]).max() == 0
    wider = _jitted(vision.encode_image)(parameters, _padded(pixels, 48), grid)
    np.testing.assert_allclose(wider, expected, rtol=0, atol=1e-5)
    monkeypatch.setattr(vision, "QUERY_CHUNK", 12)
    encode = jax.jit(functools.partial(vision.encode_image, config, _FLOAT))
    chunked = encode(parameters, _padded(pixels, 24), grid)
    np.testing.assert_allclose(chunked, expected, rtol=0, atol=1e-5)
    other = _jitted(vision.encode_image)(parameters, _padded(pixels, 20), jnp.array([5, 4]))
    assert np.abs(np.asarray(other - expected)).max() > 1e-2


def test_patches_that_cannot_be_cut_into_chunks_are_refused() -> None:
    config, parameters = _load()
    patches = jnp.zeros((vision.QUERY_CHUNK + 1, _PIXELS))
    with pytest.raises(ValueError, match="patches has 513 rows; expected at most 512"):
        vision.encode(config, _FLOAT, parameters, patches, jnp.array([1, 1]))


def test_arrange_puts_delimiters_between_the_rows_of_cells() -> None:
    config, parameters = _load()
    cells = jnp.arange(22.0)[:, None] * jnp.ones(config.hidden_size) + 100
    rows = np.asarray(vision.arrange(config, parameters, cells, jnp.array([4, 8])))
    start, newline, end = (
        np.asarray(vector, np.float32)
        for vector in (parameters.image_start, parameters.image_newline, parameters.image_end)
    )
    expected = [start, *cells[:3], newline, *cells[3:6], newline, end]
    np.testing.assert_array_equal(rows[:10], np.stack(expected))
    assert (rows[10:] == 0).all()


def test_insert_writes_inside_and_nothing_else() -> None:
    rows = jnp.arange(1.0, 6)[:, None] * jnp.ones(2)

    def inserted(first: int, count: int) -> list[float]:
        return vision.insert(jnp.zeros((4, 2)), rows, jnp.array([first, count]))[:, 0].tolist()

    assert inserted(1, 2) == [0, 1, 2, 0]
    assert inserted(2, 5) == [0, 0, 1, 2]
    assert inserted(-2, 5) == [3, 4, 5, 0]
    assert inserted(0, 0) == [0, 0, 0, 0]


def test_buckets_reach_from_the_smallest_image_to_the_largest() -> None:
    released = vision.patch_buckets(_vision(ModelConfig.released()))
    # 1021 cells of nine patches at most, and 544 x 544 pixels at least.
    assert released == (2560, 4608, 9216)
    tiny = vision.patch_buckets(_vision(_load()[0]))
    assert tiny == (138, 275, 1024)


def test_compiled_steps_run_and_take_no_other_shape() -> None:
    config, parameters = _load()
    encoder = vision.compile_encoder(config, _FLOAT, 69, parameters)
    features = jnp.zeros((32, config.hidden_size))
    insert = vision.compile_insert(config, features)
    pixels = np.random.default_rng(4).integers(0, 256, (69, _PIXELS)).astype(np.uint8)
    grid = jnp.array([8, 8])
    rows = encoder(parameters, jnp.asarray(pixels), grid)
    expected = _jitted(vision.encode_image)(parameters, jnp.asarray(pixels), grid)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    features = insert(features, rows, jnp.array([3, 14]))
    np.testing.assert_array_equal(features[3:17], rows[:14])
    with pytest.raises(TypeError):
        encoder(parameters, jnp.asarray(pixels[:68]), grid)


def test_images_are_added_where_the_step_looks_for_them() -> None:
    config, parameters = _load()
    mesh = DeviceMesh.of(load_plan("single"))
    images = vision.ImageEncoder(config, _FLOAT, parameters, mesh, 40)
    programs = images.programs()
    assert list(programs) == ["image_p138", "image_p275", "image_p1024", "image_insert"]
    images.compiled = {name: programs[name]() for name in ("image_p138", "image_insert")}
    rng = np.random.default_rng(4)
    # 6 x 6 patches make 2 x 2 cells, a span of 8 tokens.
    pictures = [rng.integers(0, 256, (36, _PIXELS)).astype(np.uint8) for _ in range(2)]
    images.add(pictures[0], (6, 6), (3, 8))
    images.add(pictures[1], (6, 6), (20, 8))
    for picture, first in zip(pictures, (3, 20), strict=True):
        padded = np.zeros((138, _PIXELS), np.uint8)
        padded[:36] = picture
        grid = jnp.array([6, 6])
        expected = _jitted(vision.encode_image)(parameters, jnp.asarray(padded), grid)
        found = images.features[first : first + 8]
        np.testing.assert_allclose(found, expected[:8], rtol=0, atol=1e-5)
    assert not np.any(np.asarray(images.features)[11:20])


def test_a_model_without_encoder_is_refused() -> None:
    config, parameters = _load()
    blind = dataclasses.replace(config, vision=None)
    with pytest.raises(ValueError, match="no image encoder"):
        vision.arrange(blind, parameters, jnp.zeros((1, 64)), jnp.array([1, 1]))
