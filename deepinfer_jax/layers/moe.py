"""Mixture of experts: a router, routed experts and one shared expert."""

import jax
import jax.numpy as jnp

from deepinfer_jax.layers.expert_exchange import routed_experts
from deepinfer_jax.layers.hyper_connections import Residual, begin
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import ExpertParameters, LayerParameters, MoeParameters

_SUM_EPS = 1e-20


def feed_forward(
    residual: Residual, parameters: LayerParameters, num_experts_per_token: int, step: StepContext
) -> Residual:
    """The second half of a block: the residual with the output of its experts pending."""
    x, residual = begin(residual, parameters.hc_ffn, step)
    step.probe("hc_ffn", residual.mix)
    x = step.norm(x, parameters.ffn_norm)
    out = moe(x, parameters.ffn, num_experts_per_token, step)
    step.probe("ffn_out", out)
    residual = residual._replace(output=out)
    step.probe("residual", residual)
    return residual


def moe(
    x: jax.Array, parameters: MoeParameters, num_experts_per_token: int, step: StepContext
) -> jax.Array:
    """Output [T, hidden] for the normalised input `x`."""
    c = step.config
    with jax.named_scope("moe"):
        index, weight = route(x, parameters, num_experts_per_token, step)
        out = routed_experts(
            x, index, weight, parameters.experts, step.groups, step.precision, c.swiglu_limit
        )
        out = out + _shared(x, parameters.shared, step)
        return out.astype(step.precision.compute_dtype)


def route(
    x: jax.Array, parameters: MoeParameters, num_experts_per_token: int, step: StepContext
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts [T, K] int32 and their weights [T, K] float32.

    Affinity is sqrt(softplus(logit)). A bias, another one for image tokens, takes part in the
    choice and never in the weight. Padding tokens get weight 0.
    """
    affinity = jnp.sqrt(jax.nn.softplus(step.product(x, parameters.gate)))
    bias = jnp.where(step.is_image[:, None], parameters.bias_vl, parameters.bias)
    _, index = jax.lax.top_k(affinity + bias, num_experts_per_token)
    chosen = jnp.take_along_axis(affinity, index, axis=1)
    total = jnp.sum(chosen, axis=1, keepdims=True) + _SUM_EPS
    weight = step.config.routed_scaling_factor * chosen / total
    step.probe("route_indices", index)
    step.probe("route_weights", weight)
    return index.astype(jnp.int32), jnp.where(step.tokens.is_real[:, None], weight, 0.0)


def _shared(x: jax.Array, expert: ExpertParameters, step: StepContext) -> jax.Array:
    """The same feed-forward without a route weight, float32 [T, hidden]."""
    limit = step.config.swiglu_limit
    gate = jnp.minimum(step.product(x, expert.w1), limit)
    up = jnp.clip(step.product(x, expert.w3), -limit, limit)
    return step.product(gate * jax.nn.sigmoid(gate) * up, expert.w2)
