"""The whole forward pass, readable top to bottom.

Pure: weights, cache and one step's tokens go in; residual streams and the cache come out. All
sequences of a step are handled alike, whether they bring a chunk of a prompt or one to six tokens
of a decode step: what a token may see follows from its position.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import (
    IMAGE_FEATURE,
    Replay,
    StepBatch,
    TokenView,
    tail_tokens,
    tail_view,
)
from deepinfer_jax.cache import KVCache, SourceCache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.draft import DraftSettings, append_context, draft_module
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.attention import attention
from deepinfer_jax.layers.compressor import compress
from deepinfer_jax.layers.engram import (
    engram,
    ngram_classes,
    table_memory,
    table_rows,
    unpack_rows,
)
from deepinfer_jax.layers.hyper_connections import Residual, begin
from deepinfer_jax.layers.indexer import Selection
from deepinfer_jax.layers.moe import feed_forward
from deepinfer_jax.layers.primitives import Arithmetic, Probe, StepContext, embedding, no_probe
from deepinfer_jax.parameters import LayerParameters, Parameters
from deepinfer_jax.precision import Precision
from deepinfer_jax.replay import check_upper_layers, num_replayed
from deepinfer_jax.topology import LayerTopology, Topology
from sharding.collectives import UNDIVIDED, StepGroups


class Weights(NamedTuple):
    """The arrays of a model: its parameters, and [V] int32 Engram classes of the token ids."""

    parameters: Parameters
    token_classes: jax.Array


class Model(NamedTuple):
    """The static side of a model: everything that is not an array.

    Steps run in tiles of `tile_tokens` tokens (see `tiles.py`); 0 runs all tokens at once. `groups`
    says between which devices a step is divided; other than one device needs `mesh_steps.py`.
    """

    config: ModelConfig
    topology: Topology
    engram: EngramTables
    precision: Precision
    draft: DraftSettings = DraftSettings()
    tile_tokens: int = 0
    groups: StepGroups = UNDIVIDED

    @property
    def num_replayed(self) -> int:
        """Tokens before a block boundary that make the state at it anew (`replay.num_replayed`)."""
        return num_replayed(self.config, self.topology)


class Passage(NamedTuple):
    """What passes from one layer to the next, beside the cache.

    Attributes:
        residual: the residual streams.
        classes: [T, n] int32, for Engram: classes of each token and its predecessors.
        features: [T, hidden] of each layer so far that the draft module reads.
    """

    residual: Residual
    classes: jax.Array
    features: tuple[jax.Array, ...] = ()


def forward(
    model: Model,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    probe: Probe = no_probe,
    image_features: jax.Array | None = None,
    engram_rows: jax.Array | None = None,
    replay: Replay | None = None,
) -> tuple[Residual, KVCache]:
    """Run all layers over the tokens of a step.

    Args:
        image_features: [F, hidden] with F at least T. A token whose id is `IMAGE_FEATURE` is an
            image token and enters with the row of its own index instead of an embedding. None
            for steps that have no such tokens.
        engram_rows: [T, L, K, bytes] uint8 from `HostEngram.fetch`, for weights whose Engram
            tables stay in host memory.
        replay: what the step's shape says. The layers below the last KV source run every token;
            those from there up may run only the tail of a prompt, since nothing of their past is
            read but their windows.

    Returns:
        the residual streams after the last layer of the tokens of `upper_batch`, for `logits`,
        and the cache with this step's entries written.
    """
    passage, cache = enter(model, weights, cache, batch, probe, image_features)
    layers = range(len(model.topology.layers))
    passage, cache = run_layers(
        model, weights, cache, batch, passage, layers, probe, engram_rows, replay
    )
    return leave(model, weights, cache, batch, passage, probe, replay)


def enter(
    model: Model,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    probe: Probe = no_probe,
    image_features: jax.Array | None = None,
) -> tuple[Passage, KVCache]:
    """What comes to the first layer, and the cache with the token classes of this step."""
    step, token_ids = _context(model, batch, probe)
    with jax.named_scope("embedding"):
        h = embedding(weights.parameters.embed, token_ids)
        if image_features is not None:
            is_feature = batch.token_ids == IMAGE_FEATURE
            h = jnp.where(is_feature[:, None], image_features[: h.shape[0]].astype(h.dtype), h)
    residual = Residual.start(h.astype(model.precision.compute_dtype), model.config.hc_mult)
    classes, class_ring = ngram_classes(
        token_ids, weights.token_classes, cache.classes, model.engram, step
    )
    return Passage(residual, classes), cache._replace(classes=class_ring)


def run_layers(
    model: Model,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    passage: Passage,
    layers: range,
    probe: Probe = no_probe,
    engram_rows: jax.Array | None = None,
    replay: Replay | None = None,
) -> tuple[Passage, KVCache]:
    """Run some consecutive layers.

    Args:
        cache: what these layers have no part in may be None.
        layers: the whole of one or several parts of the topology.
        engram_rows, replay: as for `forward`.
    """
    config = model.config
    assert layers.start <= model.topology.num_encoder_layers, "a part of the upper layers"
    step, _ = _context(model, batch, probe)
    residual, features = passage.residual, list(passage.features)
    selection = Selection()
    rings = list(cache.rings)
    sources = dict(zip(config.kv_source_layer_ids, cache.sources, strict=True))
    for layer in model.topology.layers[layers.start : layers.stop]:
        layer_parameters = weights.parameters.layers[layer.layer_index]
        here = step.of_layer(layer.layer_index)
        residual = _with_engram(
            residual, layer_parameters, layer, passage.classes, model.engram, engram_rows, here
        )
        x, residual = begin(residual, layer_parameters.hc_attn, here)
        here.probe("hc_attn", residual.mix)
        if layer.layer_index in config.dspark_target_layer_ids:
            features.append(jnp.mean(residual.streams, axis=1))
        x = here.norm(x, layer_parameters.attn_norm)
        if layer.makes_entries:
            own = sources[layer.layer_index]
            sources[layer.layer_index] = _compressed(x, layer_parameters, layer, own, here)
        if replay is not None and layer.layer_index == model.topology.num_encoder_layers:
            check_upper_layers(model.topology, drops_tokens=replay.num_tail_tokens > 0)
            step = _upper_context(step, batch, replay)
            x, residual, features = _upper_values(batch, replay, (x, residual, features))
            here = step.of_layer(layer.layer_index)
        out, rings[layer.layer_index], selection = attention(
            x,
            layer_parameters.attn,
            layer,
            rings[layer.layer_index],
            None if layer.kv_source is None else sources[layer.kv_source],
            selection,
            here,
        )
        here.probe("attn_out", out)
        residual = residual._replace(output=out)
        residual = feed_forward(residual, layer_parameters, config.num_experts_per_tok, here)
    passage = Passage(residual, passage.classes, tuple(features))
    return passage, cache._replace(rings=tuple(rings), sources=tuple(sources.values()))


def leave(
    model: Model,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    passage: Passage,
    probe: Probe = no_probe,
    replay: Replay | None = None,
) -> tuple[Residual, KVCache]:
    """What comes from the last layer, and the cache with what the draft module keeps."""
    draft = cache.draft
    if draft is not None:
        step, _ = _context(model, batch, probe)
        if replay is not None:
            step = _upper_context(step, batch, replay)
        features, module = list(passage.features), draft_module(weights.parameters)
        draft = append_context(features, module, draft, step)
    return passage.residual, cache._replace(draft=draft)


def _context(model: Model, batch: StepBatch, probe: Probe) -> tuple[StepContext, jax.Array]:
    """The step, and its token ids with the image token's where a feature stands."""
    config = model.config
    is_feature = batch.token_ids == IMAGE_FEATURE
    token_ids = jnp.where(is_feature, config.image_token_id, batch.token_ids)
    step = StepContext(
        config=config,
        precision=model.precision,
        groups=model.groups,
        tokens=TokenView.of(batch),
        is_image=token_ids == config.image_token_id,
        block_tables=batch.block_tables,
        probe=probe,
    )
    return step, token_ids


def _compressed(
    x: jax.Array,
    parameters: LayerParameters,
    layer: LayerTopology,
    source: SourceCache,
    step: StepContext,
) -> SourceCache:
    """The layer's own source with the entries that this step completes."""
    compressor, indexer = parameters.attn.compressor, parameters.attn.indexer
    assert compressor is not None and indexer is not None, layer
    return compress(x, compressor, indexer, layer.ratio, source, step)


def upper_batch(batch: StepBatch, replay: Replay | None) -> StepBatch:
    """The tokens that are left after the last layer: all, or the tail that `replay` keeps."""
    if replay is None or not replay.num_tail_tokens:
        return batch
    return tail_tokens(batch, replay.num_tail_tokens)[1]


def _upper_context(step: StepContext, batch: StepBatch, replay: Replay) -> StepContext:
    """The step of the layers from the last KV source up."""
    if not replay.num_tail_tokens:
        return dataclasses.replace(step, tokens=tail_view(batch))
    index, tail = tail_tokens(batch, replay.num_tail_tokens)
    is_image = step.is_image.at[index].get(mode="fill")
    return dataclasses.replace(step, tokens=tail_view(tail), is_image=is_image)


def _upper_values[T](batch: StepBatch, replay: Replay, values: T) -> T:
    """What passes into those layers: a tree of [T, ...] without the tokens that are left out."""
    if not replay.num_tail_tokens:
        return values
    index, _ = tail_tokens(batch, replay.num_tail_tokens)
    return jax.tree.map(lambda a: a.at[index].get(mode="fill", fill_value=0), values)


def logits(model: Model, weights: Weights, residual: Residual, token_index: jax.Array) -> jax.Array:
    """Float32 [M, V] logits of the tokens `token_index` [M] of a step."""
    some = jax.tree.map(lambda a: a[token_index], residual)
    parameters = weights.parameters
    arithmetic = Arithmetic(model.config, model.precision, groups=model.groups)
    with jax.named_scope("head"):
        y = arithmetic.norm(some.collapsed(), parameters.norm)
        return arithmetic.product(y, parameters.head)


def _with_engram(
    residual: Residual,
    parameters: LayerParameters,
    layer: LayerTopology,
    classes: jax.Array,
    constants: EngramTables,
    fetched: jax.Array | None,
    step: StepContext,
) -> Residual:
    """The residual after the layer's memory was added, if it has one."""
    if parameters.engram is None or layer.engram_index is None:
        return residual
    table = parameters.engram.embed
    if table is not None:
        rows = table_rows(classes, constants, layer.engram_index)
        step.probe("engram_hashes", rows)
        memory = table_memory(table, rows, step.groups.engram)
    else:
        assert fetched is not None, "the tables are in host memory and no rows came with the step"
        memory = unpack_rows(fetched[:, layer.engram_index], step.config.engram_head_dim)
    streams = engram(residual.settled(), memory, parameters.engram, step)
    step.probe("engram_out", streams)
    return Residual(streams, residual.pre)
