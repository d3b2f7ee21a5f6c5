"""Goal: norm, rotation, products and ring writes are the published ones.
Method: golden norms, angles and rotations of the released config; rings written from rows that
wrap, overlap and pad, with every place compared.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layers.primitives import (
    Arithmetic,
    StepContext,
    embedding,
    no_probe,
    rms_norm,
    rope,
    rope_frequencies,
    store,
)
from deepinfer_jax.precision import CacheFormat, Precision
from pallas_kernels import ops
from pallas_kernels.scaled_array import (
    FP8_32,
    FP8_BLOCK32,
    NVFP4_16,
    ScaledArray,
)
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import (
    CONFIG,
    PLAIN,
    Row,
    decode,
    encode,
    quantise_dequantise,
)

jitted_rope = jax.jit(rope, static_argnames="inverse")


def test_golden_norms_down_to_a_zero_row(golden: Path) -> None:
    with np.load(golden / "ops.npz") as data:
        rows, weight = jnp.asarray(data["rms_in"]), jnp.asarray(data["rms_weight"])
        got = rms_norm(rows, weight, ModelConfig.released().rms_norm_eps)
        np.testing.assert_allclose(got, data["rms_out"], rtol=2e-6, atol=0)
        # The smallest row tells the epsilon.
        other = rms_norm(rows, weight, 1e-6)
        assert np.abs(other[4] / data["rms_out"][4] - 1).max() > 0.9


def test_norms_are_float32_of_low_precision_rows() -> None:
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)
    got = rms_norm(x, jnp.asarray([1.0, 2.0], jnp.bfloat16), 1e-20)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_golden_frequencies_and_angles(golden: Path, name: str) -> None:
    frequencies = rope_frequencies(ModelConfig.released(), is_scaled=name == "yarn")
    assert frequencies.dtype == np.float32
    with np.load(golden / "ops.npz") as data:
        np.testing.assert_allclose(frequencies, data[f"rope_invfreq_{name}"], rtol=1e-6)
        position = data["rope_positions"]
        # A unit along the first channel of each pair is turned to the angle itself.
        unit = np.tile([1.0, 0.0], (len(position), 32))
        turned = np.asarray(jitted_rope(jnp.asarray(unit), jnp.asarray(position), frequencies))
        angle = data[f"rope_angle_{name}"]
        # A frequency may differ in its last bit, which a million positions make visible.
        tolerance = 1e-6 + 2e-7 * position[:, None]
        assert (np.abs(turned[:, 0::2] - np.cos(angle)) < tolerance).all()
        assert (np.abs(turned[:, 1::2] - np.sin(angle)) < tolerance).all()


def test_golden_rotation_and_its_inverse(golden: Path) -> None:
    released = ModelConfig.released()
    frequencies = rope_frequencies(released, is_scaled=True)
    with np.load(golden / "ops.npz") as data:
        position = jnp.asarray(data["rope_positions"])
        x = jnp.asarray(data["rope_in"])
        got = jitted_rope(x, position, frequencies)
        # A frequency may differ in its last bit, which a million positions make visible.
        tolerance = 1e-6 + 5e-7 * data["rope_positions"][:, None]
        assert (np.abs(got - data["rope_out"]) < tolerance).all()
        back = jitted_rope(x, position, frequencies, inverse=True)
        assert (np.abs(back - data["rope_inv_out"]) < tolerance).all()
        restored = jitted_rope(got, position, frequencies, inverse=True)
        np.testing.assert_allclose(restored, x, rtol=0, atol=2e-6)


def test_frequencies_of_a_narrow_rotation() -> None:
    for is_scaled in (False, True):
        expected = by_hand.frequencies(is_scaled=is_scaled)
        np.testing.assert_allclose(
            rope_frequencies(CONFIG, is_scaled=is_scaled), expected, rtol=1e-6
        )


def test_heads_turn_alike_and_other_channels_stay(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3, 32)).astype(np.float32)
    position = np.array([0, 5, 900, 3], np.int32)
    frequencies = rope_frequencies(CONFIG, is_scaled=False)
    for inverse in (False, True):
        got = jitted_rope(jnp.asarray(x), jnp.asarray(position), frequencies, inverse=inverse)
        np.testing.assert_array_equal(got[..., :16], x[..., :16])
        for t, p in enumerate(position):
            expected = by_hand.rotated(x[t], int(p), is_scaled=False, inverse=inverse)
            np.testing.assert_allclose(got[t], expected, rtol=0, atol=2e-4 if p > 100 else 2e-6)


def test_embedding_takes_rows() -> None:
    table = jnp.asarray(np.arange(12).reshape(4, 3), jnp.bfloat16)
    got = embedding(table, jnp.asarray([3, 0, 3]))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[9, 10, 11], [0, 1, 2], [9, 10, 11]])


def test_store_keeps_values_as_the_cache_does(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((2, 32)), jnp.float32)
    assert store(x, None, jnp.bfloat16).dtype == jnp.bfloat16
    packed = jax.jit(lambda x: store(x, NVFP4_16, jnp.bfloat16))(x)
    assert packed.format is NVFP4_16
    np.testing.assert_array_equal(decode(packed), quantise_dequantise(x, NVFP4_16))


@pytest.mark.parametrize("quantise_activations", [False, True])
def test_inputs_are_rounded_only_for_quantised_weights(
    quantise_activations: bool, rng: np.random.Generator
) -> None:
    x = jnp.asarray(rng.standard_normal((2, 32)), jnp.float32)
    plain = jnp.asarray(rng.standard_normal((32, 32)), jnp.float32)
    packed = encode(plain, FP8_BLOCK32)
    precision = Precision(jnp.float32, CacheFormat.NOQ, quantise_activations)
    product = jax.jit(Arithmetic(CONFIG, precision).product)
    exact = by_hand.f64(x) @ by_hand.f64(plain).T
    np.testing.assert_allclose(product(x, plain), exact, rtol=1e-5, atol=1e-5)
    rounded = quantise_dequantise(x, FP8_32) if quantise_activations else x
    expected = by_hand.f64(rounded) @ by_hand.f64(decode(packed)).T
    np.testing.assert_allclose(product(x, packed), expected, rtol=1e-5, atol=1e-5)


def test_results_have_the_compute_type() -> None:
    arithmetic = Arithmetic(CONFIG, Precision(jnp.bfloat16, CacheFormat.NOQ))
    x, weight = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert arithmetic.product(x, weight).dtype == jnp.float32
    assert arithmetic.linear(x, weight).dtype == jnp.bfloat16
    assert arithmetic.norm(x, weight[0]).dtype == jnp.bfloat16


def test_a_probe_learns_the_layer() -> None:
    seen: dict[str, Any] = {}
    step = by_hand.step_of([Row(0, 1, 1)], 1)
    step = StepContext(
        CONFIG, PLAIN, step.tokens, step.is_image, step.block_tables, seen.__setitem__
    )
    step.of_layer(7).probe("topk", 1)
    step.probe("logits", 2)
    assert seen == {"topk_7": 1, "logits": 2}
    no_probe("ignored", 3)


RING_ROWS = [Row(0, 2, 3), Row(3, 9, 1), Row(6, 2, 2), Row(8, 1, 4)]
"""A start, a chunk longer than the ring of five, one that wraps, one token."""


def append(step: StepContext, ring: Any, values: jax.Array) -> Any:
    return step.append_to_ring(ring, values)


@pytest.mark.parametrize("form", [None, FP8_32])
def test_rings_hold_the_last_tokens_of_each_row(form: Any, rng: np.random.Generator) -> None:
    length = 5
    step = by_hand.step_of(RING_ROWS, 16)
    values = rng.standard_normal((16, 32)).astype(np.float32)
    old = rng.standard_normal((6, length, 32)).astype(np.float32)
    ring = jnp.asarray(old) if form is None else encode(jnp.asarray(old), form)
    got = by_hand.run(append, step, ring, jnp.asarray(values))
    assert isinstance(got, ScaledArray) == (form is not None)
    expected = old.copy()
    t = 0
    for row in RING_ROWS:
        for position in row.positions:
            # Written in order, so the last one stays.
            expected[row.slot, position % length] = values[t]
            t += 1
    widened = quantise_dequantise(jnp.asarray(expected), form)
    np.testing.assert_array_equal(decode(got), widened)


def test_no_place_of_a_ring_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two writes stays is for the device to choose, so there must be one."""
    places: list[np.ndarray] = []

    def record(ring: jax.Array, _: jax.Array, outer: jax.Array, inner: jax.Array) -> jax.Array:
        places.append(np.stack([outer, inner], axis=1))
        return ring

    monkeypatch.setattr(ops, "cache_append", record)
    append(by_hand.step_of(RING_ROWS, 16), by_hand.filled(0, 6, 5, 32), by_hand.filled(0, 16, 32))
    written = [tuple(place) for place in places[0].tolist() if place[0] >= 0]
    expected = {(row.slot, position % 5) for row in RING_ROWS for position in row.positions}
    assert sorted(written) == sorted(expected)
