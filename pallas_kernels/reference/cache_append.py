"""Quantise new rows and write them into blocks or a ring: what it means, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import ScaledArray, encode


def cache_append(
    pool: ScaledArray | jax.Array, values: jax.Array, outer: jax.Array, inner: jax.Array
) -> ScaledArray | jax.Array:
    """See `pallas_kernels.ops.cache_append`."""
    if not isinstance(pool, ScaledArray):
        return _write(pool, values.astype(pool.dtype), outer, inner)
    packed = encode(values, pool.format)
    return ScaledArray(
        _write(pool.codes, packed.codes, outer, inner),
        _write(pool.scale, packed.scale, outer, inner),
        pool.format,
    )


def _write(pool: jax.Array, rows: jax.Array, outer: jax.Array, inner: jax.Array) -> jax.Array:
    # A negative index would wrap around; one past the end is dropped.
    outer = jnp.where(outer < 0, pool.shape[0], outer)
    return pool.at[outer, inner].set(rows, mode="drop")
