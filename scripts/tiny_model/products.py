"""Products of the trained network, with gradients of their own, and rounding that gradients pass.

*Why gradients of their own*: the CPU backend has fast products for the gradients of weights, keys
and values only with two contracted dimensions, and operands that are already in the compute type.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import Format, quantise_dequantise


@jax.custom_vjp
def _straight_through(values: jax.Array, rounded: jax.Array) -> jax.Array:
    return rounded


_straight_through.defvjp(
    lambda values, rounded: (rounded, None), lambda _, gradient: (gradient, None)
)


def rounded(values: jax.Array, form: Format | str | None) -> jax.Array:
    """`values` as stored in `form` (a dtype name of a checkpoint counts), with the gradient of
    the values themselves."""
    if form is None or form == "F32":
        return values
    if form == "BF16":
        return values.astype(jnp.bfloat16).astype(values.dtype)
    assert isinstance(form, Format), form
    return _straight_through(values, quantise_dequantise(jax.lax.stop_gradient(values), form))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """`x` [..., K] times `weight` [N, K], float32."""
    return _dot("...k,nk->...n", x.astype(dtype), weight.astype(dtype))


def _linear_forward(x: jax.Array, weight: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    narrow = x.astype(dtype), weight.astype(dtype)
    return _dot("...k,nk->...n", *narrow), (*narrow, jnp.zeros((), x.dtype))


def _linear_backward(dtype: Any, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, like = saved
    gradient = gradient.astype(dtype)
    of_x = _dot("...n,nk->...k", gradient, weight).astype(like.dtype)
    split = (math.gcd(math.prod(x.shape[:-1]), 16), -1)
    rows, columns = x.reshape(*split, x.shape[-1]), gradient.reshape(*split, gradient.shape[-1])
    return of_x, _dot("btn,btk->nk", columns, rows)


linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def compare(q: jax.Array, k: jax.Array, dtype: Any) -> jax.Array:
    """Products [N, Q, E] of queries [N, Q, D] with keys [N, E, D], float32."""
    return _dot("nqd,ned->nqe", q.astype(dtype), k.astype(dtype))


def _compare_forward(q: jax.Array, k: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    narrow = q.astype(dtype), k.astype(dtype)
    return _dot("nqd,ned->nqe", *narrow), (*narrow, jnp.zeros((), q.dtype), jnp.zeros((), k.dtype))


def _compare_backward(dtype: Any, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, like_q, like_k = saved
    gradient = gradient.astype(dtype)
    of_q = _dot("nqe,ned->nqd", gradient, k)
    return of_q.astype(like_q.dtype), _over_queries(gradient, q).astype(like_k.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def weigh(weights: jax.Array, v: jax.Array, dtype: Any) -> jax.Array:
    """Sums [N, Q, D] of values [N, E, D] with weights [N, Q, E], float32."""
    return _dot("nqe,ned->nqd", weights.astype(dtype), v.astype(dtype))


def _weigh_forward(weights: jax.Array, v: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    narrow = weights.astype(dtype), v.astype(dtype)
    like = jnp.zeros((), weights.dtype), jnp.zeros((), v.dtype)
    return _dot("nqe,ned->nqd", *narrow), (*narrow, *like)


def _weigh_backward(dtype: Any, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, v, like_weights, like_v = saved
    gradient = gradient.astype(dtype)
    of_weights = _dot("nqd,ned->nqe", gradient, v)
    return of_weights.astype(like_weights.dtype), _over_queries(weights, gradient).astype(
        like_v.dtype
    )


def _over_queries(x: jax.Array, y: jax.Array) -> jax.Array:
    """[N, E, D]: sums over queries of x [N, Q, E] times y [N, Q, D]."""
    split = (x.shape[0], -1, math.gcd(x.shape[1], 4))
    return _dot("nqhe,nqhd->ned", x.reshape(*split, x.shape[-1]), y.reshape(*split, y.shape[-1]))


compare.defvjp(_compare_forward, _compare_backward)
weigh.defvjp(_weigh_forward, _weigh_backward)


def _dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=precision).astype(jnp.float32)


def with_previous_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """[B, C, 2 W, D] from [B, T, D]: each chunk of W after the one before it (zeros at first)."""
    chunks = x.reshape(x.shape[0], -1, chunk, x.shape[-1])
    before = jnp.pad(chunks[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([before, chunks], axis=2)


@jax.named_scope("cross_entropy")
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """[...] float32 negative log likelihood."""
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
