"""Mixing of residual streams (hyper-connections): what it means, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.mix import Mix

_HIGHEST = jax.lax.Precision.HIGHEST
_NORM_EPS = 1e-20


def hyper_mix(
    streams: jax.Array,
    output: jax.Array | None,
    mix: Mix | None,
    pre: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    iterations: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, Mix]:
    """See `pallas_kernels.ops.hyper_mix`."""
    if output is not None and mix is not None:
        streams = expand(streams, output, mix)
    return (
        streams,
        collapse(streams, pre),
        coefficients(streams, fn, scale, base, iterations=iterations, eps=eps),
    )


def expand(streams: jax.Array, output: jax.Array, mix: Mix) -> jax.Array:
    """Streams [T, S, D] after a sub-layer put out `output` [T, D]; `comb` sums its first index."""
    mixed = jnp.einsum("tjk,tjd->tkd", mix.comb, streams.astype(jnp.float32), precision=_HIGHEST)
    added = mix.post[:, :, None] * output.astype(jnp.float32)[:, None, :]
    return (added + mixed).astype(streams.dtype)


def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """Input [T, D] of a sub-layer: streams [T, S, D] summed with weights `pre` [T, S]."""
    summed = jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1)
    return summed.astype(streams.dtype)


def coefficients(
    streams: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    iterations: int,
    eps: float,
) -> Mix:
    """The mix of one sub-layer from its streams: S pre, S post and S x S comb weights a token."""
    num_tokens, num_streams, _ = streams.shape
    flat = streams.reshape(num_tokens, fn.shape[1]).astype(jnp.float32)
    inverse_norm = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + _NORM_EPS)
    # Project first, scale after: the published order, and one pass over the streams.
    m = jnp.einsum("td,md->tm", flat, fn, precision=_HIGHEST) * inverse_norm
    s = num_streams
    pre = jax.nn.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
    post = 2.0 * jax.nn.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(num_tokens, s, s)
    return Mix(pre, post, sinkhorn(comb, iterations=iterations, eps=eps))


def sinkhorn(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Nearly doubly stochastic matrices from logits [T, S, S]; ends on columns, which sum to 1."""
    a = jax.nn.softmax(logits, axis=-1) + eps
    a = a / (jnp.sum(a, axis=-2, keepdims=True) + eps)

    def normalise(_: int, a: jax.Array) -> jax.Array:
        a = a / (jnp.sum(a, axis=-1, keepdims=True) + eps)
        return a / (jnp.sum(a, axis=-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, normalise, a)
