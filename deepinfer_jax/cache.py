"""Device memory of running sequences: how large it is, and the pytree that holds it.

There are two kinds, because the model keeps two kinds of things. *Blocks* grow with the context:
each holds the compressed entries and index keys of 128 consecutive tokens for every layer that
makes such entries. *State slots* have a fixed size, one per running sequence: rings of the last
window entries of every layer, raw inputs of unfinished compression groups, the last token
classes for Engram and, for a model that drafts, its drafts. Block 0 and slot 0 belong to padding
and are never handed out.

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


class DraftCache(NamedTuple):
    """What the draft module keeps: its windows, and the N drafts that wait to be verified.

    The whole distributions are kept because a refused draft is replaced by a draw from what the
    target has more of than the draft; as large as they are, they never leave the device.

    Attributes:
        rings: per draft block [num_slots, ring_length, head_dim] window entries.
        tokens: [num_slots, N] int32 drafts of the positions after the last sampled token.
        probability: [num_slots, N] float32, with which each was drawn.
        logits: [num_slots, N, V] in the compute type, from which it was drawn.
        lengths: [num_slots] int32, tokens of the sequence that are computed and were kept.
    """

    rings: tuple[Any, ...]
    tokens: jax.Array
    probability: jax.Array
    logits: jax.Array
    lengths: jax.Array


class KVCache(NamedTuple):
    """The cache of one mesh.

    Attributes:
        rings: per layer [num_slots, ring_length, head_dim] window entries.
        sources: one per member of `kv_source_layer_ids`, in order.
        classes: [num_slots, engram_max_ngram_size - 1 + ROLLBACK_MAX] int32, ring of token classes.
        sampled: [num_slots] int32, the token sampled last, which the next step feeds.
        draft: None for a model that does not draft.
    """

    rings: tuple[Any, ...]
    sources: tuple[SourceCache, ...]
    classes: jax.Array
    sampled: jax.Array
    draft: DraftCache | None = None


def copy_slots(cache: KVCache, sources: jax.Array, destinations: jax.Array) -> KVCache:
    """The cache with the state of the slots `sources` [N] int32 in `destinations` [N] too.

    No slot is both. Pairs of zeros are padding. The token sampled last and the drafts that wait are
    not copied, because they do not belong to a prefix.
    """

    def copy(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[destinations].set(leaf[sources]), state)

    draft = cache.draft
    return cache._replace(
        rings=copy(cache.rings),
        sources=tuple(s._replace(partial=copy(s.partial)) for s in cache.sources),
        classes=copy(cache.classes),
        draft=None if draft is None else draft._replace(rings=copy(draft.rings)),
    )


@dataclass(frozen=True)
class CacheLayout:
    """Bytes and shapes of a cache; `has_draft` makes room for the draft module.

    Raises:
        ValueError: no block or slot would be left beside the reserved ones, a compression ratio
            does not divide a block, or the model has no draft module or one that drafts more
            tokens than a step can take back.
    """

    config: ModelConfig
    precision: Precision
    num_blocks: int
    num_slots: int
    block_size: int = BLOCK_SIZE
    has_draft: bool = False

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
        if self.has_draft:
            self._check_draft()

    def _check_draft(self) -> None:
        if not self.config.num_nextn_predict_layers:
            raise ValueError("num_nextn_predict_layers is 0: this model has no draft module")
        if self.config.dspark_block_size >= ROLLBACK_MAX:
            raise ValueError(
                f"dspark_block_size is {self.config.dspark_block_size}; a step can take back at "
                f"most {ROLLBACK_MAX - 1} drafts"
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
        state = (cache.rings, [s.partial for s in cache.sources], *cache[2:])
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
        return KVCache(
            rings=self._rings(c.num_hidden_layers),
            sources=tuple(sources),
            classes=jnp.zeros(
                (self.num_slots, c.engram_max_ngram_size - 1 + ROLLBACK_MAX), jnp.int32
            ),
            sampled=jnp.zeros(self.num_slots, jnp.int32),
            draft=self._draft() if self.has_draft else None,
        )

    def _rings(self, num_layers: int) -> tuple[Any, ...]:
        shape = (self.num_slots, self.ring_length, self.config.head_dim)
        window = self.precision.cache_format.window
        return tuple(self._store(shape, window) for _ in range(num_layers))

    def _draft(self) -> DraftCache:
        c = self.config
        drafts = (self.num_slots, c.dspark_block_size)
        return DraftCache(
            rings=self._rings(c.num_nextn_predict_layers),
            tokens=jnp.zeros(drafts, jnp.int32),
            probability=jnp.ones(drafts, jnp.float32),
            logits=jnp.zeros((*drafts, c.vocab_size), self.precision.compute_dtype),
            lengths=jnp.zeros(self.num_slots, jnp.int32),
        )

    def logical_axes(self) -> KVCache:
        """Logical names of each dimension, one tuple for an array and its scales."""
        # Names stand where the arrays would.
        ring: Any = ("slots", None, "kv")
        group: Any = ("slots", None, None, "kv")
        column: Any = ("slots", None)
        one: Any = ("slots",)
        draft_logits: Any = ("slots", None, "vocab")
        c = self.config
        sources = tuple(
            SourceCache(
                ("blocks", None, "kv"),
                ("blocks", None, "index_dim"),
                group if c.compress_ratios[layer] > 1 else None,
            )
            for layer in c.kv_source_layer_ids
        )
        draft = DraftCache((ring,) * c.num_nextn_predict_layers, column, column, draft_logits, one)
        rings = (ring,) * c.num_hidden_layers
        return KVCache(rings, sources, column, one, draft if self.has_draft else None)

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
