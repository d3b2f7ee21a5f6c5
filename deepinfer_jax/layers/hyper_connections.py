"""Residual streams: mix before and after each sub-layer.

Four streams run through the model. A sub-layer reads a weighted sum of them and writes back to all
of them. The weights of the sum are those that the *previous* sub-layer computed (a delayed
mix), so the coefficients of a sub-layer and the sub-layer itself do not wait for each other, and
finishing one sub-layer and starting the next is a single pass over the streams.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import HyperParameters
from pallas_kernels import ops
from pallas_kernels.mix import Mix


class Residual(NamedTuple):
    """The streams between two sub-layers.

    Attributes:
        streams: [T, S, D] before the pending output was added.
        pre: [T, S] weights for the next input.
        output: [T, D] output of the last sub-layer, not yet added; None if nothing is pending.
        mix: coefficients that belong to `output`.
    """

    streams: jax.Array
    pre: jax.Array
    output: jax.Array | None = None
    mix: Mix | None = None

    @classmethod
    def start(cls, h: jax.Array, num_streams: int) -> "Residual":
        """Every stream is the embedding [T, D]; the first input is the first stream."""
        streams = jnp.broadcast_to(h[:, None, :], (h.shape[0], num_streams, h.shape[1]))
        first = jax.nn.one_hot(jnp.zeros(h.shape[0], jnp.int32), num_streams, dtype=jnp.float32)
        return cls(streams, first)

    def settled(self) -> jax.Array:
        """[T, S, D] with the pending output added."""
        if self.output is None or self.mix is None:
            return self.streams
        return ops.hyper_finish(self.streams, self.output, self.mix)

    def collapsed(self) -> jax.Array:
        """[T, D] what the next reader would see; used by the head."""
        return ops.hyper_collapse(self.settled(), self.pre)


def begin(
    residual: Residual, parameters: HyperParameters, step: StepContext
) -> tuple[jax.Array, "Residual"]:
    """Input [T, D] of the next sub-layer, and the residual that waits for its output."""
    with jax.named_scope("hyper_connections"):
        streams, collapsed, mix = ops.hyper_mix(
            residual.streams,
            residual.output,
            residual.mix,
            residual.pre,
            parameters.fn,
            parameters.scale,
            parameters.base,
            iterations=step.config.hc_sinkhorn_iters,
            eps=step.config.hc_eps,
        )
    return collapsed, Residual(streams, mix.pre, None, mix)
