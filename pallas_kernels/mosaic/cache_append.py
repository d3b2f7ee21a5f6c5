"""Quantise new rows and write them into blocks or a ring, as a GPU kernel.

    grid (64 lines of 32 channels, that is 4 rows of 512 channels)
      values by TMA --registers--> scale of each block --> codes --shared memory
      codes of each written row by TMA, its scales as whole words --> its place in the pool

Bound: values read once, codes and scales written once; the pool is written in place.

*Why nothing is divided*: a scale that is a power of two is multiplied by its reciprocal, which is
exact. One in e4m3 has four bits, so the borders between codes times the scale are exact numbers,
and comparing with them says what comparing the quotient would.

*Why even and odd channels come apart*: two FP4 codes share a byte. A thread holds neighbours, and
an addition of two arrays puts them into one byte without an exchange between threads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.widen import Layout
from pallas_kernels.scaled_array import FP4_MAX, FP8_MAX, Format, ScaledArray
from pallas_kernels.targets import Target

LINES, CHANNELS = 64, 32
"""Lines of channels that a block takes, and channels of a line: one or two blocks of a scale."""
_WORD = 4
"""Scales that are written as one number."""


class _Launch(NamedTuple):
    form: Format
    num_rows: int
    width: int

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.width // CHANNELS

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return LINES // self.lines

    @property
    def words(self) -> int:
        """Words that the scales of a row fill."""
        return self.width // self.form.block[1] // _WORD


def cache_append(
    pool: ScaledArray | jax.Array,
    values: jax.Array,
    outer: jax.Array,
    inner: jax.Array,
    *,
    target: Target,
    interpret: Any,
) -> ScaledArray | jax.Array:
    """See `pallas_kernels.ops.cache_append`.

    Raises:
        NotImplementedError: the pool is not quantised by rows, or a row is not 4, 8, 16, 32 or 64
            times 32 channels.
    """
    del target
    if not isinstance(pool, ScaledArray):
        raise NotImplementedError("the pool is not quantised, so there is nothing but a scatter")
    if pool.ndim != 3 or pool.format.block[0] != 1 or pool.shape[2] not in _widths():
        raise NotImplementedError(
            f"the pool is {pool.shape} in {pool.format.name}; expected rows of {_widths()} "
            "channels with scales of their own"
        )
    launch = _Launch(pool.format, values.shape[0], pool.shape[2])
    if not launch.num_rows:
        return pool
    num_blocks, length, _ = pool.shape
    is_written = (outer >= 0) & (outer < num_blocks) & (inner >= 0) & (inner < length)
    place = jnp.where(is_written, outer * length + inner, -1)
    place = jnp.pad(place, (0, -launch.num_rows % launch.rows), constant_values=-1)
    lines = values.astype(jnp.float32).reshape(-1, CHANNELS)
    parts = [lines] if pool.format.bits == 8 else [lines[:, 0::2], lines[:, 1::2]]
    codes = jax.new_ref(pool.codes.reshape(-1, pool.format.code_shape((CHANNELS,))[0]))
    words = jax.new_ref(
        lax.bitcast_convert_type(
            lax.bitcast_convert_type(pool.scale, jnp.uint8).reshape(-1, launch.words, _WORD),
            jnp.int32,
        )
    )
    _kernel(launch, interpret)(*parts, place.astype(jnp.int32), codes, words)
    scale = lax.bitcast_convert_type(jax.freeze(words), jnp.uint8).reshape(pool.scale.shape)
    return ScaledArray(
        jax.freeze(codes).reshape(pool.codes.shape),
        lax.bitcast_convert_type(scale, pool.format.scale_dtype),
        pool.format,
    )


def _widths() -> tuple[int, ...]:
    return tuple(CHANNELS * lines for lines in (4, 8, 16, 32, 64))


def _kernel(launch: _Launch, interpret: Any) -> Any:
    num_parts = 3 - launch.form.bits // 4
    part_shape = (LINES, CHANNELS // num_parts)

    def kernel(*refs: Any) -> None:
        parts_gmem, refs = refs[:num_parts], refs[num_parts:]
        place_gmem, codes_gmem, words_gmem, _, parts_smem, codes_smem, scale_smem, ready = refs
        block = lax.axis_index("lines")
        for part, gmem in enumerate(parts_gmem):
            here = gmem.at[pl.ds(block * LINES, LINES)]
            plgpu.copy_gmem_to_smem(here, parts_smem.at[part], ready)
        plgpu.barrier_wait(ready)
        parts = [
            plgpu.load(parts_smem.at[part], layout=Layout.WGMMA, optimized=False)
            for part in range(num_parts)
        ]
        codes, scale = _encoded(parts, launch.form)
        plgpu.store(codes_smem, codes, optimized=False)
        plgpu.store(scale_smem, scale, optimized=False)
        plgpu.commit_smem()
        per_word = launch.lines // launch.words
        for row in range(launch.rows):
            place = place_gmem[block * launch.rows + row]

            @pl.when(place >= 0)
            def _(row: int = row, place: jax.Array = place) -> None:
                first = row * launch.lines
                plgpu.copy_smem_to_gmem(
                    codes_smem.at[pl.ds(first, launch.lines)],
                    codes_gmem.at[pl.ds(place * launch.lines, launch.lines)],
                )
                for word in range(launch.words):
                    at = first + word * per_word
                    value = scale_smem[at]
                    for i in range(1, per_word):
                        bits = 32 // per_word * i
                        value = value | lax.shift_left(scale_smem[at + i], jnp.int32(bits))
                    words_gmem[place, word] = value

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(-(-launch.num_rows // launch.rows),),
        grid_names=("lines",),
        scratch_types=[
            plgpu.SMEM((num_parts, *part_shape), jnp.float32),
            plgpu.SMEM((LINES, launch.form.code_shape((CHANNELS,))[0]), launch.form.code_dtype),
            plgpu.SMEM((LINES,), jnp.int32),
            plgpu.Barrier(num_arrivals=num_parts),
        ],
        interpret=interpret,
    )


def _encoded(parts: list[jax.Array], form: Format) -> tuple[jax.Array, jax.Array]:
    """Codes [64, bytes] of values in one or two parts, and the scale bytes of a line as one."""
    num_groups = CHANNELS // form.block[1]
    columns = parts[0].shape[1] // num_groups
    codes, scale = [], None
    for g in range(num_groups):
        group = [part[:, g * columns : (g + 1) * columns] for part in parts]
        amax = jnp.max(_largest(group), axis=1)
        amax = jnp.maximum(amax, form.amax_min)
        byte = _scale_byte(amax, form)
        scale = byte if scale is None else scale | (byte << 8 * g)
        codes.append(_codes(group, byte, form))
    assert scale is not None
    return codes[0] if len(codes) == 1 else jnp.concatenate(codes, axis=1), scale


def _largest(parts: list[jax.Array]) -> jax.Array:
    sizes = [jnp.maximum(part, -part) for part in parts]
    return sizes[0] if len(sizes) == 1 else jnp.maximum(*sizes)


def _scale_byte(amax: jax.Array, form: Format) -> jax.Array:
    """int32 byte of the scale for blocks of these largest values."""
    if form.scale_dtype == jnp.float8_e4m3fn:
        return _e4m3_byte(amax)
    # As in `scaled_array`: the mantissa of the largest code decides about one more.
    exponent_of_max, mantissa_of_max = (8, 0x600000) if form.bits == 8 else (2, 0x400000)
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    more = jnp.where((bits & 0x7FFFFF) > mantissa_of_max, 1, 0)
    return jnp.minimum(jnp.maximum((bits >> 23) - exponent_of_max + more, 1), 254)


def _e4m3_byte(amax: jax.Array) -> jax.Array:
    """e4m3 of `amax / 6`, to the nearest and of two to the even one, at most 448."""
    # The product may be off by its last bit, so only the lower neighbour is taken from it.
    share = amax * (1 / FP4_MAX)
    bits = lax.bitcast_convert_type(share, jnp.int32)
    below = jnp.where(share >= 2.0**-6, (bits >> 20) - 960, (share * 512).astype(jnp.int32))
    below = jnp.minimum(below, 126)
    border = (_e4m3_value(below) + _e4m3_value(below + 1)) * (FP4_MAX / 2)
    is_odd = (below & 1) > 0
    goes_up = (amax > border) | ((amax == border) & is_odd)
    return jnp.minimum(below + jnp.where(goes_up, 1, 0), 126)


def _e4m3_value(byte: jax.Array) -> jax.Array:
    normal = lax.bitcast_convert_type((byte + 960) << 20, jnp.float32)
    return jnp.where(byte >= 8, normal, byte.astype(jnp.float32) * (1 / 512))


def _codes(group: list[jax.Array], byte: jax.Array, form: Format) -> jax.Array:
    shape = group[0].shape
    if form.scale_dtype == jnp.float8_e4m3fn:
        scale = lax.broadcast_in_dim(_e4m3_value(byte), shape, [0])
        return _packed([_fp4_code(part, part, scale) for part in group])
    reciprocal = lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)
    reciprocal = lax.broadcast_in_dim(reciprocal, shape, [0])
    if form.bits == 8:
        scaled = group[0] * reciprocal
        return jnp.minimum(jnp.maximum(scaled, -FP8_MAX), FP8_MAX).astype(jnp.float8_e4m3fn)
    return _packed([_fp4_code(part * reciprocal, part, 1.0) for part in group])


def _packed(codes: list[jax.Array]) -> jax.Array:
    even, odd = codes
    return (even | (odd << 4)).astype(jnp.uint8)


def _fp4_code(x: jax.Array, signed: jax.Array, scale: jax.Array | float) -> jax.Array:
    """int32 e2m1 codes of `x / scale` with the sign of `signed`; a midpoint goes to the even one,
    hence both kinds of comparison."""
    size = jnp.maximum(x, -x)
    code = jnp.where(size > 0.25 * scale, 1, 0)
    for border, wins in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        above = size >= border * scale if wins else size > border * scale
        code += jnp.where(above, 1, 0)
    code += jnp.where(size > 5.0 * scale, 1, 0)
    sign = lax.shift_right_logical(lax.bitcast_convert_type(signed, jnp.int32), 31)
    return code | (sign << 3)
