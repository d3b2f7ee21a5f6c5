"""The model as it is trained: whole sequences, dense attention under masks, differentiable.

The same mathematics as `deepinfer_jax.model.forward`, for batches [B, T] of rows that hold several
conversations one after another. A conversation is a *segment*: it starts at a multiple of
`SEGMENT_ALIGNMENT`, so that its compression groups and candidate blocks are those that it would
have alone. The selection of entries is a mask, and the indexer learns it from the attention:
`Trace.index_loss` pulls its scores towards the share of attention that the entries got.
"""
# Weights in training are plain arrays and never None here; the tree's type allows more.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layers.primitives import rms_norm, rope_frequencies
from deepinfer_jax.parameters import (
    AttentionParameters,
    EngramParameters,
    HyperParameters,
    IndexerParameters,
    MoeParameters,
    Parameters,
)
from deepinfer_jax.precision import CacheFormat
from deepinfer_jax.topology import LayerKind, LayerTopology, Topology
from pallas_kernels.reference.grouped_matmul import swiglu
from pallas_kernels.reference.index_topk import best_blocks, in_blocks
from scripts.tiny_model.products import (
    compare,
    linear,
    rounded,
    weigh,
    with_previous_chunk,
)
from scripts.tiny_model.streams import Mix, Streams, collapse, expand, sinkhorn

SEGMENT_ALIGNMENT = 8
SILENT_QUERY_WEIGHT = 0.02  # of the selection for a token after which the model says nothing
ABSENT = -1e30
"""Logit of what may not be seen. Finite, so that no gradient becomes NaN."""


class Rows(NamedTuple):
    """A batch of packed conversations.

    Attributes:
        token_ids: [B, T] int32.
        position: [B, T] int32, within the conversation.
        segment: [B, T] int32, number of the conversation in its row; 0 is padding.
        engram_rows: [B, T, L, K] int32, table rows of each Engram layer.
        said: [B, T] float32, weight of the loss of predicting this token.
    """

    token_ids: jax.Array
    position: jax.Array
    segment: jax.Array
    engram_rows: jax.Array
    said: jax.Array


class Trace(NamedTuple):
    """What a forward pass gives besides its result.

    Attributes:
        index_loss: mean divergence of the index scores from the attention.
        balance_loss: mean over layers, 1 when the experts are used evenly.
        loads: [L, E] share of tokens that chose each expert.
        features: [B, T, F] what enters the layers that the draft module reads.
        recall: share of the attention on entries that falls on selected ones.
    """

    index_loss: jax.Array
    balance_loss: jax.Array
    loads: jax.Array
    features: jax.Array
    recall: jax.Array


@dataclass(frozen=True)
class Settings:
    """How a forward pass computes. `selects`: attend to selected entries only, as serving does."""

    compute_dtype: Any = jnp.bfloat16
    cache_format: CacheFormat = CacheFormat.KVQ
    selects: bool = True


@dataclass(frozen=True)
class Network:
    """One way of running one model over `Rows`."""

    config: ModelConfig
    settings: Settings

    @functools.cached_property
    def topology(self) -> Topology:
        """The layer map of the config."""
        return Topology.of(self.config)

    def hidden(self, parameters: Parameters, rows: Rows) -> tuple[jax.Array, Trace]:
        """[B, T, D] input of the head, before its norm, and the trace."""
        c = self.config
        sight = Sight.of(rows, c)
        batch, length = rows.token_ids.shape
        streams = [parameters.embed[rows.token_ids].astype(self.settings.compute_dtype)] * c.hc_mult
        pre = jnp.zeros((batch, length, c.hc_mult), jnp.float32).at[..., 0].set(1.0)
        memory = Memory()
        loads, balance, features = [], [], []
        for layer, p in zip(self.topology.layers, parameters.layers, strict=True):
            if p.engram is not None and layer.engram_index is not None:
                streams = self.engram(streams, rows.engram_rows[:, :, layer.engram_index], p.engram)
            if layer.layer_index in c.dspark_target_layer_ids:
                features.append(sum(streams[1:], streams[0]) / c.hc_mult)
            x, mix = collapse(streams, pre), self.mix(streams, p.hc_attn)
            attended = self.attention(self.norm(x, p.attn_norm), p.attn, layer, sight, memory)
            streams = expand(streams, attended, mix)
            x, mix_f = collapse(streams, mix.pre), self.mix(streams, p.hc_ffn)
            out, load, unevenness = self.moe(
                self.norm(x, p.ffn_norm), p.ffn, c.num_experts_per_tok, rows.segment > 0
            )
            streams = expand(streams, out, mix_f)
            pre = mix_f.pre
            loads.append(load)
            balance.append(unevenness)
        index_loss, recall = memory.index_loss(self.query_weight(rows))
        trace = Trace(
            index_loss,
            jnp.mean(jnp.stack(balance)),
            jnp.stack(loads),
            jnp.concatenate(features, axis=-1).astype(self.settings.compute_dtype),
            recall,
        )
        return collapse(streams, pre), trace

    def query_weight(self, rows: Rows) -> jax.Array:
        """[B, T] how much the selection for a token matters: where it decides what is seen, most
        for those that look something up."""
        if not self.settings.selects:
            return jnp.ones_like(rows.said)
        return jnp.pad(rows.said[:, 1:], ((0, 0), (0, 1))) + SILENT_QUERY_WEIGHT

    def logits(self, parameters: Parameters, hidden: jax.Array) -> jax.Array:
        """Float32 [..., V]."""
        return self.product(self.norm(hidden, parameters.norm), parameters.head)

    @jax.named_scope("norm")
    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """RMS norm in the compute type."""
        return rms_norm(x, weight, self.config.rms_norm_eps).astype(self.settings.compute_dtype)

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`x` [..., K] times `weight` [N, K], float32."""
        return linear(x, weight, self.settings.compute_dtype)

    @jax.named_scope("mix")
    def mix(self, streams: Streams, p: HyperParameters) -> Mix:
        """Coefficients of a sub-layer."""
        c, s = self.config, self.config.hc_mult
        flat = jnp.concatenate(streams, axis=-1)
        mean = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
        m = self.product(flat, p.fn) * jax.lax.rsqrt(mean + 1e-20)
        pre = jax.nn.sigmoid(m[..., :s] * p.scale[0] + p.base[:s]) + c.hc_eps
        post = 2.0 * jax.nn.sigmoid(m[..., s : 2 * s] * p.scale[1] + p.base[s : 2 * s])
        comb = m[..., 2 * s :] * p.scale[2] + p.base[2 * s :]
        return Mix(pre, post, sinkhorn(comb, s, c.hc_sinkhorn_iters, c.hc_eps))

    @jax.named_scope("engram")
    def engram(self, streams: Streams, table_rows: jax.Array, p: EngramParameters) -> Streams:
        """Streams after the memory at `table_rows` [B, T, K] was added."""
        width = streams[0].shape[-1]
        read = p.embed[table_rows]
        both = self.product(read.reshape(*read.shape[:2], -1), p.wkv)
        *keys, value = jnp.split(both, len(streams) + 1, axis=-1)
        weight = p.q_weight * p.k_weight
        # The epsilon only matters for rows of zeros, where the gradient would be infinite.
        eps = max(self.config.rms_norm_eps, 1e-12)
        new = []
        for number, (stream, key) in enumerate(zip(streams, keys, strict=True)):
            s = stream.astype(jnp.float32)
            agreement = jnp.sum(s * weight[number] * key, axis=-1) / np.sqrt(width)
            for one in (s, key):
                agreement = agreement * jax.lax.rsqrt(jnp.mean(one * one, axis=-1) + eps)
            size = jnp.sqrt(jnp.maximum(jnp.abs(agreement), 1e-6))
            gate = jax.nn.sigmoid(jnp.where(agreement < 0, -size, size))
            new.append((s + gate[..., None] * value).astype(stream.dtype))
        return new

    @jax.named_scope("moe")
    def moe(
        self, x: jax.Array, p: MoeParameters, num_chosen: int, is_real: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Output, [E] load and unevenness. Every expert computes every token."""
        c = self.config
        flat = x.reshape(-1, x.shape[-1])
        affinity = jnp.sqrt(jax.nn.softplus(self.product(flat, p.gate)) + 1e-12)
        _, index = jax.lax.top_k(affinity + p.bias, num_chosen)
        num_experts = p.gate.shape[0]
        chosen = jnp.sum(jax.nn.one_hot(index, num_experts), axis=1)
        weight = chosen * affinity
        weight = c.routed_scaling_factor * weight / (jnp.sum(weight, -1, keepdims=True) + 1e-20)
        real = is_real.reshape(-1, 1).astype(jnp.float32)
        count = jnp.sum(real) + 1e-6
        load = jnp.sum(chosen * real, 0) / (count * num_chosen)
        share = jnp.sum(real * affinity / jnp.sum(affinity, -1, keepdims=True), 0) / count
        # The shared expert is one more expert, with weight 1.
        width = c.moe_intermediate_size
        w1 = jnp.concatenate([p.experts.w1, p.shared.w1[None]]).reshape(-1, flat.shape[1])
        w3 = jnp.concatenate([p.experts.w3, p.shared.w3[None]]).reshape(-1, flat.shape[1])
        w2 = jnp.concatenate([p.experts.w2, p.shared.w2[None]]).swapaxes(0, 1)
        hidden = swiglu(self.product(flat, w1), self.product(flat, w3), c.swiglu_limit)
        weights = jnp.concatenate([weight, jnp.ones((len(flat), 1))], axis=1)
        hidden = (hidden.reshape(len(flat), -1, width) * weights[:, :, None]).reshape(len(flat), -1)
        out = self.product(hidden, w2.reshape(flat.shape[1], -1))
        unevenness = num_experts * jnp.sum(jax.lax.stop_gradient(load) * share)
        return out.astype(x.dtype).reshape(x.shape), load, unevenness

    @jax.named_scope("attention")
    def attention(
        self,
        x: jax.Array,
        p: AttentionParameters,
        layer: LayerTopology,
        sight: "Sight",
        memory: "Memory",
    ) -> jax.Array:
        """Output [B, T, D] of one layer; `memory` takes what layers above use."""
        c = self.config
        dtype = self.settings.compute_dtype
        turn = sight.turns[layer.ratio > 0]
        query_latent = self.norm(self.product(x, p.wq_a).astype(dtype), p.q_norm)
        q = self.product(query_latent, p.wq_b).astype(dtype)
        q = self.rotate(q, turn, c.num_attention_heads)
        window = self.latent(x, p, turn)
        entries = seen = None
        if layer.kind is not LayerKind.WINDOW:
            if layer.kind is LayerKind.FULL:
                memory.sources[layer.layer_index] = self.compress(x, p, layer.ratio, sight)
            entries, keys = memory.sources[layer.kv_source]
            seen = sight.entries(layer.ratio)
            if layer.makes_index:
                assert p.indexer is not None
                memory.scores = self.index_scores(x, query_latent, p.indexer, keys, sight)
                memory.select(self, layer, seen, sight)
        out, share = attend(
            q.astype(dtype),
            window,
            entries,
            seen,
            memory.mask,
            p.attn_sink,
            sight,
            c.head_dim**-0.5,
        )
        if share is not None:
            memory.targets[-1].append(share)
        return self.attention_output(out.reshape(*out.shape[:2], -1), p, turn)

    def latent(self, x: jax.Array, p: AttentionParameters, turn: "Turn") -> jax.Array:
        """[B, T, D] window entries as the cache gives them back."""
        dtype = self.settings.compute_dtype
        latent = self.norm(self.product(x, p.wkv).astype(dtype), p.kv_norm)
        return rounded(self.rotate(latent, turn), self.settings.cache_format.window).astype(dtype)

    def attention_output(self, out: jax.Array, p: AttentionParameters, turn: "Turn") -> jax.Array:
        """[B, T, hidden] from attention sums [B, T, H * D]."""
        c, dtype = self.config, self.settings.compute_dtype
        out = self.rotate(out, turn, c.num_attention_heads, inverse=True)
        groups = out.astype(dtype).reshape(*out.shape[:2], c.o_groups, -1)
        first = p.wo_a.reshape(c.o_groups, c.o_lora_rank, -1)
        middle = [self.product(groups[:, :, g], first[g]) for g in range(c.o_groups)]
        return self.product(jnp.concatenate(middle, axis=-1).astype(dtype), p.wo_b).astype(dtype)

    @jax.named_scope("rotate")
    def rotate(
        self, x: jax.Array, turn: "Turn", heads: int = 0, *, inverse: bool = False
    ) -> jax.Array:
        """Rotary embedding of [B, T, D] or, with `heads`, of [B, T, heads * D]; the last channels
        of each head are rotated. The result, float32, has heads as a dimension of its own."""
        cosine, sine = turn
        if heads:
            x = x.reshape(*x.shape[:2], heads, -1)
            cosine, sine = cosine[:, :, None], sine[:, :, None]
        # Turning a pair by a quarter is a product with a constant, which is faster here than
        # taking pairs apart and putting them together again.
        width, still = x.shape[-1], x.shape[-1] - self.config.qk_rope_head_dim
        quarter = np.zeros((width, width), np.float32)
        even = np.arange(still, width, 2)
        quarter[even, even + 1], quarter[even + 1, even] = -1.0, 1.0
        turned = self.product(x, jnp.asarray(quarter)) * sine
        return x.astype(jnp.float32) * cosine + (-turned if inverse else turned)

    @jax.named_scope("compress")
    def compress(
        self, x: jax.Array, p: AttentionParameters, ratio: int, sight: "Sight"
    ) -> tuple[jax.Array, jax.Array]:
        """Entries [B, E, D] and index keys [B, E, d] of a layer."""
        dtype = self.settings.compute_dtype
        assert p.compressor is not None and p.indexer is not None
        value = self.product(x, p.compressor.wkv)
        if p.compressor.wgate is not None:
            shape = (x.shape[0], -1, ratio, value.shape[-1])
            weight = jax.nn.softmax(self.product(x, p.compressor.wgate).reshape(shape), axis=2)
            value = jnp.sum(weight * value.reshape(shape), axis=2)
        latent = self.norm(value.astype(dtype), p.compressor.norm)
        cosine, sine = sight.turns[True]
        turn = Turn(cosine[:, ::ratio], sine[:, ::ratio])
        entry = self.rotate(latent, turn)
        fixed = jax.lax.stop_gradient(latent)
        key = self.norm(self.product(fixed, p.indexer.wk).astype(dtype), p.indexer.k_norm)
        key = self.rotate(key, turn)
        form = self.settings.cache_format
        return rounded(entry, form.entries).astype(dtype), rounded(key, form.index).astype(dtype)

    @jax.named_scope("index_scores")
    def index_scores(
        self,
        x: jax.Array,
        query_latent: jax.Array,
        p: IndexerParameters,
        keys: jax.Array,
        sight: "Sight",
    ) -> jax.Array:
        """[B, T, E] float32. Learns from `index_loss` alone: its inputs are held fixed."""
        c, dtype = self.config, self.settings.compute_dtype
        q = self.product(jax.lax.stop_gradient(query_latent), p.wq_b)
        q = self.rotate(q, sight.turns[True], c.index_n_heads)
        q = rounded(q, self.settings.cache_format.index).astype(dtype)
        weight = self.product(jax.lax.stop_gradient(x), p.weights_proj)
        weight = weight * (c.index_n_heads * c.index_head_dim) ** -0.5
        scores = jnp.zeros((), jnp.float32)
        for head in range(c.index_n_heads):
            dots = compare(q[:, :, head], keys, dtype)
            scores = scores + jax.nn.relu(dots) * weight[:, :, head, None]
        return scores


class Turn(NamedTuple):
    """cosine and sine [B, T, D] of the rotation of each token, 1 and 0 for unrotated channels."""

    cosine: jax.Array
    sine: jax.Array


@dataclass(frozen=True)
class Sight:
    """What each token of a batch may see.

    Attributes:
        segment: [B, T] int32.
        turns: rotations by position, with scaled frequencies (True) and plain ones (False).
        window: [B, C, W, 2 W] bool: a chunk of W queries sees its own chunk and the one before.
    """

    segment: jax.Array
    turns: dict[bool, Turn]
    window: jax.Array

    @classmethod
    def of(cls, rows: Rows, config: ModelConfig) -> "Sight":
        """Works it out; T has to be a multiple of the window."""
        w = config.sliding_window
        batch, length = rows.segment.shape
        assert length % w == 0 and length % SEGMENT_ALIGNMENT == 0, (length, w)
        segment = with_previous_chunk(rows.segment[:, :, None], w)[..., 0]
        queries = rows.segment.reshape(batch, -1, w, 1)
        distance = np.arange(w)[:, None] + w - np.arange(2 * w)[None, :]
        near = (distance >= 0) & (distance < w)
        turns = {
            scaled: turn_of(rows.position, config, is_scaled=scaled) for scaled in (False, True)
        }
        return cls(rows.segment, turns, (segment[:, :, None] == queries) & near)

    def entries(self, ratio: int) -> jax.Array:
        """[B, T, E] bool: complete entries of the token's own conversation."""
        length = self.segment.shape[1]
        same = self.segment[:, :, None] == self.segment[:, None, ::ratio]
        last = np.arange(length // ratio) * ratio + ratio - 1
        return same & (last[None, :] <= np.arange(length)[:, None])


def turn_of(position: jax.Array, config: ModelConfig, *, is_scaled: bool) -> Turn:
    """Rotations by `position` [B, T] of vectors as wide as a head."""
    assert config.head_dim == config.index_head_dim, config
    angle = position.astype(jnp.float32)[..., None] * np.repeat(
        rope_frequencies(config, is_scaled=is_scaled), 2
    )
    still = config.head_dim - config.qk_rope_head_dim
    angle = jnp.pad(angle, [(0, 0), (0, 0), (still, 0)])
    # The barrier keeps the functions from being worked out again wherever they are used.
    return Turn(*jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle))))


class Memory:
    """What layers of one forward pass hand upwards."""

    def __init__(self) -> None:
        self.sources: dict[int | None, tuple[jax.Array, jax.Array]] = {}
        self.scores: jax.Array | None = None
        self.mask: jax.Array | None = None
        self.candidates: jax.Array | None = None
        self.targets: list[list[jax.Array]] = []
        self._guesses: list[tuple[jax.Array, jax.Array]] = []

    def select(self, network: Network, layer: LayerTopology, seen: jax.Array, sight: Sight) -> None:
        """Makes the mask of selected entries from the present scores."""
        c = network.config
        assert self.scores is not None
        shape = self.scores.shape
        visible = jnp.where(seen, self.scores, -jnp.inf)
        allowed = seen
        if layer.makes_candidates and network.settings.selects:
            flat = jax.lax.stop_gradient(visible).reshape(-1, shape[2])
            newest = jnp.broadcast_to(jnp.arange(1, shape[1] + 1), shape[:2]).reshape(-1)
            blocks = best_blocks(flat, newest, c.candidate_block_size, c.candidate_topk_blocks)
            inside = in_blocks(blocks, shape[2], c.candidate_block_size)
            self.candidates = inside.reshape(shape)
        if layer.uses_candidates and self.candidates is not None:
            allowed = seen & self.candidates
        self.mask = seen
        if network.settings.selects:
            self.mask = allowed
            if shape[2] > c.index_topk:
                best = jnp.where(allowed, jax.lax.stop_gradient(self.scores), -jnp.inf)
                values, index = jax.lax.top_k(best.reshape(-1, shape[2]), c.index_topk)
                row = jnp.arange(len(index))[:, None]
                mask = jnp.zeros((len(index), shape[2]), bool)
                mask = mask.at[row, index].set(values > -jnp.inf)
                self.mask = mask.reshape(shape)
        self.targets.append([])
        self._guesses.append((jnp.where(seen, self.scores, ABSENT), self.mask))

    @jax.named_scope("index_loss")
    def index_loss(self, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Divergence of the scores from the attention, over queries with enough of it, by their
        weight [B, T]; and the share of attention that the selection keeps, weighted alike."""
        total, kept = jnp.zeros(()), jnp.zeros(())
        for (scores, mask), shares in zip(self._guesses, self.targets, strict=True):
            target = jax.lax.stop_gradient(sum(shares[1:], shares[0]))
            mass = jnp.sum(target, axis=-1, keepdims=True)
            probability = target / (mass + 1e-6)
            logs = jax.nn.log_softmax(scores, axis=-1)
            divergence = probability * (jnp.log(probability + 1e-9) - logs)
            sure = jnp.minimum(mass[..., 0], 1.0) * weight
            total += jnp.sum(jnp.sum(divergence, -1) * sure) / (jnp.sum(sure) + 1e-6)
            share = target * weight[..., None]
            kept += jnp.sum(share * mask) / (jnp.sum(share) + 1e-6)
        count = max(len(self._guesses), 1)
        return total / count, kept / count


@jax.named_scope("attend")
def attend(
    q: jax.Array,
    window: jax.Array,
    entries: jax.Array | None,
    seen: jax.Array | None,
    selected: jax.Array | None,
    sink: jax.Array,
    sight: Sight,
    scale: float,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention [B, T, H, D] over window and selected entries under one softmax with a sink.

    Also [B, T, E]: the share that each visible entry, selected or not, would get, summed over
    heads.
    """
    batch, length, heads, width = q.shape
    chunk = sight.window.shape[2]
    near = with_previous_chunk(window, chunk).reshape(-1, 2 * chunk, width)
    queries = q.reshape(-1, chunk * heads, width)
    logits = compare(queries, near, q.dtype) * scale
    logits = logits.reshape(batch, length, heads, 2 * chunk)
    present = sight.window.reshape(batch, length, 1, 2 * chunk)
    logits = jnp.where(present, logits, ABSENT)
    peak = jnp.maximum(jnp.max(logits, -1), sink)
    far = None
    if entries is not None and seen is not None:
        far = compare(q.reshape(batch, -1, width), entries, q.dtype) * scale
        far = far.reshape(batch, length, heads, -1)
        far = jnp.where(seen[:, :, None], far, ABSENT)
        peak = jnp.maximum(peak, jnp.max(far, -1))
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(logits - peak[..., None])
    total = jnp.sum(weights, -1) + jnp.exp(sink - peak)
    out = weigh(weights.reshape(*queries.shape[:2], -1), near, q.dtype).reshape(q.shape)
    share = None
    if far is not None and entries is not None and selected is not None:
        everything = jnp.exp(far - peak[..., None])
        chosen = everything * selected[:, :, None]
        total = total + jnp.sum(chosen, -1)
        share = jax.lax.stop_gradient(jnp.sum(everything / total[..., None], axis=2))
        flat = chosen.reshape(batch, length * heads, -1)
        out = out + weigh(flat, entries, q.dtype).reshape(q.shape)
    return out / total[..., None], share
