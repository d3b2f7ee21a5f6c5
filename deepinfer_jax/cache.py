"""Device memory of running sequences: how large it is, and the pytree that holds it.

There are two kinds, because the model keeps two kinds of things. *Blocks* grow with the context:
each holds the compressed entries and index keys of 128 consecutive tokens for every layer that
makes such entries. *State slots* have a fixed size, one per running sequence: rings of the last
window entries of every layer, raw inputs of unfinished compression groups, and the last token
classes for Engram. Block 0 and slot 0 belong to padding and are never handed out.

Rings are longer than what is read from them by `ROLLBACK_MAX` positions, so that a step may write
rows that are rejected afterwards without overwriting anything that the next step still needs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import Precision
from pallas_kernels.scaled_array import Format, ScaledArray

BLOCK_SIZE = 128
"""Tokens in a block, on the device, on the wire and on disk."""

ROLLBACK_MAX = 6
"""Most rows of one sequence that a decode step runs: its last token and five drafts."""


class SourceCache(NamedTuple):
    """What one layer with a compressor of its own keeps.

    Attributes:
        entries: [num_blocks, BLOCK_SIZE / ratio, head_dim] compressed entries.
        index_keys: [num_blocks, BLOCK_SIZE / ratio, index_head_dim].
        partial: [num_slots, ratio - 1 + ROLLBACK_MAX, 2, head_dim] float32, ring of the projected
            input and gate of the last tokens; None for ratio 1, whose groups are never open.
    """

    entries: Any
    index_keys: Any
    partial: jax.Array | None


class KVCache(NamedTuple):
    """The cache of one mesh.

    Attributes:
        rings: per layer [num_slots, ring_length, head_dim] window entries.
        sources: one per member of `kv_source_layer_ids`, in order.
        classes: [num_slots, engram_max_ngram_size - 1 + ROLLBACK_MAX] int32, ring of token classes.
    """

    rings: tuple[Any, ...]
    sources: tuple[SourceCache, ...]
    classes: jax.Array


@dataclass(frozen=True)
class CacheLayout:
    """Bytes and shapes of a cache.

    Raises:
        ValueError: no block or slot would be left beside the reserved ones, or a compression
            ratio does not divide a block.
    """

    config: ModelConfig
    precision: Precision
    num_blocks: int
    num_slots: int
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        for name, value in (("num_blocks", self.num_blocks), ("num_slots", self.num_slots)):
            if value < 2:
                raise ValueError(f"{name} is {value}; expected at least 2 (number 0 is reserved)")
        for layer in self.config.kv_source_layer_ids:
            if self.block_size % self.config.compress_ratios[layer]:
                raise ValueError(
                    f"block size {self.block_size} is not a multiple of compress ratio "
                    f"{self.config.compress_ratios[layer]} of layer {layer}"
                )

    @property
    def ring_length(self) -> int:
        """Positions in a window ring."""
        return self.config.sliding_window + ROLLBACK_MAX

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return _nbytes([(s.entries, s.index_keys) for s in self.abstract().sources]) // (
            self.num_blocks
        )

    @property
    def bytes_per_token(self) -> float:
        """Growing bytes per token of context."""
        return self.bytes_per_block / self.block_size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state slot over all layers."""
        cache = self.abstract()
        state = (cache.rings, [s.partial for s in cache.sources], cache.classes)
        return _nbytes(state) // self.num_slots

    def abstract(self) -> KVCache:
        """The cache as shapes and types, nothing allocated."""
        return jax.eval_shape(self.zeros)

    def zeros(self) -> KVCache:
        """An empty cache. Nothing in it is ever read before it was written."""
        c, storage = self.config, self.precision.cache_format
        sources = []
        for layer in c.kv_source_layer_ids:
            ratio = c.compress_ratios[layer]
            per_block = (self.num_blocks, self.block_size // ratio)
            partial = (self.num_slots, ratio - 1 + ROLLBACK_MAX, 2, c.head_dim)
            sources.append(
                SourceCache(
                    self._store((*per_block, c.head_dim), storage.entries),
                    self._store((*per_block, c.index_head_dim), storage.index),
                    jnp.zeros(partial, jnp.float32) if ratio > 1 else None,
                )
            )
        ring = (self.num_slots, self.ring_length, c.head_dim)
        return KVCache(
            rings=tuple(self._store(ring, storage.window) for _ in range(c.num_hidden_layers)),
            sources=tuple(sources),
            classes=jnp.zeros(
                (self.num_slots, c.engram_max_ngram_size - 1 + ROLLBACK_MAX), jnp.int32
            ),
        )

    def logical_axes(self) -> KVCache:
        """Logical names of each dimension, one tuple for an array and its scales."""
        sources = tuple(
            SourceCache(
                ("blocks", None, "kv"),
                ("blocks", None, "index_dim"),
                ("slots", None, None, "kv") if self.config.compress_ratios[layer] > 1 else None,
            )
            for layer in self.config.kv_source_layer_ids
        )
        rings = (("slots", None, "kv"),) * self.config.num_hidden_layers
        return KVCache(rings, sources, ("slots", None))

    def _store(self, shape: tuple[int, ...], form: Format | None) -> Any:
        if form is None:
            return jnp.zeros(shape, self.precision.compute_dtype)
        codes = jnp.zeros(form.code_shape(shape), form.code_dtype)
        # A scale of zero bytes means 2^-127 or 0, so unwritten entries decode to zero.
        bits = jnp.zeros(form.scale_shape(shape), jnp.uint8)
        return ScaledArray(codes, jax.lax.bitcast_convert_type(bits, form.scale_dtype), form)


def _nbytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
