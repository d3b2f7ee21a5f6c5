"""Goal: the body of all products covers packed weights whose tiles divide them, uses each tile's
own expert, leaves tiles without an expert alone, and adds up a row alike alone and in company.
Method: the interpreter, on weights of two experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.product import check_weights, transposed_product
from pallas_kernels.scaled_array import FP4_ROW32, FP8_BLOCK32, NVFP4_16, decode, encode
from pallas_kernels.selection import INTERPRET
from pallas_kernels.tiles import ProductTile
from tests.pallas_kernels.interpreted import TIME_LIMIT

N, K = 64, 64


def multiply(x: jax.Array, weight: Any, experts: list[int], rows: int = 8) -> np.ndarray:
    made = transposed_product(
        x,
        (weight,),
        jnp.asarray(experts, jnp.int32),
        None,
        lambda product: product,
        tile=ProductTile(rows, 2),
        interpret=INTERPRET,
    )
    return np.asarray(made).T


@TIME_LIMIT
def test_tiles_multiply_with_their_own_expert() -> None:
    keys = jax.random.split(jax.random.key(3))
    weight = encode(jax.random.normal(keys[0], (2, N, K)), FP4_ROW32)
    x = jax.random.normal(keys[1], (24, K)).astype(jnp.bfloat16)
    made = multiply(x, weight, [1, -1, 0])
    expected = np.einsum("tk,enk->etn", np.asarray(x, np.float64), np.asarray(decode(weight)))
    np.testing.assert_allclose(made[:8], expected[1, :8], atol=1e-4)
    np.testing.assert_allclose(made[16:], expected[0, 16:], atol=1e-4)
    # The interpreter fills what nobody wrote with NaN.
    assert np.all(np.isnan(made[8:16]))
    alone = multiply(jnp.roll(x[16:], 3, axis=0), weight, [0])
    np.testing.assert_array_equal(np.roll(alone, -3, axis=0), made[16:])
    in_company = multiply(x[8:], weight, [0], rows=16)
    np.testing.assert_array_equal(in_company[8:], made[16:])


def test_what_is_not_covered_is_named() -> None:
    with pytest.raises(NotImplementedError, match="w is not quantised"):
        check_weights("w", jnp.zeros((64, 64)))
    with pytest.raises(NotImplementedError, match="w has format nvfp4_16"):
        check_weights("w", encode(jnp.zeros((64, 64)), NVFP4_16))
    with pytest.raises(
        NotImplementedError, match=r"w is \(2, 32, 64\); N must be a multiple of 64"
    ):
        check_weights("w", encode(jnp.zeros((2, 32, 64)), FP8_BLOCK32))
    check_weights("w", encode(jnp.zeros((2, 64, 64)), FP4_ROW32))
