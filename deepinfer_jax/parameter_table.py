"""The one table of every stored tensor of a model, derived from its config.

There is one `ParameterSpec` per leaf of `Parameters`: which checkpoint tensors make it up, their
shapes and types, where it sits in the tree, and the logical name of each dimension. Loading,
placing on devices, sizing and shape checks all read this table, so a tensor is described in one
place only.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameters import (
    AlignerParameters,
    AttentionParameters,
    CompressorParameters,
    DraftParameters,
    EngramParameters,
    ExpertParameters,
    HyperParameters,
    IndexerParameters,
    LayerParameters,
    LinearParameters,
    MoeParameters,
    Parameters,
    VisionBlockParameters,
    VisionParameters,
)
from deepinfer_jax.topology import LayerTopology, Topology
from pallas_kernels.scaled_array import FP4_ROW32, FP8_BLOCK32, FP8_ROW32, Format, ScaledArray

PARTS = ("text", "draft", "vision")
"""What may be loaded separately: the language model, the draft module, the image encoder."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint file. `dtype` is the spelling of the safetensors format."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.uint8),
}
"""Element types of a checkpoint. "I8" holds two FP4 codes, which in memory are unsigned bytes."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One leaf of the tree.

    Attributes:
        path: field names and list positions from the root `Parameters`.
        name: checkpoint name of the values; a stacked leaf has "{expert}" in it.
        shape: values of one stored matrix, before packing and stacking.
        storage: the `Format` of a quantised weight, else "BF16" or "F32".
        axes: logical name of each dimension of the leaf, "experts" first when stacked. Codes
            and scales share them.
        part: one of `PARTS`.
        group: what it belongs to, for sizing ("routed_experts", "engram_table", ...).
        num_stacked: experts stacked into this leaf; 0 for a leaf that is one matrix.
    """

    path: tuple[str | int, ...]
    name: str
    shape: tuple[int, ...]
    storage: Format | str
    axes: tuple[str, ...]
    part: str
    group: str
    num_stacked: int = 0

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The stored tensors: for each stacked expert the values, then the scales if any."""
        if not self.num_stacked:
            return self._stored(self.name)
        experts = range(self.num_stacked)
        return tuple(t for e in experts for t in self._stored(self.name.format(expert=e)))

    def _stored(self, name: str) -> tuple[TensorSpec, ...]:
        form = self.storage
        if isinstance(form, str):
            return (TensorSpec(name, self.shape, form),)
        codes = TensorSpec(name, form.code_shape(self.shape), "F8_E4M3" if form.bits == 8 else "I8")
        scale_name = name.removesuffix(".weight") + ".scale"
        return codes, TensorSpec(scale_name, form.scale_shape(self.shape), "F8_E8M0")

    @property
    def num_values(self) -> int:
        """Parameters counted as the architecture counts them: scales are not parameters."""
        return math.prod(self.shape) * max(self.num_stacked, 1)

    def abstract(self) -> Any:  # noqa: ANN401 - a ShapeDtypeStruct or a ScaledArray of two
        """The leaf as shapes and dtypes, for sizing and `jax.eval_shape`."""
        lead = (self.num_stacked,) if self.num_stacked else ()
        arrays = [
            jax.ShapeDtypeStruct((*lead, *tensor.shape), DTYPES[tensor.dtype])
            for tensor in self._stored(self.name)
        ]
        if isinstance(self.storage, Format):
            return ScaledArray(arrays[0], arrays[1], self.storage)
        return arrays[0]


@functools.lru_cache(maxsize=16)
def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Every leaf of every part that the config describes, in the order of the forward pass.

    Raises:
        ModelConfigError: the layer map of the config contradicts itself.
    """
    return tuple(_text(config)) + tuple(_draft(config)) + tuple(_vision(config))


def build_parameters(
    config: ModelConfig,
    make_leaf: Callable[[ParameterSpec], Any],
    parts: Collection[str] = PARTS,
) -> Parameters:
    """The tree of the chosen parts, with `make_leaf(spec)` at each leaf, called in table order.

    A part that the config does not describe (a model without an image encoder) is None.

    Raises:
        ValueError: `parts` names an unknown part or leaves out "text".
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or "text" not in parts:
        raise ValueError(f"parts is {sorted(parts)}; expected 'text' and any others of {PARTS}")
    return _construct(Parameters, _tree(config, make_leaf, parts))


def build_vision(
    config: ModelConfig, make_leaf: Callable[[ParameterSpec], Any]
) -> VisionParameters | None:
    """The image encoder alone, as in `build_parameters`; None if the config has none."""
    return _construct(_Parts, _tree(config, make_leaf, {"vision"})).vision


@dataclass(frozen=True)
class _Parts:
    """What there may be without the text model."""

    vision: VisionParameters | None = None


def _tree(
    config: ModelConfig, make_leaf: Callable[[ParameterSpec], Any], parts: Collection[str]
) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for spec in parameter_table(config):
        if spec.part in parts:
            node = root
            for step in spec.path[:-1]:
                node = node.setdefault(step, {})
            node[spec.path[-1]] = make_leaf(spec)
    return root


def abstract_parameters(config: ModelConfig, parts: Collection[str] = PARTS) -> Parameters:
    """The tree with shapes and dtypes in place of arrays; allocates nothing."""
    return build_parameters(config, ParameterSpec.abstract, parts)


# Classes of the inner nodes by field name; every other inner node is a LinearParameters.
_NODES = {
    "layers": LayerParameters,
    "attn": AttentionParameters,
    "compressor": CompressorParameters,
    "indexer": IndexerParameters,
    "hc_attn": HyperParameters,
    "hc_ffn": HyperParameters,
    "ffn": MoeParameters,
    "shared": ExpertParameters,
    "experts": ExpertParameters,
    "engram": EngramParameters,
    "draft": DraftParameters,
    "vision": VisionParameters,
    "blocks": VisionBlockParameters,
    "aligner": AlignerParameters,
}


def _construct(cls: Callable[..., Any], node: dict[Any, Any]) -> Any:  # noqa: ANN401
    values: dict[str, Any] = {}
    for name, child in node.items():
        inner = _NODES.get(name, LinearParameters)
        if not isinstance(child, dict):
            values[name] = child
        elif all(isinstance(key, int) for key in child):
            values[name] = tuple(_construct(inner, child[i]) for i in range(len(child)))
        else:
            values[name] = _construct(inner, child)
    return cls(**values)


class _Rows:
    """Makes the specs of one module: a common tree path, name prefix, part and group."""

    def __init__(self, path: tuple[str | int, ...], prefix: str, part: str, group: str) -> None:
        self._path, self._prefix, self._part, self._group = path, prefix, part, group

    def __call__(
        self,
        leaf: str,
        axes: tuple[str, ...],
        shape: tuple[int, ...],
        storage: Format | str = "BF16",
        *,
        name: str | None = None,
        group: str | None = None,
        num_stacked: int = 0,
    ) -> ParameterSpec:
        """`leaf` may be dotted; the checkpoint name is `leaf` + ".weight" unless given."""
        steps = tuple(leaf.split("."))
        name = self._prefix + (f"{leaf}.weight" if name is None else name)
        axes = ("experts", *axes) if num_stacked else axes
        group = group or self._group
        path = self._path + steps
        return ParameterSpec(path, name, shape, storage, axes, self._part, group, num_stacked)


def _text(c: ModelConfig) -> Iterator[ParameterSpec]:
    row = _Rows((), "", "text", "embedding")
    yield row("embed", ("vocab", "embed"), (c.vocab_size, c.hidden_size))
    for layer in Topology.of(c).layers:
        index = layer.layer_index
        path, prefix = ("layers", index), f"layers.{index}."
        yield from _block(c, path, prefix, "text", c.n_routed_experts)
        if layer.makes_index:
            yield from _entries(c, layer)
        if layer.engram_index is not None:
            yield from _engram(c, layer)
    yield row("norm", ("embed",), (c.hidden_size,), group="norm")
    yield row("head", ("vocab", "embed"), (c.vocab_size, c.hidden_size), group="head")


def _block(
    c: ModelConfig, path: tuple[str | int, ...], prefix: str, part: str, num_experts: int
) -> Iterator[ParameterSpec]:
    """What every block has: attention, norms, hyper-connections, experts."""
    hidden, head_width = c.hidden_size, c.num_attention_heads * c.head_dim
    out_rank = c.o_groups * c.o_lora_rank
    fp8 = FP8_BLOCK32
    row = _Rows((*path, "attn"), prefix + "attn.", part, "attention")
    yield row("wq_a", ("q_lora", "embed"), (c.q_lora_rank, hidden), fp8)
    yield row("wq_b", ("heads", "q_lora"), (head_width, c.q_lora_rank), fp8)
    yield row("wkv", ("kv", "embed"), (c.head_dim, hidden), fp8)
    yield row("wo_a", ("o_lora", "group_heads"), (out_rank, head_width // c.o_groups), fp8)
    yield row("wo_b", ("embed", "o_lora"), (hidden, out_rank), fp8)
    yield row("q_norm", ("q_lora",), (c.q_lora_rank,))
    yield row("kv_norm", ("kv",), (c.head_dim,))
    yield row("attn_sink", ("heads",), (c.num_attention_heads,), "F32", name="attn_sink")
    row = _Rows(path, prefix, part, "norm")
    yield row("attn_norm", ("embed",), (hidden,))
    yield row("ffn_norm", ("embed",), (hidden,))
    row = _Rows(path, prefix, part, "hyper_connections")
    # C incoming mixes, C outgoing ones and the C x C mix between streams.
    num_mixes = (2 + c.hc_mult) * c.hc_mult
    for side in ("hc_attn", "hc_ffn"):
        shape = (num_mixes, c.hc_mult * hidden)
        yield row(f"{side}.fn", ("mixes", "stream_embed"), shape, "F32", name=f"{side}_fn")
        yield row(f"{side}.base", ("mixes",), (num_mixes,), "F32", name=f"{side}_base")
        yield row(f"{side}.scale", ("mix_kinds",), (3,), "F32", name=f"{side}_scale")
    row = _Rows((*path, "ffn"), prefix + "ffn.", part, "router")
    yield row("gate", ("router", "embed"), (num_experts, hidden))
    yield row("bias", ("router",), (num_experts,), "F32", name="gate.bias")
    yield row("bias_vl", ("router",), (num_experts,), "F32", name="gate.bias_vl")
    wide = c.moe_intermediate_size
    for leaf, out, axes in (
        ("w1", wide, ("ffn", "embed")),
        ("w3", wide, ("ffn", "embed")),
        ("w2", hidden, ("embed", "ffn")),
    ):
        shape = (out, hidden + wide - out)
        name = f"shared_experts.{leaf}.weight"
        shared_axes = tuple("shared_ffn" if axis == "ffn" else axis for axis in axes)
        yield row(f"shared.{leaf}", shared_axes, shape, fp8, name=name, group="shared_expert")
        yield row(
            f"experts.{leaf}",
            axes,
            shape,
            FP4_ROW32,
            name=f"experts.{{expert}}.{leaf}.weight",
            group="routed_experts",
            num_stacked=num_experts,
        )


def _entries(c: ModelConfig, layer: LayerTopology) -> Iterator[ParameterSpec]:
    """Index queries, and in full layers also the compressor and the index keys."""
    index = layer.layer_index
    path, prefix = ("layers", index, "attn"), f"layers.{index}.attn."
    hidden = c.hidden_size
    row = _Rows(path, prefix, "text", "indexer")
    width = c.index_n_heads * c.index_head_dim
    yield row("indexer.wq_b", ("index_heads", "q_lora"), (width, c.q_lora_rank), FP8_BLOCK32)
    yield row("indexer.weights_proj", ("index_heads", "embed"), (c.index_n_heads, hidden))
    if not layer.makes_entries:
        return
    yield row("indexer.wk", ("index_dim", "kv"), (c.index_head_dim, c.head_dim))
    yield row("indexer.k_norm", ("index_dim",), (c.index_head_dim,))
    row = _Rows(path, prefix, "text", "compressor")
    yield row("compressor.wkv", ("kv", "embed"), (c.head_dim, hidden))
    yield row("compressor.norm", ("kv",), (c.head_dim,))
    if layer.ratio > 1:
        yield row("compressor.wgate", ("kv", "embed"), (c.head_dim, hidden))


def _engram(c: ModelConfig, layer: LayerTopology) -> Iterator[ParameterSpec]:
    assert layer.engram_index is not None, layer
    index = layer.layer_index
    row = _Rows(("layers", index, "engram"), f"layers.{index}.engram.", "text", "engram")
    num_rows = c.engram_num_embeddings[layer.engram_index]
    shape = (num_rows, c.engram_head_dim)
    axes = ("engram_rows", "engram_dim")
    yield row("embed", axes, shape, FP8_ROW32, group="engram_table")
    features = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    shape = ((c.hc_mult + 1) * c.hidden_size, features)
    yield row("wkv", ("engram_out", "engram_in"), shape, FP8_BLOCK32)
    for leaf in ("q_weight", "k_weight"):
        yield row(leaf, ("streams", "embed"), (c.hc_mult, c.hidden_size), name=leaf)


def _draft(c: ModelConfig) -> Iterator[ParameterSpec]:
    last = c.num_nextn_predict_layers - 1
    if last < 0:
        return
    hidden, rank = c.hidden_size, c.dspark_markov_rank
    row = _Rows(("draft",), "mtp.0.", "draft", "draft_head")
    shape = (hidden, len(c.dspark_target_layer_ids) * hidden)
    yield row("main_proj", ("embed", "features"), shape, FP8_BLOCK32)
    yield row("main_norm", ("embed",), (hidden,))
    for index in range(last + 1):
        path, prefix = ("draft", "layers", index), f"mtp.{index}."
        yield from _block(c, path, prefix, "draft", c.dspark_n_routed_experts)
    row = _Rows(("draft",), f"mtp.{last}.", "draft", "draft_head")
    shape = (c.vocab_size, rank)
    yield row("norm", ("embed",), (hidden,))
    yield row("markov_embed", ("vocab", "markov"), shape, name="markov_head.embed.weight")
    yield row("markov_head", ("vocab", "markov"), shape, name="markov_head.head.weight")
    axes = ("confidence", "confidence_in")
    yield row("confidence_proj", axes, (1, hidden + rank), name="confidence_head.proj.weight")


def _vision(c: ModelConfig) -> Iterator[ParameterSpec]:
    v = c.vision
    if v is None:
        return
    wide, inner = v.hidden_size, v.intermediate_size
    pixels = 3 * v.patch_size**2
    yield from _linear("patch_embed", "vision.patch_embed.proj.", wide, pixels, "vision")
    for index in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{index}."
        row = _Rows(("vision", "blocks", index), prefix, "vision", "vision")
        yield row("norm1", ("vision_embed",), (wide,))
        yield row("norm2", ("vision_embed",), (wide,))
        for leaf, out in (("wqkv", 3 * wide), ("wo", wide)):
            where = f"blocks.{index}.{leaf}"
            yield from _linear(where, f"{prefix}attn.{leaf}.", out, wide, "vision")
        axes = ("vision_ffn", "vision_embed")
        yield row("w1", axes, (2 * inner, wide), name="mlp.w1.weight")
        yield row("w2", axes[::-1], (wide, inner), name="mlp.w2.weight")
    row = _Rows(("vision",), "", "vision", "vision")
    yield row("norm", ("vision_embed",), (wide,), name="vision.norm.weight")
    cell = wide * v.downsample_ratio**2
    yield from _linear("aligner.w1", "aligner.w1.", c.hidden_size, cell, "aligner")
    yield from _linear("aligner.w2", "aligner.w2.", c.hidden_size, c.hidden_size, "aligner")
    for leaf in ("image_start", "image_end", "image_newline"):
        yield row(leaf, ("embed",), (c.hidden_size,), name=leaf, group="image_vectors")


def _linear(
    where: str, prefix: str, num_out: int, num_in: int, group: str
) -> Iterator[ParameterSpec]:
    """A weight and a bias of the vision part at the dotted path `where`."""
    steps = (int(step) if step.isdigit() else step for step in where.split("."))
    row = _Rows(("vision", *steps), prefix, "vision", group)
    yield row("weight", ("vision_out", "vision_in"), (num_out, num_in), name="weight")
    yield row("bias", ("vision_out",), (num_out,), name="bias")
