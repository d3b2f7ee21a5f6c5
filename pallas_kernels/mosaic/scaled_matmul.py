"""Dense product with a block-scaled weight, as a GPU kernel: `product` with one expert.

The input is quantised and widened by XLA in one pass that also brings it into bfloat16, in which
every FP8 value times its scale is exact.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.product import check_weights, transposed_product
from pallas_kernels.scaled_array import Format, ScaledArray, quantise_dequantise
from pallas_kernels.targets import Target
from pallas_kernels.tiles import product_tile


def scaled_matmul(
    x: jax.Array,
    weight: ScaledArray | jax.Array,
    *,
    activation_format: Format | None,
    target: Target,
    interpret: Any,
) -> jax.Array:
    """See `pallas_kernels.ops.scaled_matmul`.

    Raises:
        NotImplementedError: `weight` is not packed or no multiple of the tiles, or `x` is float32
            and stays unquantised.
    """
    check_weights("weight", weight)
    assert isinstance(weight, ScaledArray)
    rows = as_bfloat16(x.reshape(-1, x.shape[-1]), activation_format)
    n, k = weight.shape
    num_rows = rows.shape[0]
    shape = (*x.shape[:-1], n)
    if not num_rows:
        return jnp.zeros(shape, jnp.float32)
    tile = product_tile(target, "scaled_matmul", num_rows, n, k)
    rows = jnp.pad(rows, ((0, -num_rows % tile.rows), (0, 0)))
    out = transposed_product(
        rows,
        (weight[None],),
        jnp.zeros(rows.shape[0] // tile.rows, jnp.int32),
        None,
        lambda product: product,
        tile=tile,
        interpret=interpret,
    )
    return out[:, :num_rows].T.reshape(shape)


def as_bfloat16(x: jax.Array, activation_format: Format | None) -> jax.Array:
    """`x` quantised and widened, in bfloat16; exact for every activation format.

    Raises:
        NotImplementedError: `x` is float32 and stays so.
    """
    if activation_format is None and x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"x is {x.dtype} and is not quantised; the tensor core takes bf16"
        )
    return quantise_dequantise(x.astype(jnp.float32), activation_format).astype(jnp.bfloat16)
