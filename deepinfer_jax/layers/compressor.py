"""Token compression: every `ratio` tokens of a layer become one cache entry and one index key.

An entry exists once its group is complete. The tokens of an unfinished group wait in the ring
`partial` of their state slot, so a chunk or a decode step may end anywhere. Whether a token
completes a group depends on its position alone; every token computes a value and only those
that complete one write it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache import SourceCache
from deepinfer_jax.layers.primitives import StepContext, rope, rope_frequencies
from deepinfer_jax.parameters import CompressorParameters, IndexerParameters
from pallas_kernels import ops


def compress(
    x: jax.Array,
    compressor: CompressorParameters,
    indexer: IndexerParameters,
    ratio: int,
    source: SourceCache,
    step: StepContext,
) -> SourceCache:
    """`source` with the entries and index keys that the tokens `x` [T, D] complete."""
    with jax.named_scope("compressor"):
        latent, partial = _group_latent(x, compressor, ratio, source.partial, step)
        latent = step.norm(latent.astype(step.precision.compute_dtype), compressor.norm)
        # An entry sits at the first position of its group.
        entry_position = step.position - (ratio - 1)
        frequencies = rope_frequencies(step.config, is_scaled=True)
        entry = rope(latent, entry_position, frequencies)
        # Keys come from the latent before its rotation, and are rotated on their own.
        key = rope(
            step.norm(step.linear(latent, indexer.wk), indexer.k_norm), entry_position, frequencies
        )
        outer, inner = _places(ratio, source.entries.shape[1], step)
        step.probe("compressed_kv", entry)
        step.probe("index_keys", key)
        return SourceCache(
            ops.cache_append(source.entries, entry, outer, inner),
            ops.cache_append(source.index_keys, key, outer, inner),
            partial,
        )


def _group_latent(
    x: jax.Array,
    parameters: CompressorParameters,
    ratio: int,
    partial: jax.Array | None,
    step: StepContext,
) -> tuple[jax.Array, jax.Array | None]:
    """[T, head_dim] float32: the group that ends at each token, summed with its gates."""
    value = step.product(x, parameters.wkv)
    if partial is None or parameters.wgate is None:
        return value, partial
    pair = jnp.stack([value, step.product(x, parameters.wgate)], axis=1)
    group, _ = step.tokens.history.gather(partial, pair, np.arange(ratio))
    weight = jax.nn.softmax(group[:, :, 1], axis=1)
    return jnp.sum(weight * group[:, :, 0], axis=1), step.append_to_ring(partial, pair)


def _places(ratio: int, entries_per_block: int, step: StepContext) -> tuple[jax.Array, jax.Array]:
    """Block and offset of the entry that each token completes; block -1 where it completes none."""
    entry = step.position // ratio
    completes = step.tokens.is_real & (jnp.mod(step.position + 1, ratio) == 0)
    first_entry = step.tokens.first_entry
    if first_entry is None:
        first_entry = step.tokens.history.first_visible
    completes &= step.position >= first_entry
    block = step.block_tables[step.tokens.row, entry // entries_per_block]
    return jnp.where(completes, block, -1), jnp.mod(entry, entries_per_block)
