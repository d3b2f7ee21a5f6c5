"""Goal: codes and scales widen to the very values that decoding gives.
Method: every code and every scale, outside a kernel, where the functions are plain arithmetic.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import widen
from pallas_kernels.scaled_array import FP4_ROW32, FP8_32, NVFP4_16, Format, ScaledArray, decode


def every_code(form: Format) -> ScaledArray:
    """[256, 32] values: each byte as a code, all scales one."""
    codes = jnp.asarray(np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, 1))
    codes = codes[:, : 32 // form.codes_per_byte].view(form.code_dtype)
    one = 1.0 if form.scale_dtype == jnp.float8_e4m3fn else 2.0**0
    scale = jnp.full((256, 32 // form.block[1]), one).astype(form.scale_dtype)
    return ScaledArray(codes, scale, form)


@pytest.mark.parametrize("form", [FP4_ROW32, FP8_32, NVFP4_16], ids=lambda f: f.name)
def test_every_code(form: Format) -> None:
    array = every_code(form)
    wide = widen.code_values(widen.kernel_codes(array))
    assert wide.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(wide, np.float32), np.asarray(decode(array)))


def test_every_power_of_two_that_bfloat16_holds() -> None:
    exponents = jnp.arange(1, 255, dtype=jnp.uint8)
    made = np.asarray(widen.scale_values(exponents), np.float64)
    np.testing.assert_array_equal(made, 2.0 ** (np.arange(1, 255) - 127.0))
    assert widen.scale_values(jnp.zeros(1, jnp.uint8))[0] == 0, "an unwritten scale"


def test_every_e4m3_scale() -> None:
    scales = jnp.arange(127, dtype=jnp.uint8).view(jnp.float8_e4m3fn)
    made = widen.scale_values(scales)
    np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(scales, np.float32))


def test_codes_of_a_kernel_lie_in_the_order_of_their_channels() -> None:
    packed = jnp.asarray([[0x21, 0x7F]], jnp.uint8)
    array = ScaledArray(packed, jnp.ones((1, 1), jnp.float8_e8m0fnu), FP4_ROW32)
    codes = widen.kernel_codes(array)
    assert codes.shape == (1, 4) and codes.dtype == jnp.int4
    assert [int(c) for c in codes[0]] == [1, 2, -1, 7]
    assert widen.kernel_scale(array).dtype == jnp.uint8
