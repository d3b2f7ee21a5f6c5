"""Engram: an n-gram hashed embedding memory, read with a gate.

The last few tokens of a sequence, mapped to classes that fold spelling variants together, are
hashed to rows of a large table; the rows become a key and a value, and the value is added to each
residual stream as far as the stream agrees with the key.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import EngramParameters
from pallas_kernels.scaled_array import FP8_ROW32, ScaledArray, decode
from sharding.collectives import Group

IMAGE_CLASS = -1
"""Class of an image token in the ring; every other class is 0 or more."""

_GATE_FLOOR = 1e-6


def ngram_classes(
    token_ids: jax.Array,
    token_classes: jax.Array,
    ring: jax.Array,
    constants: EngramTables,
    step: StepContext,
) -> tuple[jax.Array, jax.Array]:
    """Classes [T, n] int32 of each token and its predecessors, nearest first, and the ring after.

    From the first predecessor on that lies before the sequence or belongs to an image, all are
    the class of the padding token.
    """
    classes = jnp.where(step.is_image, IMAGE_CLASS, token_classes[token_ids]).astype(jnp.int32)
    order = step.config.engram_max_ngram_size
    # A class needs nothing but the token, so n-grams also reach where windows see nothing.
    history = step.tokens.history
    history = history._replace(first_visible=jnp.zeros_like(history.first_visible))
    found, exists = history.gather(ring, classes, np.arange(order))
    is_text = (exists & (found != IMAGE_CLASS)).astype(jnp.int32)
    unbroken = jnp.cumprod(is_text, axis=1) > 0
    return (
        jnp.where(unbroken, found, constants.pad_class),
        step.append_to_ring(ring, classes),
    )


def table_rows(classes: jax.Array, constants: EngramTables, engram_index: int) -> jax.Array:
    """Table rows [T, orders * heads] int32 of one Engram layer, lowest order first.

    The same numbers as `EngramTables.rows`. Products come close to 2^63, hence 64-bit integers
    just here.
    """
    with jax.enable_x64(True):
        products = classes.astype(jnp.int64) * constants.multipliers[engram_index]
        hashes = [products[:, 0]]
        for n in range(1, classes.shape[1]):
            hashes.append(jnp.bitwise_xor(hashes[-1], products[:, n]))
        moduli = constants.moduli[engram_index]
        heads = len(moduli) // (len(hashes) - 1)
        repeated = jnp.repeat(jnp.stack(hashes[1:], axis=1), heads, axis=1)
        return (repeated % moduli + constants.offsets[engram_index]).astype(jnp.int32)


def table_memory(table: Any, rows: jax.Array, group: Group) -> Any:
    """The table's rows [T, K] int32, as it keeps them, [T, K, width].

    If each device of `group` has some of the channels of every row, devices tell each other which
    rows they want and answer with the channels that they have.
    """
    if group.size == 1:
        return table[rows]
    wanted = table[group.gather(rows)]

    def swap(part: jax.Array) -> jax.Array:
        channels = group.swap(part.reshape(group.size, *rows.shape, part.shape[-1]))
        return jnp.moveaxis(channels, 0, 2).reshape(*rows.shape, -1)

    return jax.tree.map(lambda part: _through_bytes(swap, part), wanted)


def _through_bytes(move: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """Moves values of one byte as bytes, since not every exchange knows small floats."""
    if values.dtype.itemsize > 1:
        return move(values)
    moved = move(jax.lax.bitcast_convert_type(values, jnp.uint8))
    return jax.lax.bitcast_convert_type(moved, values.dtype)


def unpack_rows(packed: jax.Array, width: int) -> ScaledArray:
    """Table rows [..., width] from the bytes of their codes and then their scales, [..., bytes]."""
    codes, scale = packed[..., :width], packed[..., width:]
    return ScaledArray(
        jax.lax.bitcast_convert_type(codes, FP8_ROW32.code_dtype),
        jax.lax.bitcast_convert_type(scale, FP8_ROW32.scale_dtype),
        FP8_ROW32,
    )


def engram(
    streams: jax.Array,
    memory: jax.Array | ScaledArray,
    parameters: EngramParameters,
    step: StepContext,
) -> jax.Array:
    """Streams [T, S, D] after the `memory`, table rows [T, orders * heads, width], was added."""
    c = step.config
    num_tokens, num_streams, width = streams.shape
    with jax.named_scope("engram"):
        read = decode(memory, step.precision.compute_dtype)
        both = step.product(read.reshape(num_tokens, -1), parameters.wkv)
        key = both[:, : num_streams * width].reshape(streams.shape)
        value = both[:, None, num_streams * width :]
        s = streams.astype(jnp.float32)
        weight = decode(parameters.q_weight) * decode(parameters.k_weight)
        agreement = jnp.sum(s * weight * key, axis=-1) / np.sqrt(width)
        agreement = agreement * _inverse_rms(s, c.rms_norm_eps) * _inverse_rms(key, c.rms_norm_eps)
        size = jnp.sqrt(jnp.maximum(jnp.abs(agreement), _GATE_FLOOR))
        gate = jax.nn.sigmoid(jnp.copysign(size, agreement))
        gate = jnp.where(step.is_image[:, None], 0.0, gate)
        return (s + gate[:, :, None] * value).astype(streams.dtype)


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
