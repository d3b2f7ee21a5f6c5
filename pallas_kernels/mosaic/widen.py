"""Low-precision codes widened to bfloat16 in registers, in the order of their channels.

*Why bfloat16 and not FP8 products*: scales change every 32 channels, so an FP8 product would have
to be scaled and added up outside the tensor core after every 32 channels. Code times scale is
exact in bfloat16, and then one float32 accumulation runs over all channels.

*Why FP4 codes come in as int4*: the conversion from int4 is a few instructions for a register of
eight codes and keeps their order, and reading bytes as pairs of int4 costs nothing outside the
kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.scaled_array import ScaledArray

Layout = plgpu.Layout
SCALE_CHANNELS = 32
TILE_CHANNELS = 64
"""Channels of a row that lie together in a shared-memory tile, whatever their size."""


def tiled(bits: int, columns: int = TILE_CHANNELS) -> tuple[Any, ...]:
    """Transforms of a shared-memory tile of values of `bits`, as the tensor core reads it.

    Both operands of an instruction need the same `columns`, which are the least that can be sliced.
    """
    # The two leave out a method that only references without a memory need.
    return (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(columns * bits // 8),  # pyright: ignore[reportAbstractUsage]
    )


def code_layout(bits: int) -> Any:
    """Registers in which `bits`-wide codes lie so that a widened row needs no exchange."""
    return Layout.WGMMA_UPCAST_4X if bits == 4 else Layout.WGMMA_UPCAST_2X


def kernel_codes(array: ScaledArray) -> jax.Array:
    """Codes as a kernel takes them: e4m3, or int4 [..., K] in place of bytes [..., K / 2]."""
    if array.format.bits == 8:
        return array.codes
    pairs = lax.bitcast_convert_type(array.codes, jnp.int4)
    return pairs.reshape(array.shape)


def kernel_scale(array: ScaledArray) -> jax.Array:
    """Scales as a kernel takes them: e4m3, or the exponent byte of a power of two as uint8."""
    if array.scale.dtype == jnp.float8_e4m3fn:
        return array.scale
    return lax.bitcast_convert_type(array.scale, jnp.uint8)


def code_values(codes: jax.Array) -> jax.Array:
    """Inside a kernel: bfloat16 values of e4m3 or int4 codes in registers."""
    if codes.dtype == jnp.int4:
        return _fp4_values(codes)
    return codes.astype(jnp.float32).astype(jnp.bfloat16)


def scale_values(scale: jax.Array) -> jax.Array:
    """Inside a kernel: bfloat16 values of scales in registers, e4m3 or exponent bytes."""
    if scale.dtype == jnp.float8_e4m3fn:
        return scale.astype(jnp.float32).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(scale.astype(jnp.int16) << 7, jnp.bfloat16)


def _fp4_values(codes: jax.Array) -> jax.Array:
    """The eight magnitudes are the largest of three straight lines through the code, so the
    packed bfloat16 instructions find them without a table or a branch.

    As int4 a negative code is the magnitude's code minus 8.
    """
    signed = codes.astype(jnp.bfloat16)
    is_negative = jnp.minimum(jnp.maximum(-signed, 0), 1)
    code = signed + 8 * is_negative
    magnitude = jnp.maximum(jnp.maximum(code * 0.5, code - 2), code * 2 - 8)
    return magnitude * (1 - 2 * is_negative)
