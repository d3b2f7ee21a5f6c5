"""Goal: each token goes to its best experts and gets their weighted sum and the shared expert's.
Method: a float64 oracle that sorts and sums token by token; biases, ties, images and padding are
told apart by logits chosen for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.layers.hyper_connections import Residual
from deepinfer_jax.layers.moe import feed_forward, moe, route
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import (
    AttentionParameters,
    ExpertParameters,
    HyperParameters,
    LayerParameters,
    MoeParameters,
)
from deepinfer_jax.precision import CacheFormat, Precision
from pallas_kernels.reference import hyper_mix
from pallas_kernels.scaled_array import FP4_ROW32, FP8_32, FP8_BLOCK32, Format
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import (
    CONFIG,
    Row,
    decode,
    encode,
    f64,
    quantise_dequantise,
)

EXPERTS, CHOSEN, NUM_TOKENS = 6, 2, 8
HIDDEN, FFN = CONFIG.hidden_size, CONFIG.moe_intermediate_size
ROWS = [Row(4, 5, 1), Row(0, 2, 2)]
"""Seven tokens and one of padding."""


@pytest.fixture
def parameters(rng: np.random.Generator) -> MoeParameters:
    return MoeParameters(
        gate=by_hand.weight(rng, EXPERTS, HIDDEN, size=2),
        bias=jnp.asarray(rng.uniform(-1, 1, EXPERTS), jnp.float32),
        bias_vl=jnp.asarray(rng.uniform(-1, 1, EXPERTS), jnp.float32),
        shared=ExpertParameters(
            w1=by_hand.weight(rng, FFN, HIDDEN, size=2),
            w3=by_hand.weight(rng, FFN, HIDDEN, size=2),
            w2=by_hand.weight(rng, HIDDEN, FFN),
        ),
        experts=ExpertParameters(
            w1=by_hand.weight(rng, EXPERTS, FFN, HIDDEN, size=2),
            w3=by_hand.weight(rng, EXPERTS, FFN, HIDDEN, size=2),
            w2=by_hand.weight(rng, EXPERTS, HIDDEN, FFN),
        ),
    )


@pytest.fixture
def x(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.standard_normal((NUM_TOKENS, HIDDEN)), jnp.float32)


def routed(
    step: StepContext, x: jax.Array, parameters: MoeParameters
) -> tuple[jax.Array, jax.Array]:
    return route(x, parameters, CHOSEN, step)


def mixed(step: StepContext, x: jax.Array, parameters: MoeParameters) -> jax.Array:
    return moe(x, parameters, CHOSEN, step)


def route_oracle(
    x: jax.Array, parameters: MoeParameters, bias: jax.Array
) -> list[tuple[list[int], list[float]]]:
    out = []
    for logits in f64(x) @ f64(parameters.gate).T:
        affinity = np.sqrt(np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0))
        biased = affinity + f64(bias)
        chosen = sorted(range(EXPERTS), key=lambda e, b=biased: (-b[e], e))[:CHOSEN]
        total = affinity[chosen].sum()
        out.append((chosen, (CONFIG.routed_scaling_factor * affinity[chosen] / total).tolist()))
    return out


def test_routes_of_text_and_images(parameters: MoeParameters, x: jax.Array) -> None:
    step = by_hand.step_of(ROWS, NUM_TOKENS, images=(1, 2, 6))
    index, weight = by_hand.run(routed, step, x, parameters)
    assert index.dtype == jnp.int32
    assert weight.dtype == jnp.float32
    text = route_oracle(x, parameters, parameters.bias)
    image = route_oracle(x, parameters, parameters.bias_vl)
    assert [set(route[0]) for route in text] != [set(route[0]) for route in image]
    for t in range(7):
        experts, weights = (image if t in (1, 2, 6) else text)[t]
        assert index[t].tolist() == experts
        np.testing.assert_allclose(weight[t], weights, rtol=1e-5)
    # The last token is padding, and must not cost anything in an expert.
    np.testing.assert_array_equal(weight[7], [0.0, 0.0])


def test_equal_experts_are_taken_in_order(parameters: MoeParameters, x: jax.Array) -> None:
    zero = by_hand.filled(0, EXPERTS)
    tied = dataclasses.replace(parameters, gate=by_hand.filled(0, EXPERTS, HIDDEN), bias=zero)
    step = by_hand.step_of(ROWS, NUM_TOKENS)
    index, weight = by_hand.run(routed, step, x, tied)
    np.testing.assert_array_equal(index, [[0, 1]] * NUM_TOKENS)
    np.testing.assert_allclose(weight[:7], np.full((7, 2), 0.75), rtol=1e-6)


def test_a_bias_chooses_and_does_not_weigh(parameters: MoeParameters, x: jax.Array) -> None:
    step = by_hand.step_of(ROWS, NUM_TOKENS)
    bias = jnp.asarray([0.0, 0, 0, 0, 1000, 0])
    index, weight = by_hand.run(routed, step, x, dataclasses.replace(parameters, bias=bias))
    assert (index[:, 0] == 4).all()
    assert float(weight[:7].max()) < CONFIG.routed_scaling_factor
    for t, (experts, weights) in enumerate(route_oracle(x, parameters, bias)[:7]):
        assert index[t].tolist() == experts
        np.testing.assert_allclose(weight[t], weights, rtol=1e-5)


def test_extreme_logits_stay_finite(parameters: MoeParameters) -> None:
    """Softplus of a large logit is the logit; of a very negative one, nothing."""
    step = by_hand.step_of(ROWS, NUM_TOKENS)
    ones, zero = by_hand.filled(1, NUM_TOKENS, HIDDEN), by_hand.filled(0, EXPERTS)

    def with_logits(*logits: float) -> MoeParameters:
        gate = np.zeros((EXPERTS, HIDDEN), np.float32)
        gate[:, 0] = logits
        return dataclasses.replace(parameters, gate=jnp.asarray(gate), bias=zero)

    positive = with_logits(400, 100, -300, -300, -300, -300)
    index, weight = by_hand.run(routed, step, ones, positive)
    np.testing.assert_array_equal(index[0], [0, 1])
    np.testing.assert_allclose(weight[0], [1.0, 0.5], rtol=1e-6)
    # All affinities vanish: nothing is divided by zero.
    _, weight = by_hand.run(routed, step, ones, with_logits(*[-300.0] * EXPERTS))
    np.testing.assert_array_equal(weight, np.zeros((NUM_TOKENS, CHOSEN)))


def rounded(x: np.ndarray, form: Format | None) -> np.ndarray:
    return f64(quantise_dequantise(jnp.asarray(x, jnp.float32), form))


def expert_oracle(
    x: np.ndarray, expert: ExpertParameters, weight: float, form: Format | None
) -> np.ndarray:
    limit = CONFIG.swiglu_limit
    w1, w3, w2 = (f64(w) for w in (expert.w1, expert.w3, expert.w2))
    x = rounded(x, form)
    gate = np.minimum(w1 @ x, limit)
    hidden = weight * gate / (1 + np.exp(-gate)) * np.clip(w3 @ x, -limit, limit)
    return w2 @ rounded(hidden, form)


def moe_oracle(x: jax.Array, parameters: MoeParameters, form: Format | None = None) -> np.ndarray:
    out = np.zeros(x.shape)
    for t, (chosen, weights) in enumerate(route_oracle(x, parameters, parameters.bias)):
        out[t] = expert_oracle(f64(x[t]), parameters.shared, 1.0, form)
        for e, g in zip(chosen, weights, strict=True):
            # The last token is padding.
            if t < 7:
                experts = parameters.experts
                expert = ExpertParameters(experts.w1[e], experts.w3[e], experts.w2[e])
                out[t] += expert_oracle(f64(x[t]), expert, g, form)
    return out


def test_routed_and_shared_experts_are_summed(parameters: MoeParameters, x: jax.Array) -> None:
    step = by_hand.step_of(ROWS, NUM_TOKENS)
    got = by_hand.run(mixed, step, x, parameters)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, moe_oracle(x, parameters), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantise_activations", [False, True])
def test_packed_experts_round_their_inputs_when_asked(
    quantise_activations: bool, parameters: MoeParameters, x: jax.Array
) -> None:
    shared = [encode(w, FP8_BLOCK32) for w in jax.tree.leaves(parameters.shared)]
    experts = [encode(w, FP4_ROW32) for w in jax.tree.leaves(parameters.experts)]
    packed = dataclasses.replace(
        parameters, shared=ExpertParameters(*shared), experts=ExpertParameters(*experts)
    )
    widened = dataclasses.replace(
        parameters,
        shared=ExpertParameters(*(decode(w) for w in shared)),
        experts=ExpertParameters(*(decode(w) for w in experts)),
    )
    precision = Precision(jnp.float32, CacheFormat.NOQ, quantise_activations)
    step = by_hand.step_of(ROWS, NUM_TOKENS, precision=precision)
    got = by_hand.run(mixed, step, x, packed)
    # The router's weights are never quantised, so its input is not rounded: same experts.
    expected = moe_oracle(x, widened, FP8_32 if quantise_activations else None)
    # A sum in another order may move a hidden value to the neighbouring FP8 code.
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 if quantise_activations else 1e-4)
    assert np.abs(got - expected).mean() < 1e-3
    if quantise_activations:
        assert np.abs(got - moe_oracle(x, widened)).mean() > 0.01


def half_block(
    step: StepContext, residual: Residual, parameters: LayerParameters
) -> tuple[jax.Array, Residual]:
    seen: dict[str, jax.Array] = {}
    step = StepContext(
        step.config,
        step.precision,
        step.tokens,
        step.is_image,
        step.block_tables,
        seen.__setitem__,
    )
    after = feed_forward(residual, parameters, CHOSEN, step)
    return seen["ffn_out"], after


def test_a_half_block_reads_and_leaves_its_output_pending(
    parameters: MoeParameters, rng: np.random.Generator
) -> None:
    rows = 24
    hyper = HyperParameters(
        by_hand.weight(rng, rows, 4 * HIDDEN), by_hand.filled(0, rows), by_hand.filled(1, 3)
    )
    unused = by_hand.filled(0, 1, 1)
    layer = LayerParameters(
        attn=AttentionParameters(
            wq_a=unused,
            wq_b=unused,
            wkv=unused,
            wo_a=unused,
            wo_b=unused,
            q_norm=unused,
            kv_norm=unused,
            attn_sink=unused,
        ),
        attn_norm=unused,
        ffn_norm=by_hand.norm_weight(rng, HIDDEN),
        hc_attn=HyperParameters(unused, unused, unused),
        hc_ffn=hyper,
        ffn=parameters,
    )
    streams = jnp.asarray(rng.standard_normal((NUM_TOKENS, 4, HIDDEN)), jnp.float32)
    pre = jnp.asarray(rng.random((NUM_TOKENS, 4)), jnp.float32)
    step = by_hand.step_of(ROWS, NUM_TOKENS)
    out, after = by_hand.run(half_block, step, Residual(streams, pre), layer)
    read = np.einsum("ts,tsd->td", f64(pre), f64(streams))
    x = by_hand.rms(read, layer.ffn_norm)
    expected = by_hand.run(mixed, step, jnp.asarray(x, jnp.float32), parameters)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(after.output, out)
    np.testing.assert_array_equal(after.streams, streams)
    coefficients = jax.jit(hyper_mix.coefficients, static_argnames=("iterations", "eps"))
    mix = coefficients(
        streams,
        hyper.fn,
        hyper.scale,
        hyper.base,
        iterations=CONFIG.hc_sinkhorn_iters,
        eps=CONFIG.hc_eps,
    )
    np.testing.assert_allclose(after.pre, mix.pre, rtol=1e-5)
    np.testing.assert_allclose(after.mix.comb, mix.comb, rtol=1e-4)
