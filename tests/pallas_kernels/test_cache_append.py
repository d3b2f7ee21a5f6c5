"""Goal: new rows land in their places, in the format of the pool, and nothing else changes.
Method: a pool of recognisable bytes is written; places meant are compared with the values encoded
alone, all other places bit by bit with what they held. The kernel writes the same bytes, at the
borders between codes and scales too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from pallas_kernels.cases import Case
from pallas_kernels.scaled_array import FP8_32, MXFP4_32, NVFP4_16, Format, ScaledArray, encode
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick, run

append = jax.jit(ops.cache_append)
encode_rows = jax.jit(encode, static_argnums=1)

OUTER = jnp.asarray([2, 0, -1, 4, 2, 1, -5], jnp.int32)
INNER = jnp.asarray([1, 2, 0, 0, 0, 3, 1], jnp.int32)
WRITTEN = {(2, 1): 0, (0, 2): 1, (2, 0): 4}
"""Place -> row. Rows 2 and 6 have a negative block, row 3 one past the end; row 5 stands past the
end of its block."""


def assert_only_meant_places(before: Any, after: Any, rows: Any) -> None:
    before, after, rows = (np.asarray(a) for a in (before, after, rows))
    assert after.dtype == before.dtype
    for place in np.ndindex(4, 3):
        expected = rows[WRITTEN[place]] if place in WRITTEN else before[place]
        assert after[place].tobytes() == expected.tobytes(), place


def garbage(rng: np.random.Generator, like: Any) -> jax.Array:
    """Random bytes, NaN among them."""
    like = np.asarray(like)
    shape = (4, 3, *like.shape[1:-1], like.shape[-1] * like.dtype.itemsize)
    return jnp.asarray(rng.integers(0, 256, shape, np.uint8).view(like.dtype))


@pytest.mark.parametrize("form", [FP8_32, NVFP4_16, MXFP4_32], ids=lambda form: form.name)
def test_quantised_pools_hold_the_rows_encoded(form: Format, rng: np.random.Generator) -> None:
    values = jnp.asarray(rng.standard_normal((7, 32)) * 5, jnp.float32)
    rows = encode_rows(values, form)
    pool = ScaledArray(garbage(rng, rows.codes), garbage(rng, rows.scale), form)
    written = append(pool, values, OUTER, INNER)
    assert isinstance(written, ScaledArray)
    assert written.format is form
    assert_only_meant_places(pool.codes, written.codes, rows.codes)
    assert_only_meant_places(pool.scale, written.scale, rows.scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_plain_pools_keep_their_type(dtype: Any, rng: np.random.Generator) -> None:
    values = jnp.asarray(rng.standard_normal((7, 2, 5)), jnp.float32)
    rows = values.astype(dtype)
    pool = garbage(rng, rows)
    assert_only_meant_places(pool, append(pool, values, OUTER, INNER), rows)


def test_single_numbers_can_be_kept(rng: np.random.Generator) -> None:
    values = jnp.asarray(rng.integers(-1, 99, 7), jnp.int32)
    pool = jnp.full((4, 3), 1000, jnp.int32)
    assert_only_meant_places(pool, append(pool, values, OUTER, INNER), values)


def test_no_rows_change_nothing() -> None:
    pool = jnp.ones((4, 3, 2))
    nothing = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(append(pool, jnp.zeros((0, 2)), nothing, nothing), pool)


def test_a_donated_pool_is_written_in_place() -> None:
    pool = jnp.zeros((4, 3, 2))
    address = pool.unsafe_buffer_pointer()
    write = jax.jit(ops.cache_append, donate_argnums=0)
    written = write(pool, jnp.ones((7, 2)), OUTER, INNER)
    assert written.unsafe_buffer_pointer() == address
    assert pool.is_deleted()


@TIME_LIMIT
@quick("cache_append")
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check_case(case)


def borders(form: Format) -> np.ndarray:
    """[4, 128] values on, just above and just below every border between codes and scales."""
    codes = (
        np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        if form.bits == 4
        else (np.array([1.0625, 17.5, 26.0, 248.0, 432.0, 448.0, 2.0**-10, 2.0**-7 * 1.5]))
    )
    # In e4m3 also one that lies between two.
    scales = np.array([0.5, 1.0, 2.0**-8, 4.0])
    if form is NVFP4_16:
        scales = np.array([0.4375, 1.0625, 1.1875, 2.0**-8 * 0.75])
    values = (scales[:, None] * codes[None, :]).astype(np.float32)
    near = [values, np.nextafter(values, np.float32(9)), np.nextafter(values, np.float32(0))]
    both = np.concatenate([*near, -values], axis=1)
    # The largest value of a block decides about the scale, so there it stays as it is.
    both = np.minimum(both, values.max(axis=1, keepdims=True))
    return np.tile(both, (1, 4)).reshape(4, 128)


@TIME_LIMIT
@pytest.mark.parametrize("form", [FP8_32, NVFP4_16, MXFP4_32], ids=lambda form: form.name)
def test_the_kernel_rounds_as_the_reference_at_every_border(form: Format) -> None:
    pool = encode_rows(jnp.ones((1, 4, 128)), form)
    place = jnp.arange(4, dtype=jnp.int32)
    args = (pool, jnp.asarray(borders(form)), jnp.zeros(4, jnp.int32), place)
    made, meant = (run("cache_append", how, args, {}) for how in ("interpret", "reference"))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(meant), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_kernel_refuses_what_it_does_not_cover() -> None:
    place = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="the pool is not quantised"):
        run(
            "cache_append",
            "interpret",
            (jnp.zeros((1, 1, 128)), jnp.zeros((1, 128)), place, place),
            {},
        )
    pool = encode_rows(jnp.ones((1, 1, 96)), FP8_32)
    with pytest.raises(NotImplementedError, match=r"the pool is \(1, 1, 96\) in fp8_32; expected"):
        run("cache_append", "interpret", (pool, jnp.zeros((1, 96)), place, place), {})
