"""Sliding-window attention with a compressed sparse branch, shared between window and entries.

One latent vector per entry is key and value of all heads. A token attends, under one softmax with a
learned sink, to the last tokens of its own layer's window and, in layers with a compressed branch,
to the selected entries of the KV source. The output is rotated back by the token's position, since
keys double as values and carry their rotation.
"""

from typing import Any

import jax
import numpy as np

from deepinfer_jax.cache import SourceCache
from deepinfer_jax.layers.indexer import Selection, select
from deepinfer_jax.layers.primitives import StepContext, rope, rope_frequencies, store
from deepinfer_jax.parameters import AttentionParameters
from deepinfer_jax.topology import LayerTopology
from pallas_kernels import ops
from pallas_kernels.scaled_array import decode


def attention(
    x: jax.Array,
    parameters: AttentionParameters,
    layer: LayerTopology,
    ring: Any,
    source: SourceCache | None,
    selection: Selection,
    step: StepContext,
) -> tuple[jax.Array, Any, Selection]:
    """Output [T, hidden] for the normalised input `x`, and the ring and selection after.

    `ring` is the layer's own window; `source` the cache of its KV source (None for a window layer),
    with the entries of this step already in it.
    """
    c = step.config
    frequencies = rope_frequencies(c, is_scaled=layer.ratio > 0)
    latent_query = query_latent(x, parameters, step)
    if source is not None and parameters.indexer is not None:
        selection = select(x, latent_query, parameters.indexer, layer, source, selection, step)
    with jax.named_scope("attention"):
        latent = window_latent(x, parameters, frequencies, step)
        out = ops.sparse_attention(
            queries(latent_query, parameters, frequencies, step),
            ring,
            store(latent, step.precision.cache_format.window, step.precision.compute_dtype),
            step.tokens.history,
            None if source is None else source.entries,
            None if source is None else selection.entry_index,
            parameters.attn_sink,
            window=c.sliding_window,
            scale=c.head_dim**-0.5,
        )
        ring = step.append_to_ring(ring, latent)
        return output(out, parameters, frequencies, step), ring, selection


def query_latent(x: jax.Array, parameters: AttentionParameters, step: StepContext) -> jax.Array:
    """Normalised low-rank query [T, q_lora_rank] of the attention input `x` [T, hidden]."""
    return step.norm(step.linear(x, parameters.wq_a), parameters.q_norm)


def queries(
    latent: jax.Array, parameters: AttentionParameters, frequencies: np.ndarray, step: StepContext
) -> jax.Array:
    """Rotated queries [T, H, D] from their latent."""
    c = step.config
    q = step.linear(latent, parameters.wq_b).reshape(-1, c.num_attention_heads, c.head_dim)
    return rope(q, step.position, frequencies).astype(step.precision.compute_dtype)


def window_latent(
    x: jax.Array, parameters: AttentionParameters, frequencies: np.ndarray, step: StepContext
) -> jax.Array:
    """Window entries [T, head_dim] float32, rotated and not yet quantised."""
    latent = step.norm(step.linear(x, parameters.wkv), parameters.kv_norm)
    return rope(latent, step.position, frequencies)


def output(
    out: jax.Array, parameters: AttentionParameters, frequencies: np.ndarray, step: StepContext
) -> jax.Array:
    """Attended values [T, H, D], rotated back and projected to [T, hidden].

    Two low-rank products: each group of heads [T, G, H * D / G] by its own, then all.
    """
    c = step.config
    out = rope(out, step.position, frequencies, inverse=True)
    groups = out.reshape(out.shape[0], c.o_groups, -1).astype(step.precision.compute_dtype)
    first = decode(parameters.wo_a, step.precision.compute_dtype)
    first = first.reshape(c.o_groups, c.o_lora_rank, -1)
    # The inputs of this product stay unquantised, as in the published reference.
    middle = jax.lax.dot_general(
        groups,
        first,
        (((2,), (2,)), ((1,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=step.precision.compute_dtype,
    )
    return step.linear(middle.transpose(1, 0, 2).reshape(out.shape[0], -1), parameters.wo_b)
