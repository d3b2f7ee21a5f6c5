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
from deepinfer_jax.replay import check_upper_layers
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
    config, parameters = model.config, weights.parameters
    step, token_ids, residual = _start(model, parameters, batch, image_features, probe)
    classes, class_ring = ngram_classes(
        token_ids, weights.token_classes, cache.classes, model.engram, step
    )
    selection = Selection()
    features: list[jax.Array] = []
    rings = list(cache.rings)
    sources = dict(zip(config.kv_source_layer_ids, cache.sources, strict=True))
    for layer, layer_parameters in zip(model.topology.layers, parameters.layers, strict=True):
        here = step.of_layer(layer.layer_index)
        residual = _with_engram(
            residual, layer_parameters, layer, classes, model.engram, engram_rows, here
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
            step, x, residual, features = _upper_step(step, batch, replay, x, residual, features)
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
    draft = cache.draft
    if draft is not None:
        draft = append_context(features, draft_module(parameters), draft, step)
    return residual, cache._replace(
        rings=tuple(rings), sources=tuple(sources.values()), classes=class_ring, draft=draft
    )


def _start(
    model: Model,
    parameters: Parameters,
    batch: StepBatch,
    image_features: jax.Array | None,
    probe: Probe,
) -> tuple[StepContext, jax.Array, Residual]:
    """The step, its token ids with the image token's where a feature stands, and the streams."""
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
    with jax.named_scope("embedding"):
        h = embedding(parameters.embed, token_ids)
        if image_features is not None:
            h = jnp.where(is_feature[:, None], image_features[: h.shape[0]].astype(h.dtype), h)
    return step, token_ids, Residual.start(h.astype(model.precision.compute_dtype), config.hc_mult)


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


def _upper_step(
    step: StepContext,
    batch: StepBatch,
    replay: Replay,
    x: jax.Array,
    residual: Residual,
    features: list[jax.Array],
) -> tuple[StepContext, jax.Array, Residual, list[jax.Array]]:
    """The step, the layer input and the residual of the layers from the last KV source up."""
    if not replay.num_tail_tokens:
        return dataclasses.replace(step, tokens=tail_view(batch)), x, residual, features
    index, tail = tail_tokens(batch, replay.num_tail_tokens)
    upper = dataclasses.replace(
        step, tokens=tail_view(tail), is_image=step.is_image.at[index].get(mode="fill")
    )

    def pick(a: jax.Array) -> jax.Array:
        return a.at[index].get(mode="fill", fill_value=0)

    return upper, *jax.tree.map(pick, (x, residual, features))


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
