"""How large a model is and what a token costs, from its config alone; nothing is allocated.

Three things are counted, each in the unit that later meets a device: parameters and bytes of every
group of weights, bytes that a sequence keeps, and multiply-adds and bytes read per token.

*Active* parameters are those that one token multiplies with: of the routed experts its own few, of
the embedding and the Engram tables none, since their rows are copied. A decoded token passes all
layers and the head. A prefilled token needs only the encoder layers and what makes the entries of
the last KV source; the layers above matter for the last few tokens of a prompt, if replay is
bounded (`deepinfer_jax/replay.py`), and are counted for whole prompts (`prompt_products`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from deepinfer_jax.cache import ROLLBACK_MAX, CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import ParameterSpec, parameter_table
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.topology import LayerKind, LayerTopology, Topology
from pallas_kernels.scaled_array import Format

_SERVED_DTYPE = jnp.bfloat16
"""Compute type of the model where it is served; what is not quantised is kept in it."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One group of weights of one part of the model.

    Attributes:
        part: "text", "draft" or "vision".
        group: as in `ParameterSpec`.
        num_tensors: stored tensors, scales counted apart.
        num_parameters: values; scales are not parameters.
        size_bytes: values and scales as stored, which is also how they lie in memory.
        active_decode: parameters that one token of a decode step multiplies with; in the draft
            module, one position of a draft block.
        active_prefill: the same for a token of a prompt.
        read_bytes_decode: bytes of the group that one decoded token reads.
    """

    part: str
    group: str
    num_tensors: int
    num_parameters: int
    size_bytes: int
    active_decode: int
    active_prefill: int
    read_bytes_decode: int


class TokenFlops(NamedTuple):
    """Operations of one token, decoded or prefilled, a multiply and an add being two.

    Attributes:
        products: with weights.
        attention: scores and sums over window and selected entries.
        index_scores: index queries against index keys.
    """

    products: int
    attention: int
    index_scores: int


class DecodeReads(NamedTuple):
    """Bytes that one decoded token reads when it is alone in its step.

    Attributes:
        weights: active experts, everything else that is used whole, single rows of tables.
        index_keys: keys of the layers that have keys of their own, over the whole context.
        candidate_keys: keys that later layers score again, inside the candidate blocks.
        entries: selected compressed entries.
        windows: window entries.
    """

    weights: int
    index_keys: int
    candidate_keys: int
    entries: int
    windows: int


class StateSize(NamedTuple):
    """Bytes of fixed size that one running sequence keeps.

    Attributes:
        window_rings: window entries of every layer, with room for rows that are taken back.
        partial_groups: inputs of unfinished compression groups, likewise.
        token_classes: of the last tokens, for Engram, with the token sampled last.
        draft_rings: window entries of the draft blocks; 0 without a draft module.
        draft_proposals: waiting drafts and the distributions they were drawn from; likewise.
    """

    window_rings: int
    partial_groups: int
    token_classes: int
    draft_rings: int
    draft_proposals: int

    @property
    def without_drafts(self) -> int:
        """What a sequence keeps when the model is served without its draft module."""
        return self.window_rings + self.partial_groups + self.token_classes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """All counts of one model.

    Attributes:
        config, cache_format: what was counted.
        groups: in the order of the forward pass.
        kv_bytes_per_token: bytes by which the cache grows per token of context.
        state: bytes of a sequence that do not grow.
    """

    config: ModelConfig
    cache_format: CacheFormat
    groups: tuple[GroupSize, ...]
    kv_bytes_per_token: float
    state: StateSize

    @classmethod
    def of(cls, config: ModelConfig, cache_format: CacheFormat = CacheFormat.KVQ) -> "ModelSize":
        """Counts a model.

        Raises:
            ModelConfigError: the layer map of the config contradicts itself.
        """
        layout = CacheLayout(config, Precision(_SERVED_DTYPE, cache_format), 2, 2)
        return cls(
            config, cache_format, tuple(_groups(config)), layout.bytes_per_token, _state(layout)
        )

    @property
    def num_tensors(self) -> int:
        """Tensors of the whole checkpoint."""
        return sum(g.num_tensors for g in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint."""
        return sum(g.size_bytes for g in self.groups)

    @property
    def num_engram(self) -> int:
        """Parameters of the Engram tables, which are looked up and not multiplied with."""
        return sum(g.num_parameters for g in self.groups if g.group == "engram_table")

    @property
    def num_backbone(self) -> int:
        """Parameters of the language model without its Engram tables."""
        return self.num_in_part("text") - self.num_engram

    @property
    def active_decode(self) -> int:
        """Parameters of the language model that a decoded token multiplies with."""
        return sum(g.active_decode for g in self.groups if g.part == "text")

    @property
    def active_prefill(self) -> int:
        """Parameters of the language model that a token of a prompt multiplies with."""
        return sum(g.active_prefill for g in self.groups if g.part == "text")

    @property
    def active_draft(self) -> int:
        """Parameters of the draft blocks that one drafted position multiplies with."""
        return sum(g.active_decode for g in self.groups if g.part == "draft")

    def num_in_part(self, part: str) -> int:
        """Parameters of "text", "draft" or "vision"."""
        return sum(g.num_parameters for g in self.groups if g.part == part)

    @property
    def num_kept_min(self) -> int:
        """The fewest tokens of a prompt that bounded replay may keep."""
        return self.config.sliding_window + ROLLBACK_MAX

    def prompt_products(self, num_tokens: int, num_kept: int | None = None) -> int:
        """Operations with weights of a prompt, whose last token alone passes the head.

        Args:
            num_kept: with bounded replay, the tokens that pass the upper layers; None for all.
        """
        head = sum(g.active_decode for g in self.groups if (g.part, g.group) == ("text", "head"))
        upper = self.active_decode - self.active_prefill - head
        num_in_tail = num_tokens if num_kept is None else min(num_kept, num_tokens)
        return 2 * (num_tokens * self.active_prefill + num_in_tail * upper + head)

    def decode_flops(self, context: int) -> TokenFlops:
        """Operations of a token whose context, itself included, is `context` tokens."""
        return self._flops(context, self.active_decode, is_prefill=False)

    def prefill_flops(self, context: int) -> TokenFlops:
        """The same for a token of a prompt, which passes the encoder layers only."""
        return self._flops(context, self.active_prefill, is_prefill=True)

    def _flops(self, context: int, num_active: int, *, is_prefill: bool) -> TokenFlops:
        c = self.config
        attended = scored = 0
        for layer in Topology.of(c).layers:
            if layer.is_encoder or not is_prefill:
                attended += min(context, c.sliding_window) + _num_selected(c, layer, context)
                scored += _num_scored(c, layer, context)
        return TokenFlops(
            products=2 * num_active,
            # Each entry is a key and a value: a dot product, then a weighted sum.
            attention=4 * c.num_attention_heads * c.head_dim * attended,
            index_scores=2 * c.index_n_heads * c.index_head_dim * scored,
        )

    def decode_reads(self, context: int) -> DecodeReads:
        """Bytes read for such a token when it is alone in its step."""
        c, storage = self.config, self.cache_format
        entry_bytes = _stored_bytes(c.head_dim, storage.entries)
        key_bytes = _stored_bytes(c.index_head_dim, storage.index)
        layers = Topology.of(c).layers
        own = sum(_num_scored(c, layer, context) for layer in layers if layer.makes_entries)
        scored = sum(_num_scored(c, layer, context) for layer in layers)
        return DecodeReads(
            weights=sum(g.read_bytes_decode for g in self.groups if g.part == "text"),
            index_keys=key_bytes * own,
            candidate_keys=key_bytes * (scored - own),
            entries=entry_bytes * sum(_num_selected(c, layer, context) for layer in layers),
            windows=_stored_bytes(c.head_dim, storage.window)
            * min(context, c.sliding_window)
            * len(layers),
        )


def _num_selected(config: ModelConfig, layer: LayerTopology, context: int) -> int:
    """Compressed entries that the newest token of `context` attends to in a layer."""
    return min(config.index_topk, context // layer.ratio) if layer.ratio else 0


def _num_scored(config: ModelConfig, layer: LayerTopology, context: int) -> int:
    """Index keys that it is compared with there."""
    if not layer.makes_index:
        return 0
    visible = context // layer.ratio
    if layer.kind is LayerKind.REINDEX:
        return min(visible, config.candidate_topk_blocks * config.candidate_block_size)
    return visible


def _stored_bytes(width: int, form: Format | None) -> int:
    """Bytes of one cached vector of `width` channels; None is unquantised."""
    if form is None:
        return width * jnp.dtype(_SERVED_DTYPE).itemsize
    codes = math.prod(form.code_shape((width,))) * jnp.dtype(form.code_dtype).itemsize
    return codes + math.prod(form.scale_shape((width,))) * jnp.dtype(form.scale_dtype).itemsize


def _state(layout: CacheLayout) -> StateSize:
    c = layout.config
    ring = layout.ring_length * _stored_bytes(c.head_dim, layout.precision.cache_format.window)
    rings = ring * c.num_hidden_layers
    cache = layout.abstract()
    class_bytes = sum(
        leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in (cache.classes, cache.sampled)
    )
    draft_rings = proposals = 0
    if c.num_nextn_predict_layers:
        drafting = CacheLayout(
            c, layout.precision, layout.num_blocks, layout.num_slots, has_draft=True
        )
        draft_rings = ring * c.num_nextn_predict_layers
        proposals = drafting.bytes_per_slot - layout.bytes_per_slot - draft_rings
    return StateSize(
        window_rings=rings,
        partial_groups=layout.bytes_per_slot - rings - class_bytes,
        token_classes=class_bytes,
        draft_rings=draft_rings,
        draft_proposals=proposals,
    )


class _Activity(NamedTuple):
    """How much of one leaf a token uses: parameters multiplied with, and bytes read."""

    decode: int
    prefill: int
    read_bytes: int


def _groups(config: ModelConfig) -> Iterator[GroupSize]:
    topology = Topology.of(config)
    by_name: dict[tuple[str, str], list[ParameterSpec]] = {}
    for spec in parameter_table(config):
        by_name.setdefault((spec.part, spec.group), []).append(spec)
    for (part, group), specs in by_name.items():
        tensors = [spec.tensors() for spec in specs]
        sizes = [sum(tensor.size_bytes for tensor in some) for some in tensors]
        uses = [
            _activity(config, topology, spec, size) for spec, size in zip(specs, sizes, strict=True)
        ]
        yield GroupSize(
            part=part,
            group=group,
            num_tensors=sum(len(some) for some in tensors),
            num_parameters=sum(spec.num_values for spec in specs),
            size_bytes=sum(sizes),
            active_decode=sum(use.decode for use in uses),
            active_prefill=sum(use.prefill for use in uses),
            read_bytes_decode=sum(use.read_bytes for use in uses),
        )


def _activity(
    config: ModelConfig, topology: Topology, spec: ParameterSpec, size_bytes: int
) -> _Activity:
    if spec.part == "vision":
        return _Activity(0, 0, 0)
    if spec.group == "embedding":
        return _Activity(0, 0, size_bytes // spec.shape[0])
    if spec.group == "engram_table":
        num_rows = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        return _Activity(0, 0, num_rows * size_bytes // spec.shape[0])
    used, read = spec.num_values, size_bytes
    if spec.group == "routed_experts":
        chosen = config.num_experts_per_tok
        if spec.part == "draft":
            chosen = config.dspark_num_experts_per_tok
        used, read = used * chosen // spec.num_stacked, read * chosen // spec.num_stacked
    if spec.part == "draft":
        # Projection and heads are no part of a block; each has a cost of its own per step.
        return _Activity(used if spec.path[1] == "layers" else 0, 0, read)
    return _Activity(used, used if _is_in_prefill(config, topology, spec) else 0, read)


_ENTRY_LEAVES = ("attn_norm", "compressor", "wk", "k_norm")
"""What the last KV source needs to make its entries and index keys."""


def _is_in_prefill(config: ModelConfig, topology: Topology, spec: ParameterSpec) -> bool:
    if spec.path[0] != "layers":
        return False
    layer = topology.layers[int(spec.path[1])]
    if layer.is_encoder:
        return True
    is_last_source = layer.layer_index == max(config.kv_source_layer_ids)
    return is_last_source and any(step in _ENTRY_LEAVES for step in spec.path)
