"""Dense product with a block-scaled weight: what it means, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import Format, ScaledArray, decode, quantise_dequantise


def scaled_matmul(
    x: jax.Array, weight: ScaledArray | jax.Array, *, activation_format: Format | None
) -> jax.Array:
    """See `pallas_kernels.ops.scaled_matmul`."""
    values = quantise_dequantise(x, activation_format).astype(jnp.float32)
    return jax.lax.dot_general(
        values,
        decode(weight),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
