"""What every block is made of: norm, linear product, rotation, and the facts of a running step."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import TokenView
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import Precision
from pallas_kernels import ops
from pallas_kernels.scaled_array import ScaledArray, decode, encode
from sharding.collectives import UNDIVIDED, StepGroups

Probe = Callable[[str, Any], None]
"""Receives named intermediate values while a forward pass is traced; for tests."""


def no_probe(name: str, value: Any) -> None:
    """Looks at nothing."""


@dataclass(frozen=True)
class Arithmetic:
    """Products and norms in the types of one run, and who else computes parts of it."""

    config: ModelConfig
    precision: Precision
    groups: StepGroups = dataclasses.field(default=UNDIVIDED, kw_only=True)

    def product(self, x: jax.Array, weight: Any) -> jax.Array:
        """`x` times a weight [N, K], float32; the input is quantised only if the weight is."""
        form = self.precision.activation_format if isinstance(weight, ScaledArray) else None
        return ops.scaled_matmul(x, weight, activation_format=form)

    def linear(self, x: jax.Array, weight: Any) -> jax.Array:
        """`product` in the compute type."""
        return self.product(x, weight).astype(self.precision.compute_dtype)

    def norm(self, x: jax.Array, weight: Any) -> jax.Array:
        """`rms_norm` with the epsilon of the text model, in the compute type."""
        return rms_norm(x, weight, self.config.rms_norm_eps).astype(self.precision.compute_dtype)


@dataclass(frozen=True)
class StepContext(Arithmetic):
    """What all layers of one step share.

    Attributes:
        tokens: position, row and slot of each token.
        is_image: [T] bool, tokens of an image span.
        block_tables: [R, B] int32.
        probe: is shown intermediate values by name.
    """

    tokens: TokenView
    is_image: jax.Array
    block_tables: jax.Array
    probe: Probe = no_probe

    def of_layer(self, layer_index: int) -> "StepContext":
        """The same step, whose probe adds the number of a layer to every name."""

        def named(name: str, value: Any) -> None:
            self.probe(f"{name}_{layer_index}", value)

        return dataclasses.replace(self, probe=named)

    @property
    def position(self) -> jax.Array:
        """[T] int32, absolute position of each token."""
        return self.tokens.history.position

    def append_to_ring(self, ring: Any, values: jax.Array) -> Any:
        """`ring` [num_slots, L, ...] after each row's last tokens of `values` [T, ...] went in."""
        length = jax.tree.leaves(ring)[0].shape[1]
        # A chunk longer than the ring would write some places twice; only the last ones count.
        stays = self.tokens.is_real & (self.position >= self.tokens.row_end - length)
        outer = jnp.where(stays, self.tokens.history.slot, -1)
        return ops.cache_append(ring, values, outer, jnp.mod(self.position, length))


def rms_norm(x: jax.Array, weight: Any, eps: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis, float32. A zero row gives zero."""
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse * decode(weight)


def rope_frequencies(config: ModelConfig, *, is_scaled: bool) -> np.ndarray:
    """[qk_rope_head_dim / 2] float32 radians per position.

    Plain ones for layers without a compressed branch; with one, the YaRN interpolation (Peng et
    al., 2023) of a larger base, at every length and without a magnitude correction.
    """
    width = config.qk_rope_head_dim
    exponent = -np.arange(0, width, 2, dtype=np.float64) / width
    if not is_scaled:
        return (config.rope_theta**exponent).astype(np.float32)
    base, scaling = config.compress_rope_theta, config.rope_scaling

    def turns_at(beta: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (beta * 2 * np.pi)
        return width * np.log(wavelength) / (2 * np.log(base))

    low = max(np.floor(turns_at(scaling.beta_fast)), 0)
    high = min(np.ceil(turns_at(scaling.beta_slow)), width - 1)
    # A very small width can put both bounds on one channel.
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    plain = base**exponent
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def rope(
    x: jax.Array, position: jax.Array, frequencies: np.ndarray, *, inverse: bool = False
) -> jax.Array:
    """Rotates adjacent pairs of the last channels of `x` [T, ..., D] by position [T]; float32.

    `inverse` rotates back. Angles are formed in float32, exact enough up to a million positions.
    """
    angle = position.astype(jnp.float32)[:, None] * frequencies
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), angle.shape[1])
    cos, sin = jnp.cos(angle), jnp.sin(-angle if inverse else angle)
    x = x.astype(jnp.float32)
    width = 2 * frequencies.shape[0]
    kept, turned = x[..., :-width], x[..., -width:]
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([kept, rotated.reshape(turned.shape)], axis=-1)


def embedding(table: Any, token_ids: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] for ids [T], float32."""
    return decode(table[token_ids])


def store(values: jax.Array, form: Any, dtype: Any) -> Any:
    """`values` as a cache keeps them: encoded in `form`, or in `dtype` when it is None."""
    return values.astype(dtype) if form is None else encode(values, form)
