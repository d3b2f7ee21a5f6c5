"""Low-precision values with their block scales, as one array-like pytree.

A `ScaledArray` keeps the packed codes and the scales exactly as they lie in a checkpoint or a
cache and is widened only where it is used. A `Format` says how: the code type, how many values
share a scale along the last two dimensions, and the rule that finds a scale when encoding.

| format      | codes            | scale                                          | used for      |
| ----------- | ---------------- | ---------------------------------------------- | ------------- |
| FP8_BLOCK32 | e4m3             | one power of two per 32 x 32 values            | dense weights |
| FP8_ROW32   | e4m3             | one power of two per row and 32 channels       | Engram tables |
| FP4_ROW32   | e2m1, two a byte | one power of two per row and 32 channels       | experts       |
| FP8_32      | e4m3             | 2^ceil(log2(max(amax, 1e-4) / 448)) per 32     | windows       |
| NVFP4_16    | e2m1, two a byte | e4m3(max(amax, 6 * 2^-9) / 6) per 16 channels  | main entries  |
| MXFP4_32    | e2m1, two a byte | 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) per 32 | index vectors |

Two FP4 codes share a byte, the even channel in the low nibble; bit 3 of a code is its sign.
Encoding rounds to nearest, ties to the even code, and saturates. Powers of two are stored as
`float8_e8m0fnu` (byte b means 2^(b - 127)); byte 0, which encoding never writes, reads as zero.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """How values are stored.

    Attributes:
        name: spelling used in messages and fingerprints.
        bits: 8 (e4m3) or 4 (e2m1, two to a byte).
        block: number of rows and channels that share one scale.
        scale_dtype: `float8_e8m0fnu` (power of two) or `float8_e4m3fn`.
        amax_min: smallest block maximum that the scale is made for.
    """

    name: str
    bits: int
    block: tuple[int, int]
    scale_dtype: Any
    amax_min: float

    @property
    def code_dtype(self) -> Any:
        """Element type of the code array."""
        return jnp.float8_e4m3fn if self.bits == 8 else jnp.uint8

    @property
    def codes_per_byte(self) -> int:
        """1 for FP8, 2 for FP4."""
        return 8 // self.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the code array of values of `shape`."""
        return (*shape[:-1], shape[-1] // self.codes_per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale array of values of `shape`.

        Raises:
            ValueError: the blocks do not divide the shape.
        """
        rows, channels = self.block
        if shape[-1] % channels or (rows > 1 and shape[-2] % rows):
            raise ValueError(
                f"shape {shape} does not divide into blocks of {rows} x {channels} ({self.name})"
            )
        if rows == 1:
            return (*shape[:-1], shape[-1] // channels)
        return (*shape[:-2], shape[-2] // rows, shape[-1] // channels)


_POWER_OF_TWO = jnp.float8_e8m0fnu
FP8_BLOCK32 = Format("fp8_block32", 8, (32, 32), _POWER_OF_TWO, 1e-4)
FP8_ROW32 = Format("fp8_row32", 8, (1, 32), _POWER_OF_TWO, 1e-4)
FP4_ROW32 = Format("fp4_row32", 4, (1, 32), _POWER_OF_TWO, FP4_MAX * 2.0**-126)
FP8_32 = Format("fp8_32", 8, (1, 32), _POWER_OF_TWO, 1e-4)
NVFP4_16 = Format("nvfp4_16", 4, (1, 16), jnp.float8_e4m3fn, FP4_MAX * 2.0**-9)
MXFP4_32 = Format("mxfp4_32", 4, (1, 32), _POWER_OF_TWO, FP4_MAX * 2.0**-126)


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["format"])
@dataclass(frozen=True)
class ScaledArray:
    """Values of `shape`, stored as `codes` and `scale` in one `format`.

    Leading dimensions (all but those that a scale block spans) may be indexed with `array[i]`;
    the codes and scales of the selected rows stay packed.
    """

    codes: Any
    scale: Any
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that the codes stand for."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.format.codes_per_byte)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the values."""
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes held: codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def __getitem__(self, index: Any) -> "ScaledArray":
        return ScaledArray(self.codes[index], self.scale[index], self.format)


def decode(array: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Values of a `ScaledArray` in `dtype`; a plain array is only converted.

    Every product of code and scale is exact in float32 (and in bfloat16, except NVFP4_16 entries
    of more than eight significant bits, which do not occur: 2 + 4 bits).
    """
    if not isinstance(array, ScaledArray):
        return jnp.asarray(array).astype(dtype)
    values = _code_values(array.codes, array.format)
    rows, channels = array.format.block
    scale = _scale_values(array.scale)
    if rows > 1:
        *lead, n, k = values.shape
        blocks = values.reshape(*lead, n // rows, rows, k // channels, channels)
        return (blocks * scale[..., :, None, :, None]).reshape(values.shape).astype(dtype)
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // channels, channels)
    return (groups * scale[..., None]).reshape(values.shape).astype(dtype)


def encode(values: jax.Array, form: Format) -> ScaledArray:
    """Quantise `values` [..., N, K] (any float type, taken as float32).

    Raises:
        ValueError: the blocks of the format do not divide the shape.
    """
    scale_shape = form.scale_shape(values.shape)
    rows, channels = form.block
    x = values.astype(jnp.float32)
    if rows > 1:
        *lead, n, k = x.shape
        x = x.reshape(*lead, n // rows, rows, k // channels, channels)
        axes: tuple[int, ...] = (-3, -1)
    else:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // channels, channels)
        axes = (-1,)
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), form.amax_min)
    scale = _scale_for(amax, form)
    # The barriers here and below keep XLA from multiplying by a rounded reciprocal, which would
    # move values that lie exactly between two codes (powers of two would not mind).
    divisor = jax.lax.optimization_barrier(jnp.broadcast_to(_scale_values(scale), x.shape))
    codes = _round_to_codes((x / divisor).reshape(values.shape), form)
    return ScaledArray(codes, scale.reshape(scale_shape), form)


def quantise_dequantise(values: jax.Array, form: Format | None) -> jax.Array:
    """`decode(encode(values))` in the type of `values`; None leaves them alone."""
    return values if form is None else decode(encode(values, form), values.dtype)


def _scale_for(amax: jax.Array, form: Format) -> jax.Array:
    if form.scale_dtype == jnp.float8_e4m3fn:
        divisor = jax.lax.optimization_barrier(jnp.float32(FP4_MAX))
        return jnp.minimum(amax / divisor, FP8_MAX).astype(jnp.float8_e4m3fn)
    # The smallest power of two with amax <= code_max * 2^e, read off the bits of amax: the code
    # maximum is 1.75 * 2^8 or 1.5 * 2^2, so the mantissa alone decides about one more.
    exponent_of_max, mantissa_of_max = (8, 0x600000) if form.bits == 8 else (2, 0x400000)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent = (bits >> 23) - exponent_of_max + ((bits & 0x7FFFFF) > mantissa_of_max)
    byte = jnp.clip(exponent, 1, 254).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu)


def _scale_values(scale: jax.Array) -> jax.Array:
    if scale.dtype == jnp.float8_e4m3fn:
        return scale.astype(jnp.float32)
    # Assembled from the exponent byte: exact, and cheaper than a general conversion.
    byte = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(byte << 23, jnp.float32)


def _code_values(codes: jax.Array, form: Format) -> jax.Array:
    if form.bits == 8:
        return codes.astype(jnp.float32)
    table = np.array([*FP4_VALUES, *(-v for v in FP4_VALUES)], np.float32)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    return jnp.asarray(table)[nibbles.reshape(shape).astype(jnp.int32)]


def _round_to_codes(x: jax.Array, form: Format) -> jax.Array:
    if form.bits == 8:
        # The conversion itself rounds to nearest even but does not saturate.
        return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    a = jnp.abs(x)
    # A midpoint goes to the even code, so the comparisons alternate between > and >=.
    code = (a > 0.25).astype(jnp.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code = code + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = (code | (jnp.signbit(x).astype(jnp.uint8) << 3)).astype(jnp.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)
