"""The parameters of the model as a pytree of frozen dataclasses.

Quantised weights are `ScaledArray`s and stay packed; matrices act as `y = W x` with W stored
[out, in]; routed experts are stacked to [E, ...]. `parameter_table` lists every leaf: shapes,
types and the checkpoint tensors behind it.
"""

import jax
from flax import struct

from pallas_kernels.scaled_array import ScaledArray

Weight = jax.Array | ScaledArray


@struct.dataclass
class ExpertParameters:
    """w1, w3 [ffn, embed] and w2 [embed, ffn]; routed experts have a leading [E]."""

    w1: Weight
    w3: Weight
    w2: Weight


@struct.dataclass
class MoeParameters:
    """gate [E, embed], selection biases [E] for text and for image tokens, and the experts."""

    gate: Weight
    bias: Weight
    bias_vl: Weight
    shared: ExpertParameters
    experts: ExpertParameters


@struct.dataclass
class HyperParameters:
    """fn [(2 + C) C, C embed], base [(2 + C) C], scale [3] for C residual streams."""

    fn: Weight
    base: Weight
    scale: Weight


@struct.dataclass
class CompressorParameters:
    """wkv and wgate [head_dim, embed], norm [head_dim]; wgate is None for ratio 1."""

    wkv: Weight
    norm: Weight
    wgate: Weight | None = None


@struct.dataclass
class IndexerParameters:
    """wq_b [heads * dim, q_lora], weights_proj [heads, embed]; keys (wk, k_norm) in full layers."""

    wq_b: Weight
    weights_proj: Weight
    wk: Weight | None = None
    k_norm: Weight | None = None


@struct.dataclass
class AttentionParameters:
    """wo_a [o_groups * o_lora_rank, heads * dim / o_groups] holds one row block per group."""

    wq_a: Weight
    wq_b: Weight
    wkv: Weight
    wo_a: Weight
    wo_b: Weight
    q_norm: Weight
    kv_norm: Weight
    attn_sink: Weight
    compressor: CompressorParameters | None = None
    indexer: IndexerParameters | None = None


@struct.dataclass
class EngramParameters:
    """embed [rows, dim], wkv [(C + 1) embed, orders * heads * dim], weights [C, embed]."""

    embed: Weight
    wkv: Weight
    q_weight: Weight
    k_weight: Weight


@struct.dataclass
class LayerParameters:
    """One block of the text model or of the draft module."""

    attn: AttentionParameters
    attn_norm: Weight
    ffn_norm: Weight
    hc_attn: HyperParameters
    hc_ffn: HyperParameters
    ffn: MoeParameters
    engram: EngramParameters | None = None


@struct.dataclass
class DraftParameters:
    """Draft blocks and heads; markov_embed and markov_head are [vocab, markov_rank]."""

    main_proj: Weight
    main_norm: Weight
    layers: tuple[LayerParameters, ...]
    norm: Weight
    markov_embed: Weight
    markov_head: Weight
    confidence_proj: Weight


@struct.dataclass
class LinearParameters:
    """weight [out, in] and bias [out]."""

    weight: Weight
    bias: Weight


@struct.dataclass
class VisionBlockParameters:
    """One encoder block; w1 [2 * intermediate, hidden] holds gate rows, then up rows."""

    norm1: Weight
    norm2: Weight
    wqkv: LinearParameters
    wo: LinearParameters
    w1: Weight
    w2: Weight


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
    norm: Weight
    aligner: AlignerParameters
    image_start: Weight
    image_end: Weight
    image_newline: Weight


@struct.dataclass
class Parameters:
    """The whole model. Parts that were not loaded are None."""

    embed: Weight
    head: Weight
    norm: Weight
    layers: tuple[LayerParameters, ...]
    draft: DraftParameters | None = None
    vision: VisionParameters | None = None
