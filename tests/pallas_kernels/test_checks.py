"""Goal: contents of index arrays are checked in debug mode, and only there.
Method: planted wrong entries through the door, with and without debug mode, and under jit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks, ops
from pallas_kernels.scaled_array import FP8_32, encode


def append(outer: list[int], inner: list[int]) -> Any:
    pool = jnp.zeros((3, 4, 2))
    return ops.cache_append(pool, jnp.ones((2, 2)), jnp.asarray(outer), jnp.asarray(inner))


def test_places_are_checked_in_debug_mode_only() -> None:
    append([0, 0], [1, 9])
    with checks.debug_mode():
        append([0, 5], [1, 1])
        with pytest.raises(ValueError, match=r"inner\[1\] is 9; expected 0 to 3"):
            append([0, 0], [1, 9])
        with pytest.raises(ValueError, match=r"place \(outer, inner\) \(2, 1\) occurs 2 times"):
            append([2, 2], [1, 1])
        append([-1, -1], [1, 1])
    append([0, 0], [1, 9])


def test_a_compiled_call_has_no_contents_to_check() -> None:
    with checks.debug_mode():
        made = jax.jit(append)(jnp.array([0, 0]), jnp.array([1, 9]))
    assert made.shape == (3, 4, 2)


def test_table_entries_of_the_other_operations() -> None:
    key = jnp.zeros((2, 8, 32))
    q, weight = jnp.zeros((1, 1, 32)), jnp.zeros((1, 1))
    one = jnp.zeros(1, jnp.int32)
    with checks.debug_mode():
        with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 2; expected 0 to 1"):
            ops.index_topk(q, weight, key, jnp.array([[0, 2]]), one, one, k=1)
        with pytest.raises(ValueError, match=r"row\[0\] is 1; expected 0 to 0"):
            ops.index_topk(q, weight, key, jnp.array([[0, 1]]), one + 1, one, k=1)
    w = jnp.zeros((2, 32, 32))
    with checks.debug_mode(), pytest.raises(ValueError, match=r"expert_index\[0, 0\] is 2"):
        ops.grouped_matmul(
            jnp.zeros((1, 32)), jnp.array([[2]]), jnp.ones((1, 1)), w, w, w, limit=1.0
        )


def test_types_are_always_checked() -> None:
    with pytest.raises(ValueError, match="inner is float32; expected int32"):
        ops.cache_append(jnp.zeros((3, 4, 2)), jnp.ones((1, 2)), jnp.array([0]), jnp.array([0.5]))


def test_formats_have_names() -> None:
    assert checks.format_name(jnp.zeros(1)) == "unquantised"
    assert checks.format_name(encode(jnp.asarray(np.ones((1, 32))), FP8_32)) == "fp8_32"
