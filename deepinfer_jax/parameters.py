"""The parameters of the model as a pytree of frozen dataclasses.

Quantised weights are `ScaledArray`s and stay packed; matrices act as `y = W x` with W stored
[out, in]; routed experts are stacked to [E, ...]. `parameter_table` lists every leaf: shapes,
types and the checkpoint tensors behind it.
"""

import jax
from flax import struct

from pallas_kernels.scaled_array import ScaledArray

Weight = jax.Array | ScaledArray
"""A weight that the published checkpoint quantises; code takes it packed or widened."""


@struct.dataclass
class ExpertParameters:
    """w1, w3 [ffn, embed] and w2 [embed, ffn]; routed experts have a leading [E]."""

    w1: Weight
    w3: Weight
    w2: Weight


@struct.dataclass
class MoeParameters:
    """gate [E, embed], selection biases [E] for text and for image tokens, and the experts."""

    gate: jax.Array
    bias: jax.Array
    bias_vl: jax.Array
    shared: ExpertParameters
    experts: ExpertParameters


@struct.dataclass
class HyperParameters:
    """fn [(2 + C) C, C embed], base [(2 + C) C], scale [3] for C residual streams."""

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


@struct.dataclass
class CompressorParameters:
    """wkv and wgate [head_dim, embed], norm [head_dim]; wgate is None for ratio 1."""

    wkv: jax.Array
    norm: jax.Array
    wgate: jax.Array | None = None


@struct.dataclass
class IndexerParameters:
    """wq_b [heads * dim, q_lora], weights_proj [heads, embed]; keys (wk, k_norm) in full layers."""

    wq_b: Weight
    weights_proj: jax.Array
    wk: jax.Array | None = None
    k_norm: jax.Array | None = None


@struct.dataclass
class AttentionParameters:
    """wo_a [o_groups * o_lora_rank, heads * dim / o_groups] holds one row block per group."""

    wq_a: Weight
    wq_b: Weight
    wkv: Weight
    wo_a: Weight
    wo_b: Weight
    q_norm: jax.Array
    kv_norm: jax.Array
    attn_sink: jax.Array
    compressor: CompressorParameters | None = None
    indexer: IndexerParameters | None = None


@struct.dataclass
class EngramParameters:
    """embed [rows, dim], wkv [(C + 1) embed, orders * heads * dim], weights [C, embed].

    embed is None where the table stays in host memory.
    """

    embed: Weight | None
    wkv: Weight
    q_weight: jax.Array
    k_weight: jax.Array


@struct.dataclass
class LayerParameters:
    """One block of the text model or of the draft module."""

    attn: AttentionParameters
    attn_norm: jax.Array
    ffn_norm: jax.Array
    hc_attn: HyperParameters
    hc_ffn: HyperParameters
    ffn: MoeParameters
    engram: EngramParameters | None = None


@struct.dataclass
class DraftParameters:
    """Draft blocks and heads; markov_embed and markov_head are [vocab, markov_rank]."""

    main_proj: Weight
    main_norm: jax.Array
    layers: tuple[LayerParameters, ...]
    norm: jax.Array
    markov_embed: jax.Array
    markov_head: jax.Array
    confidence_proj: jax.Array


@struct.dataclass
class LinearParameters:
    """weight [out, in] and bias [out]."""

    weight: jax.Array
    bias: jax.Array


@struct.dataclass
class VisionBlockParameters:
    """One encoder block; w1 [2 * intermediate, hidden] holds gate rows, then up rows."""

    norm1: jax.Array
    norm2: jax.Array
    wqkv: LinearParameters
    wo: LinearParameters
    w1: jax.Array
    w2: jax.Array


@struct.dataclass
class AlignerParameters:
    """Two layers from a cell of patches to one token embedding."""

    w1: LinearParameters
    w2: LinearParameters


@struct.dataclass
class VisionParameters:
    """The image encoder, the aligner and the three learned delimiter vectors [embed]."""

    patch_embed: LinearParameters
    blocks: tuple[VisionBlockParameters, ...]
    norm: jax.Array
    aligner: AlignerParameters
    image_start: jax.Array
    image_end: jax.Array
    image_newline: jax.Array


@struct.dataclass
class Parameters:
    """The whole model. Parts that were not loaded are None."""

    embed: jax.Array
    head: jax.Array
    norm: jax.Array
    layers: tuple[LayerParameters, ...]
    draft: DraftParameters | None = None
    vision: VisionParameters | None = None
