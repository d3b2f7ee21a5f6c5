"""Goal: stored low-precision values mean, bit for bit, what the published formats say.
Method: golden codes and scales; and an oracle in float64 that tries every code of a format and
takes the nearest, on values that lie anywhere, on midpoints and beyond the largest code.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.scaled_array import (
    FP4_ROW32,
    FP8_32,
    FP8_BLOCK32,
    FP8_ROW32,
    MXFP4_32,
    NVFP4_16,
    Format,
    ScaledArray,
    quantise_dequantise,
)
from pallas_kernels.scaled_array import decode as eager_decode
from pallas_kernels.scaled_array import encode as eager_encode

# One compilation each takes a fraction of the time of compiling every operation by itself.
encode = jax.jit(eager_encode, static_argnums=1)
decode = jax.jit(eager_decode, static_argnums=1)

FORMATS = (FP8_BLOCK32, FP8_ROW32, FP4_ROW32, FP8_32, NVFP4_16, MXFP4_32)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def by_name(form: Format) -> str:
    return form.name


def nearest(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Values of the codes nearest to `x`, the even code on a tie; the code is the index."""
    # Without the limit all codes would be equally far from a very large value.
    size = np.minimum(np.abs(x), magnitudes[-1])
    distance = np.abs(size[..., None] - magnitudes)
    is_odd = np.arange(len(magnitudes)) % 2
    order = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance), axis=-1)
    return np.copysign(magnitudes[order[..., 0]], x)


def oracle(x: np.ndarray, form: Format) -> np.ndarray:
    """Quantised values of `x` [N, K], one block at a time, from the table of the formats."""
    out = np.empty_like(x, dtype=np.float64)
    rows, channels = form.block
    magnitudes = E2M1 if form.bits == 4 else E4M3
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], channels):
            block = x[i : i + rows, j : j + channels].astype(np.float64)
            amax = np.abs(block).max()
            if form is NVFP4_16:
                scale = nearest(np.maximum(amax, 6 * 2.0**-9) / 6, E4M3)
            else:
                least = 1e-4 if form.bits == 8 else 6 * 2.0**-126
                scale = 2.0 ** np.ceil(np.log2(max(amax, least) / magnitudes[-1]))
            out[i : i + rows, j : j + channels] = nearest(block / scale, magnitudes) * scale
    return out


@pytest.mark.parametrize(
    ("form", "name"), [(FP8_32, "fp8_32"), (MXFP4_32, "mxfp4_32"), (NVFP4_16, "nvfp4_16")]
)
def test_golden_values_and_codes(golden: Path, form: Format, name: str) -> None:
    with np.load(golden / "ops.npz") as data:
        packed = encode(jnp.asarray(data["quant_in"]), form)
        np.testing.assert_array_equal(decode(packed), data[f"qdq_{name}"])
        if form is not NVFP4_16:
            codes = np.asarray(packed.codes).view(np.uint8)
            np.testing.assert_array_equal(codes, data[f"{name}_codes"])
            scale = np.asarray(packed.scale).astype(np.float32)
            np.testing.assert_array_equal(scale, data[f"{name}_scale"])


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
def test_encoding_takes_the_nearest_code(form: Format, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-30, 14, (64, 64))
    x[3] = 0.0
    x[5] = 2.0 ** rng.integers(-9, 9, 64) * np.sign(x[5])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(decode(encode(jnp.asarray(x), form))), oracle(x, form))


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
def test_magnitudes_at_both_ends(form: Format) -> None:
    """Blocks of zeros, of one tiny value, and of values beyond the largest scale."""
    x = np.zeros((128, 32), np.float32)
    x[32, 0] = 1e-30
    x[64, 3] = -3e7
    x[96, 7] = 2.0**100
    got = np.asarray(decode(encode(jnp.asarray(x), form)))
    np.testing.assert_array_equal(got, oracle(x, form))
    if form is NVFP4_16:
        # The scale stops at 448, so the largest code stands for everything from there on.
        assert got[64, 3] == -448 * 6
        assert got[96, 7] == 448 * 6
    else:
        assert abs(got[96, 7] / 2.0**100 - 1) <= 0.25


def test_a_scale_rounded_down_saturates_its_largest_value() -> None:
    x = np.zeros((64, 64), np.float32)
    x[0, :2] = 6.3, -6.3
    np.testing.assert_array_equal(decode(encode(jnp.asarray(x), NVFP4_16))[0, :2], [6.0, -6.0])


@pytest.mark.parametrize("form", [FP8_32, MXFP4_32], ids=by_name)
def test_the_scale_grows_just_past_the_largest_code(form: Format) -> None:
    largest = np.float32(448 if form.bits == 8 else 6)
    x = np.zeros((64, 64), np.float32)
    x[:3, 0] = np.nextafter(largest, np.float32(0)), largest, np.nextafter(largest, np.float32(1e9))
    scale = np.asarray(encode(jnp.asarray(x), form).scale).astype(np.float32)
    np.testing.assert_array_equal(scale[:3, 0], [1, 1, 2])


def test_midpoints_go_to_even_codes_under_every_scale() -> None:
    """A compiler that multiplies by a rounded reciprocal of the scale would move some of them."""
    scales = E4M3[8:]
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = np.zeros((len(scales), 16), np.float32)
    x[:, 0] = 6 * scales
    x[:, 1:8] = midpoints * scales[:, None]
    x[:, 8:15] = -midpoints * scales[:, None]

    got = np.asarray(decode(encode(jnp.asarray(x), NVFP4_16)), np.float64)
    np.testing.assert_array_equal(got[:, 1:8] / scales[:, None], np.tile(even, (len(scales), 1)))
    np.testing.assert_array_equal(got[:, 8:15], -got[:, 1:8])


def test_every_fp4_code_decodes_in_both_nibbles() -> None:
    codes = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    scale = jnp.full((16, 1), 2.0, jnp.float8_e8m0fnu)
    values = np.asarray(decode(ScaledArray(codes, scale, MXFP4_32))).reshape(256, 2)
    table = 2 * np.concatenate([E2M1, -E2M1])
    np.testing.assert_array_equal(values[:, 0], table[np.arange(256) % 16])
    np.testing.assert_array_equal(values[:, 1], table[np.arange(256) // 16])


@pytest.mark.parametrize("form", [FP8_32, MXFP4_32], ids=by_name)
def test_powers_of_two_are_read_off_their_byte(form: Format) -> None:
    """Byte 0 reads as zero, so that a cache of zero bytes holds zeros."""
    code = {8: 0x38, 4: 0x22}[form.bits]
    codes = jnp.full(form.code_shape((5, 32)), code, jnp.uint8)
    bits = jnp.asarray([[0], [1], [127], [130], [254]], jnp.uint8)
    scale = jax.lax.bitcast_convert_type(bits, form.scale_dtype)
    if form.bits == 8:
        codes = jax.lax.bitcast_convert_type(codes, form.code_dtype)
    values = decode(ScaledArray(codes, scale, form))
    np.testing.assert_array_equal(values[:, 0], [0, 2.0**-126, 1, 8, 2.0**127])


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
def test_shapes_and_sizes(form: Format) -> None:
    array = jax.eval_shape(lambda: eager_encode(jnp.ones((3, 64, 96)), form))
    assert array.shape == (3, 64, 96)
    assert array.ndim == 3
    assert array.codes.shape == form.code_shape(array.shape)
    assert array.codes.dtype == form.code_dtype
    assert array.scale.shape == form.scale_shape(array.shape)
    assert array.scale.dtype == form.scale_dtype


@pytest.mark.parametrize("form", [FP8_BLOCK32, NVFP4_16], ids=by_name)
def test_bytes_held(form: Format) -> None:
    rows, channels = form.block
    expected = 64 * 64 * form.bits // 8 + 64 * 64 // (rows * channels)
    assert encode(jnp.asarray(np.ones((64, 64), np.float32)), form).nbytes == expected


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
def test_leading_dimensions_are_encoded_and_indexed_one_by_one(
    form: Format, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((3, 64, 64)).astype(np.float32) * 10
    array = encode(jnp.asarray(x), form)
    expected = np.stack([oracle(part, form) for part in x])
    np.testing.assert_array_equal(decode(array), expected)
    picked = array[np.array([2, 0, 2])]
    assert isinstance(picked, ScaledArray)
    np.testing.assert_array_equal(decode(picked), expected[[2, 0, 2]])


def test_blocks_must_divide_the_shape() -> None:
    with pytest.raises(ValueError, match=r"\(2, 48\).*1 x 32 \(fp8_32\)"):
        FP8_32.scale_shape((2, 48))
    with pytest.raises(ValueError, match=r"\(31, 64\).*32 x 32 \(fp8_block32\)"):
        eager_encode(jnp.zeros((31, 64)), FP8_BLOCK32)
    assert NVFP4_16.scale_shape((3, 48)) == (3, 3)


@pytest.mark.parametrize("form", FORMATS, ids=by_name)
def test_decoded_values_are_exact_in_bfloat16(form: Format, rng: np.random.Generator) -> None:
    array = encode(jnp.asarray(rng.standard_normal((64, 64)) * 50, jnp.float32), form)
    narrow = decode(array, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), decode(array))


def test_plain_arrays_are_only_converted() -> None:
    x = jnp.asarray([1.2345678], jnp.float32)
    np.testing.assert_array_equal(decode(x), x)
    assert decode(x, jnp.bfloat16).dtype == jnp.bfloat16


def test_quantise_dequantise_keeps_the_type(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((2, 32)), jnp.bfloat16)
    assert quantise_dequantise(x, None) is x
    apply = jax.jit(quantise_dequantise, static_argnums=1)
    got = apply(x, MXFP4_32)
    assert got.dtype == jnp.bfloat16
    expected = oracle(np.asarray(x).astype(np.float32), MXFP4_32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
    np.testing.assert_array_equal(apply(got, MXFP4_32), got)


def test_a_scaled_array_passes_through_transformations() -> None:
    array = encode(jnp.asarray(np.arange(4096.0).reshape(64, 64), jnp.float32), FP8_32)
    halves = jax.jit(lambda a: jax.tree.map(lambda leaf: leaf[1:], a))(array)
    assert halves.format is FP8_32
    np.testing.assert_array_equal(decode(halves), decode(array)[1:])
