"""Goal: streams are written, read and mixed with the published coefficients.
Method: golden coefficients, streams and column sums; a float64 oracle with loops, written from
the equations, on three streams so that no dimension is mistaken for another.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from pallas_kernels.cases import Case
from pallas_kernels.mix import Mix
from pallas_kernels.reference import hyper_mix as reference
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick

EPS = 1e-6
hyper_mix = jax.jit(ops.hyper_mix, static_argnames=("iterations", "eps"))
hyper_finish, hyper_collapse = jax.jit(ops.hyper_finish), jax.jit(ops.hyper_collapse)
coefficients = jax.jit(reference.coefficients, static_argnames=("iterations", "eps"))


def to_float32(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def assert_close(got: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def sinkhorn_oracle(logits: np.ndarray, iterations: int) -> np.ndarray:
    a = np.exp(logits - logits.max(axis=1, keepdims=True))
    a = a / a.sum(axis=1, keepdims=True) + EPS
    a = a / (a.sum(axis=0, keepdims=True) + EPS)
    for _ in range(iterations - 1):
        a = a / (a.sum(axis=1, keepdims=True) + EPS)
        a = a / (a.sum(axis=0, keepdims=True) + EPS)
    return a


def test_golden_coefficients_and_streams(golden: Path) -> None:
    with np.load(golden / "ops.npz") as data:
        streams, sub_out = jnp.asarray(data["mhc_streams"]), jnp.asarray(data["mhc_sub_out"])
        fn, scale, base = (jnp.asarray(data[f"mhc_{name}"]) for name in ("fn", "scale", "base"))
        mix = coefficients(streams, fn, scale, base, iterations=20, eps=EPS)
        for name in ("pre", "post", "comb"):
            np.testing.assert_allclose(getattr(mix, name), data[f"mhc_{name}"], rtol=0, atol=2e-6)
        # Sums show that the last division is by columns: rows are only nearly one.
        sums = np.asarray(mix.comb).sum(axis=-2), np.asarray(mix.comb).sum(axis=-1)
        np.testing.assert_allclose(sums[0], data["sinkhorn_col_sums"], rtol=0, atol=5e-7)
        np.testing.assert_allclose(sums[1], data["sinkhorn_row_sums"], rtol=0, atol=5e-7)
        after = hyper_finish(streams, sub_out, mix)
        np.testing.assert_allclose(after, data["mhc_new_streams_fp32"], rtol=0, atol=5e-6)
        narrow = jnp.asarray(data["mhc_streams"], jnp.bfloat16)
        after = hyper_finish(narrow, jnp.asarray(data["mhc_sub_out"], jnp.bfloat16), mix)
        assert after.dtype == jnp.bfloat16
        expected = data["mhc_new_streams_bf16_ref"]
        np.testing.assert_allclose(np.asarray(after, np.float32), expected, rtol=2**-7, atol=0.02)
        read = hyper_collapse(narrow, mix.pre)
        assert read.dtype == jnp.bfloat16
        expected = data["mhc_collapse_bf16_ref"]
        np.testing.assert_allclose(np.asarray(read, np.float32), expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_rounds(iterations: int, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((2, 3, 3)) * 4
    apply = jax.jit(reference.sinkhorn, static_argnames=("iterations", "eps"))
    got = apply(jnp.asarray(logits, jnp.float32), iterations=iterations, eps=EPS)
    expected = [sinkhorn_oracle(one, iterations) for one in logits]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got).sum(axis=1), 1, atol=1e-5)
    if iterations == 1:
        assert np.abs(np.asarray(got).sum(axis=2) - 1).max() > 1e-3


def test_one_pass_finishes_and_starts(rng: np.random.Generator) -> None:
    num_tokens, s, width = 4, 3, 5
    streams = rng.standard_normal((num_tokens, s, width)) * 3
    output = rng.standard_normal((num_tokens, width))
    post, comb = rng.random((num_tokens, s)), rng.random((num_tokens, s, s))
    pre = rng.random((num_tokens, s))
    fn = rng.standard_normal((s * (2 + s), s * width))
    scale, base = np.array([0.7, 1.3, 0.4]), rng.standard_normal(s * (2 + s))
    pending = Mix(*to_float32(np.zeros((num_tokens, s)), post, comb))
    after, read, mix = hyper_mix(
        *to_float32(streams, output),
        pending,
        *to_float32(pre, fn, scale, base),
        iterations=3,
        eps=EPS,
    )
    for t in range(num_tokens):
        new = np.zeros((s, width))
        for k in range(s):
            new[k] = post[t, k] * output[t]
            for j in range(s):
                new[k] += comb[t, j, k] * streams[t, j]
        assert_close(after[t], new)
        assert_close(read[t], pre[t] @ new)
        flat = new.reshape(-1)
        m = fn @ flat / np.sqrt(np.mean(flat**2))
        assert_close(mix.pre[t], sigmoid(m[:s] * 0.7 + base[:s]) + EPS)
        assert_close(mix.post[t], 2 * sigmoid(m[s : 2 * s] * 1.3 + base[s : 2 * s]))
        logits = (m[2 * s :] * 0.4 + base[2 * s :]).reshape(s, s)
        assert_close(mix.comb[t], sinkhorn_oracle(logits, 3))


def test_nothing_pending_leaves_the_streams(rng: np.random.Generator) -> None:
    streams = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
    pre = jnp.asarray([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    zeros = to_float32(np.zeros((15, 12)), np.zeros(3), np.zeros(15))
    after, read, mix = hyper_mix(streams, None, None, pre, *zeros, iterations=2, eps=EPS)
    np.testing.assert_array_equal(after, streams)
    np.testing.assert_array_equal(read, [streams[0, 0], streams[1, 2]])
    np.testing.assert_allclose(mix.pre, np.full((2, 3), 0.5 + EPS), rtol=1e-6)
    np.testing.assert_allclose(mix.post, np.ones((2, 3)), rtol=1e-6)
    np.testing.assert_allclose(mix.comb, np.full((2, 3, 3), 1 / 3), rtol=1e-4)


def test_streams_of_zeros_and_of_tiny_numbers(rng: np.random.Generator) -> None:
    """The norm's epsilon is so small that size does not matter, down to zero itself."""
    fn = jnp.asarray(rng.standard_normal((15, 12)), jnp.float32)
    scale, base = to_float32(np.ones(3), rng.standard_normal(15))
    one = rng.standard_normal((3, 4))
    streams = jnp.asarray(np.stack([one, one * 1e-6, one * 0]), jnp.float32)
    mix = coefficients(streams, fn, scale, base, iterations=5, eps=EPS)
    np.testing.assert_allclose(mix.pre[1], mix.pre[0], rtol=1e-4)
    np.testing.assert_allclose(mix.comb[1], mix.comb[0], rtol=1e-4)
    np.testing.assert_allclose(mix.pre[2], sigmoid(np.asarray(base[:3])) + EPS, rtol=1e-5)


@TIME_LIMIT
@quick("hyper_mix")
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check_case(case)


def test_the_kernel_refuses_what_it_does_not_cover() -> None:
    def call(streams: jax.Array) -> Any:
        pre, fn = jnp.zeros(streams.shape[:2]), jnp.zeros((24, 4 * streams.shape[2]))
        arrays = (streams, None, None, pre, fn, jnp.zeros(3), jnp.zeros(24))
        return ops.hyper_mix(*arrays, iterations=2, eps=1e-6, implementation="interpret")

    with pytest.raises(NotImplementedError, match="expected 4 of a multiple of 64 channels"):
        call(jnp.zeros((1, 4, 96), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="streams is float32; the tensor core takes"):
        call(jnp.zeros((1, 4, 64)))
