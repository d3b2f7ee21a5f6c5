"""Gated feed-forward products of routed experts: what they mean, in plain jax.numpy.

*Why every expert sees every token here.* On a CPU one dense product over all experts beats the
sorted form: XLA turns `lax.ragged_dot` into the same dense product with the rows repeated once
per chosen expert. Weights of experts that a token did not choose are exactly zero.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import Format, ScaledArray, decode, quantise_dequantise

_HIGHEST = jax.lax.Precision.HIGHEST


def grouped_matmul(
    x: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
    w1: ScaledArray | jax.Array,
    w3: ScaledArray | jax.Array,
    w2: ScaledArray | jax.Array,
    *,
    limit: float,
    activation_format: Format | None,
) -> jax.Array:
    """See `pallas_kernels.ops.grouped_matmul`."""
    num_experts = w1.shape[0]
    values = quantise_dequantise(x, activation_format).astype(jnp.float32)
    chosen = jax.nn.one_hot(expert_index, num_experts, dtype=jnp.float32)
    weight = jnp.einsum("tk,tke->te", expert_weight, chosen, precision=_HIGHEST)
    gate = jnp.einsum("td,efd->tef", values, decode(w1), precision=_HIGHEST)
    up = jnp.einsum("td,efd->tef", values, decode(w3), precision=_HIGHEST)
    hidden = swiglu(gate, up, limit) * weight[:, :, None]
    hidden = quantise_dequantise(hidden, activation_format)
    return jnp.einsum("tef,edf->td", hidden, decode(w2), precision=_HIGHEST)


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)`; the gate is clamped from above only."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(gate) * jnp.clip(up, -limit, limit)
