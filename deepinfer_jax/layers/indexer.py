"""Which compressed entries each query attends to, and the candidate blocks they are taken from.

Lists and candidates live for one forward pass: a layer that makes an index list hands it to the
layers above that reuse it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.cache import SourceCache
from deepinfer_jax.layers.primitives import StepContext, rope, rope_frequencies, store
from deepinfer_jax.parameters import IndexerParameters
from deepinfer_jax.topology import LayerTopology
from pallas_kernels import ops


class Selection(NamedTuple):
    """What the layers of one forward pass hand upwards.

    Attributes:
        entry_index: [T, index_topk] int32 flat index into the blocks of the KV source, -1 absent;
            None below the first index source.
        candidates: [T, candidate_topk_blocks] int32 candidate blocks; None below their source.
    """

    entry_index: jax.Array | None = None
    candidates: jax.Array | None = None


def select(
    x: jax.Array,
    query_latent: jax.Array,
    parameters: IndexerParameters,
    layer: LayerTopology,
    source: SourceCache,
    selection: Selection,
    step: StepContext,
) -> Selection:
    """The selection after a layer with index queries of its own.

    Args:
        x: [T, hidden] attention input.  query_latent: [T, q_lora_rank], normalised.
        source: cache that already holds the entries of this step.
        selection: what lower layers made.
    """
    c = step.config
    with jax.named_scope("indexer"):
        q = step.product(query_latent, parameters.wq_b)
        q = q.reshape(-1, c.index_n_heads, c.index_head_dim)
        q = rope(q, step.position, rope_frequencies(c, is_scaled=True))
        # One over the square roots of the number of heads and of their size.
        scale = (c.index_n_heads * c.index_head_dim) ** -0.5
        weight = step.product(x, parameters.weights_proj) * scale
        num_visible = jnp.where(step.tokens.is_real, (step.position + 1) // layer.ratio, 0)
        entries, made = ops.index_topk(
            store(q, step.precision.cache_format.index, step.precision.compute_dtype),
            weight,
            source.index_keys,
            step.block_tables,
            step.tokens.row,
            num_visible,
            selection.candidates if layer.uses_candidates else None,
            k=c.index_topk,
            candidate_block_size=c.candidate_block_size,
            num_candidate_blocks=c.candidate_topk_blocks if layer.makes_candidates else 0,
        )
        step.probe("topk", entries)
        if made is not None:
            step.probe("candidates", made)
        candidates = selection.candidates if made is None else made
        return Selection(_flat_index(entries, source.entries.shape[1], step), candidates)


def _flat_index(entries: jax.Array, entries_per_block: int, step: StepContext) -> jax.Array:
    """Entry numbers within a sequence [T, K] as places in the pool, looked up once per list."""
    column = jnp.maximum(entries, 0) // entries_per_block
    block = step.block_tables[step.tokens.row[:, None], column]
    place = block * entries_per_block + jnp.mod(entries, entries_per_block)
    return jnp.where(entries < 0, -1, place)
