"""Residual streams of the trained network: one array [B, T, D] each, which keeps the sums over
streams free of strides.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Streams = list[jax.Array]
"""The residual streams, [B, T, D] each."""


class Mix(NamedTuple):
    """pre, post [B, T, S] and comb [B, T, S, S] of one sub-layer."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


@jax.named_scope("collapse")
def collapse(streams: Streams, pre: jax.Array) -> jax.Array:
    """[B, T, D]: streams summed with weights `pre` [B, T, S]."""
    parts = [pre[..., s, None] * stream.astype(jnp.float32) for s, stream in enumerate(streams)]
    return sum(parts[1:], parts[0]).astype(streams[0].dtype)


@jax.named_scope("expand")
def expand(streams: Streams, output: jax.Array, mix: Mix) -> Streams:
    """Streams after a sub-layer put out `output` [B, T, D]."""
    new = []
    for k in range(len(streams)):
        total = mix.post[..., k, None] * output.astype(jnp.float32)
        for j, stream in enumerate(streams):
            total = total + mix.comb[..., j, k, None] * stream.astype(jnp.float32)
        new.append(total.astype(streams[0].dtype))
    return new


def sinkhorn(logits: jax.Array, size: int, iterations: int, eps: float) -> jax.Array:
    """The reference's projection; tokens lie last while it runs, which vectorises."""
    lead = logits.shape[:-1]
    a = logits.reshape(-1, size * size).T.reshape(size, size, -1)
    a = jax.nn.softmax(a, axis=1) + eps
    a = a / (jnp.sum(a, axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        a = a / (jnp.sum(a, axis=1, keepdims=True) + eps)
        a = a / (jnp.sum(a, axis=0, keepdims=True) + eps)
    return a.reshape(size * size, -1).T.reshape(*lead, size, size)
