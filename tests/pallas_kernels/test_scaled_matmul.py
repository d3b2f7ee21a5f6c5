"""Goal: dense products with packed weights, with and without rounding of their input.
Method: golden products of FP8 inputs; numpy in float64 on the values that the codes stand for.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.safetensors_file import SafetensorsFile
from pallas_kernels import ops
from pallas_kernels.cases import Case
from pallas_kernels.scaled_array import (
    FP4_ROW32,
    FP8_32,
    FP8_BLOCK32,
    Format,
    ScaledArray,
    decode,
    encode,
    quantise_dequantise,
)
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick

scaled_matmul = jax.jit(ops.scaled_matmul, static_argnames="activation_format")


def test_golden_product(golden: Path) -> None:
    stored = SafetensorsFile(golden / "tiny-v41" / "model.safetensors")
    weight = ScaledArray(
        jnp.asarray(stored.read("layers.0.attn.wq_a.weight")),
        jnp.asarray(stored.read("layers.0.attn.wq_a.scale")),
        FP8_BLOCK32,
    )
    with np.load(golden / "ops.npz") as data:
        got = scaled_matmul(jnp.asarray(data["fp8lin_in"]), weight, activation_format=FP8_32)
        np.testing.assert_allclose(got, data["fp8lin_out"], rtol=1e-5, atol=1e-6)
        unrounded = scaled_matmul(jnp.asarray(data["fp8lin_in"]), weight)
        assert np.abs(unrounded - data["fp8lin_out"]).max() > 1e-3


@pytest.mark.parametrize("form", [None, FP8_BLOCK32, FP4_ROW32])
@pytest.mark.parametrize("activation_format", [None, FP8_32])
def test_products_accumulate_in_float32(
    form: Format | None, activation_format: Format | None, rng: np.random.Generator
) -> None:
    x = jnp.asarray(rng.standard_normal((2, 3, 64)) * 3, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    weight = weight if form is None else jax.jit(encode, static_argnums=1)(weight, form)
    got = scaled_matmul(x, weight, activation_format=activation_format)
    assert got.dtype == jnp.float32
    values = np.asarray(
        jax.jit(quantise_dequantise, static_argnums=1)(x, activation_format)
    ).astype(np.float64)
    expected = values @ np.asarray(jax.jit(decode)(weight), np.float64).T
    assert got.shape == (2, 3, 32)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@TIME_LIMIT
@quick("scaled_matmul")
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check_case(case)


def test_the_kernel_refuses_what_it_does_not_cover() -> None:
    weight = encode(jnp.zeros((64, 64)), FP8_BLOCK32)
    with pytest.raises(NotImplementedError, match="x is float32 and is not quantised"):
        ops.scaled_matmul(jnp.zeros((2, 64)), weight, implementation="interpret")
    with pytest.raises(NotImplementedError, match="weight is not quantised"):
        ops.scaled_matmul(jnp.zeros((2, 64)), jnp.zeros((64, 64)), implementation="interpret")
