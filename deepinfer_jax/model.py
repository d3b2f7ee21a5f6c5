"""The whole forward pass, readable top to bottom.

Pure: weights, cache and one step's tokens go in; residual streams and the cache come out. All
sequences of a step are handled alike, whether they bring a chunk of a prompt or one to six tokens
of a decode step: what a token may see follows from its position.
"""

from typing import NamedTuple

import jax

from deepinfer_jax.batch import StepBatch, TokenView
from deepinfer_jax.cache import KVCache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.attention import attention
from deepinfer_jax.layers.engram import engram, ngram_classes, table_rows
from deepinfer_jax.layers.hyper_connections import Residual, begin
from deepinfer_jax.layers.indexer import Selection
from deepinfer_jax.layers.moe import moe
from deepinfer_jax.layers.primitives import Arithmetic, Probe, StepContext, embedding, no_probe
from deepinfer_jax.parameters import LayerParameters, Parameters
from deepinfer_jax.precision import Precision
from deepinfer_jax.topology import Topology


class Weights(NamedTuple):
    """The arrays of a model: its parameters, and [V] int32 Engram classes of the token ids."""

    parameters: Parameters
    token_classes: jax.Array


class Model(NamedTuple):
    """The static side of a model: everything that is not an array."""

    config: ModelConfig
    topology: Topology
    engram: EngramTables
    precision: Precision


def forward(
    model: Model, weights: Weights, cache: KVCache, batch: StepBatch, probe: Probe = no_probe
) -> tuple[Residual, KVCache]:
    """Run all layers over the tokens of a step.

    Returns:
        the residual streams after the last layer, for `logits`, and the cache with this step's
        entries written.
    """
    config, parameters = model.config, weights.parameters
    step = StepContext(
        config=config,
        precision=model.precision,
        tokens=TokenView.of(batch),
        is_image=batch.token_ids == config.image_token_id,
        block_tables=batch.block_tables,
        probe=probe,
    )
    with jax.named_scope("embedding"):
        h = embedding(parameters.embed, batch.token_ids)
    classes, class_ring = ngram_classes(
        batch.token_ids, weights.token_classes, cache.classes, model.engram, step
    )
    residual = Residual.start(h.astype(model.precision.compute_dtype), config.hc_mult)
    selection = Selection()
    rings = list(cache.rings)
    sources = dict(zip(config.kv_source_layer_ids, cache.sources, strict=True))
    for layer, layer_parameters in zip(model.topology.layers, parameters.layers, strict=True):
        here = step.of_layer(layer.layer_index)
        if layer_parameters.engram is not None and layer.engram_index is not None:
            rows = table_rows(classes, model.engram, layer.engram_index)
            here.probe("engram_hashes", rows)
            streams = engram(residual.settled(), rows, layer_parameters.engram, here)
            here.probe("engram_out", streams)
            residual = Residual(streams, residual.pre)
        x, residual = begin(residual, layer_parameters.hc_attn, here)
        here.probe("hc_attn", residual.mix)
        source = None if layer.kv_source is None else sources[layer.kv_source]
        out, rings[layer.layer_index], source, selection = attention(
            here.norm(x, layer_parameters.attn_norm),
            layer_parameters.attn,
            layer,
            rings[layer.layer_index],
            source,
            selection,
            here,
        )
        here.probe("attn_out", out)
        if layer.kv_source is not None and source is not None:
            sources[layer.kv_source] = source
        residual = _feed_forward(residual._replace(output=out), layer_parameters, here)
    return residual, KVCache(tuple(rings), tuple(sources.values()), class_ring)


def logits(model: Model, weights: Weights, residual: Residual, token_index: jax.Array) -> jax.Array:
    """Float32 [M, V] logits of the tokens `token_index` [M] of a step."""
    some = jax.tree.map(lambda a: a[token_index], residual)
    parameters = weights.parameters
    arithmetic = Arithmetic(model.config, model.precision)
    with jax.named_scope("head"):
        y = arithmetic.norm(some.collapsed(), parameters.norm)
        return arithmetic.product(y, parameters.head)


def _feed_forward(residual: Residual, parameters: LayerParameters, step: StepContext) -> Residual:
    x, residual = begin(residual, parameters.hc_ffn, step)
    step.probe("hc_ffn", residual.mix)
    x = step.norm(x, parameters.ffn_norm)
    out = moe(x, parameters.ffn, step.config.num_experts_per_tok, step)
    step.probe("ffn_out", out)
    residual = residual._replace(output=out)
    step.probe("residual", residual)
    return residual
