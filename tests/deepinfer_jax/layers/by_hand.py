"""Steps made by hand, and the arithmetic of single layers in float64, written from the equations.

Layers run compiled, with the arrays of the step as arguments, so that steps of one shape share a
compilation.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import TokenView
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.precision import CacheFormat, Precision
from pallas_kernels import scaled_array
from pallas_kernels.history import TokenHistory

CONFIG = ModelConfig.tiny()
PLAIN = Precision(jnp.float32, CacheFormat.NOQ)
"""Float32 throughout, nothing quantised."""
QUANTISED_CACHE = Precision(jnp.float32, CacheFormat.KVQ)

# Compiled as a whole, these take a fraction of the time of their operations one by one.
encode = jax.jit(scaled_array.encode, static_argnums=1)
decode = jax.jit(scaled_array.decode, static_argnums=1)
quantise_dequantise = jax.jit(scaled_array.quantise_dequantise, static_argnums=1)


class Row(NamedTuple):
    """`count` tokens of one sequence from position `start` on."""

    start: int
    count: int
    slot: int
    blocks: tuple[int, ...] = ()
    first_visible: int = 0

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)


def step_of(
    rows: list[Row],
    num_tokens: int,
    *,
    images: tuple[int, ...] = (),
    precision: Precision = PLAIN,
) -> StepContext:
    """A step of `num_tokens` tokens, the last ones padding; `images` are indexes of tokens."""
    width = max(1, *(len(row.blocks) for row in rows))
    tables = np.zeros((len(rows), width), np.int32)
    columns = np.zeros((6, num_tokens), np.int32)
    # Padding tokens name the last row, stand at position 0 and belong to slot 0.
    columns[0] = len(rows) - 1
    is_real = np.zeros(num_tokens, bool)
    at = 0
    for i, row in enumerate(rows):
        tables[i, : len(row.blocks)] = row.blocks
        for position in row.positions:
            end = row.start + row.count
            columns[:, at] = i, position, row.start, row.slot, end, row.first_visible
            is_real[at] = True
            at += 1
    arrays = [jnp.asarray(column) for column in columns]
    index, position, row_start, slot, row_end, first_visible = arrays
    return StepContext(
        config=CONFIG,
        precision=precision,
        tokens=TokenView(
            index,
            jnp.asarray(is_real),
            TokenHistory(position, row_start, slot, first_visible),
            row_end,
        ),
        is_image=jnp.asarray(np.isin(np.arange(num_tokens), images)),
        block_tables=jnp.asarray(tables),
    )


def run(function: Callable[..., Any], step: StepContext, *args: Any) -> Any:
    """`function(step, *args)` as numpy arrays, compiled once per function and shapes."""
    arrays = step.tokens, step.is_image, step.block_tables
    return jax.device_get(_run(function, step.config, step.precision, arrays, *args))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    function: Callable[..., Any],
    config: ModelConfig,
    precision: Precision,
    arrays: tuple[Any, ...],
    *args: Any,
) -> Any:
    return function(StepContext(config, precision, *arrays), *args)


def tokens_of(rows: list[Row], sequences: dict[int, np.ndarray], num_tokens: int) -> jax.Array:
    """[num_tokens, ...] values of a step's tokens from those of whole sequences, by slot; NaN in
    the padding."""
    parts = [sequences[row.slot][row.positions] for row in rows]
    joined = np.concatenate(parts).astype(np.float32)
    padding = np.full((num_tokens - len(joined), *joined.shape[1:]), np.nan, np.float32)
    return jnp.asarray(np.concatenate([joined, padding]))


def weight(rng: np.random.Generator, *shape: int, size: float = 1.0) -> jax.Array:
    """A random matrix that multiplies sizes by `size`, near enough."""
    return jnp.asarray(size * rng.standard_normal(shape) / math.sqrt(shape[-1]), jnp.float32)


def filled(value: float, *shape: int) -> jax.Array:
    """One number everywhere, made without compiling anything."""
    return jnp.asarray(np.full(shape, value, np.float32))


def norm_weight(rng: np.random.Generator, width: int) -> jax.Array:
    return jnp.asarray(rng.uniform(0.5, 1.5, width), jnp.float32)


def f64(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def rms(x: np.ndarray, scale: Any) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) * f64(scale)


def frequencies(*, is_scaled: bool) -> list[float]:
    """Radians per position of each pair of channels."""
    width = CONFIG.qk_rope_head_dim
    if not is_scaled:
        return [CONFIG.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    base, scaling = CONFIG.compress_rope_theta, CONFIG.rope_scaling

    def bound(beta: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        return width * math.log(wavelength) / (2 * math.log(base))

    low, high = math.floor(bound(scaling.beta_fast)), math.ceil(bound(scaling.beta_slow))
    out = []
    for i in range(width // 2):
        plain = base ** (-2 * i / width)
        ramp = min(max((i - low) / (high - low), 0), 1)
        out.append(plain / scaling.factor * ramp + plain * (1 - ramp))
    return out


def rotated(x: np.ndarray, position: int, *, is_scaled: bool, inverse: bool = False) -> np.ndarray:
    """The last channels of `x` [..., D] as complex numbers, turned."""
    width = CONFIG.qk_rope_head_dim
    out = np.array(x, np.float64)
    tail = out[..., -width:]
    numbers = tail[..., 0::2] + 1j * tail[..., 1::2]
    angle = position * np.array(frequencies(is_scaled=is_scaled))
    numbers = numbers * np.exp(-1j * angle if inverse else 1j * angle)
    tail[..., 0::2], tail[..., 1::2] = numbers.real, numbers.imag
    return out
