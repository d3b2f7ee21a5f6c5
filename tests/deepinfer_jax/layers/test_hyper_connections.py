"""Goal: each sub-layer reads with the mix of the one before and writes with its own.
Method: three sub-layers through `Residual`, against the published order of steps spelled out with
separate operations.
"""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.layers.hyper_connections import Residual, begin
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import HyperParameters
from pallas_kernels.reference import hyper_mix
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import CONFIG, Row

NUM_TOKENS, STREAMS, WIDTH = 3, 4, 8


def three_sub_layers(
    step: StepContext,
    h: jax.Array,
    parameters: list[HyperParameters],
    outputs: list[jax.Array],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    residual = Residual.start(h, STREAMS)
    inputs = []
    for one, output in zip(parameters, outputs, strict=True):
        x, residual = begin(residual, one, step)
        inputs.append(x)
        residual = residual._replace(output=output)
    return inputs, residual.settled(), residual.collapsed()


def test_the_mix_is_delayed_by_one_sub_layer(rng: np.random.Generator) -> None:
    rows = STREAMS * (2 + STREAMS)
    parameters = [
        HyperParameters(
            fn=by_hand.weight(rng, rows, STREAMS * WIDTH),
            base=jnp.asarray(rng.standard_normal(rows), jnp.float32),
            scale=jnp.asarray([0.9, 1.1, 0.7], jnp.float32),
        )
        for _ in range(3)
    ]
    h = jnp.asarray(rng.standard_normal((NUM_TOKENS, WIDTH)), jnp.float32)
    outputs = [jnp.asarray(rng.standard_normal((NUM_TOKENS, WIDTH)), jnp.float32) for _ in range(3)]
    step = by_hand.step_of([Row(0, NUM_TOKENS, 1)], NUM_TOKENS)
    inputs, settled, collapsed = by_hand.run(three_sub_layers, step, h, parameters, outputs)

    streams = np.repeat(by_hand.f64(h)[:, None, :], STREAMS, axis=1)
    read_with = np.tile([1.0, 0.0, 0.0, 0.0], (NUM_TOKENS, 1))
    coefficients = jax.jit(hyper_mix.coefficients, static_argnames=("iterations", "eps"))
    for one, output, got in zip(parameters, outputs, inputs, strict=True):
        mix = coefficients(
            jnp.asarray(streams, jnp.float32),
            one.fn,
            one.scale,
            one.base,
            iterations=CONFIG.hc_sinkhorn_iters,
            eps=CONFIG.hc_eps,
        )
        assert_close(got, np.einsum("ts,tsd->td", read_with, streams))
        kept = np.einsum("tjk,tjd->tkd", by_hand.f64(mix.comb), streams)
        streams = kept + by_hand.f64(mix.post)[:, :, None] * by_hand.f64(output)[:, None, :]
        read_with = by_hand.f64(mix.pre)
    assert_close(settled, streams)
    assert_close(collapsed, np.einsum("ts,tsd->td", read_with, streams))


def test_the_start_is_the_embedding_in_every_stream() -> None:
    h = jnp.asarray([[1.0, 2.0], [3.0, 4.0]], jnp.bfloat16)
    residual = Residual.start(h, 3)
    assert residual.streams.dtype == jnp.bfloat16
    np.testing.assert_array_equal(by_hand.f64(residual.streams)[1], [[3.0, 4.0]] * 3)
    np.testing.assert_array_equal(residual.pre, [[1.0, 0.0, 0.0]] * 2)
    # Nothing is pending yet.
    assert residual.settled() is residual.streams
    np.testing.assert_array_equal(by_hand.f64(residual.collapsed()), [[1.0, 2.0], [3.0, 4.0]])


def assert_close(got: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
