"""Weights while they are trained: float32 trees, how they start, and how they look when stored."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import ParameterSpec, build_parameters
from deepinfer_jax.parameters import Parameters
from pallas_kernels.scaled_array import Format, decode, encode
from scripts.tiny_model.products import rounded

PARTS = ("text", "draft")
_TABLE_START = 0.02
_SHARED = 1.0
"""What every channel of every token's embedding starts with beside its own normal number."""
_IDENTITY_PULL = 3.0
"""Start of the mix between streams: each keeps about 0.87 of itself."""


def initial_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Float32 weights of the text and draft parts. The same seed gives the same weights, whatever
    the order in which they are drawn."""
    return build_parameters(config, lambda spec: _initial(spec, config, seed), PARTS)


def _initial(spec: ParameterSpec, config: ModelConfig, seed: int) -> jax.Array:
    leaf = str(spec.path[-1])
    shape = (spec.num_stacked, *spec.shape) if spec.num_stacked else spec.shape
    rng = np.random.default_rng([seed, zlib.crc32(repr(spec.path).encode())])
    normal = rng.standard_normal(shape).astype(np.float32)
    streams = config.hc_mult
    if leaf.endswith("norm") or leaf in ("q_weight", "k_weight"):
        value = np.ones(shape, np.float32)
    elif leaf in ("bias", "bias_vl", "attn_sink"):
        value = np.zeros(shape, np.float32)
    elif leaf == "scale":
        value = np.full(shape, 0.5, np.float32)
    elif leaf == "base":
        value = 0.2 * normal
        value[2 * streams :] += _IDENTITY_PULL * np.eye(streams, dtype=np.float32).reshape(-1)
    elif spec.group == "engram_table":
        # Rows that were never visited must not disturb the streams.
        value = _TABLE_START * normal
    elif leaf == "embed":
        # Without biases, only what all tokens share lets a head attend by distance alone, and a
        # head that looks at the token before is the first thing that looking up is built from.
        value = normal + np.float32(_SHARED)
    elif leaf == "markov_embed":
        value = normal
    elif leaf in ("markov_head", "confidence_proj"):
        value = 0.01 * normal
    else:
        # Outputs of sub-layers start small, so that the streams start as the embedding.
        gain = 0.2 if leaf in ("wo_b", "w2") else 1.0
        value = gain * normal / np.sqrt(shape[-1])
    return jnp.asarray(value)


def storage_of(config: ModelConfig) -> Any:
    """A tree like the parameters, with how each leaf is stored: a `Format`, "BF16" or "F32"."""
    return build_parameters(config, lambda spec: spec.storage, PARTS)


def as_stored(parameters: Any, storage: Any) -> Any:
    """Weights with the rounding of storage, and the gradient of the weights themselves."""
    return jax.tree.map(rounded, parameters, storage)


def packed(parameters: Any, storage: Any) -> Any:
    """Weights as a checkpoint keeps them."""

    def pack(values: jax.Array, form: Format | str) -> Any:
        if isinstance(form, Format):
            return encode(values, form)
        return values.astype(jnp.bfloat16 if form == "BF16" else jnp.float32)

    return jax.tree.map(pack, parameters, storage)


def unpacked(parameters: Any) -> Any:
    """Float32 weights of a tree with packed leaves."""
    is_packed = lambda node: hasattr(node, "codes")  # noqa: E731
    return jax.tree.map(decode, parameters, is_leaf=is_packed)


def split_draft(parameters: Parameters) -> tuple[Parameters, Any]:
    """The text part alone, and the draft part."""
    return dataclasses.replace(parameters, draft=None), parameters.draft
