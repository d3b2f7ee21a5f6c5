"""Goal: the table is exactly the published checkpoint, tensor by tensor, and builds the tree.

Method: add up the released table and compare with the published totals; compare names copied from
the layout of the release; compare the tiny table with the header of the golden checkpoint; walk
every path of the built tree.
"""

import collections
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import (
    DTYPES,
    ParameterSpec,
    abstract_parameters,
    build_parameters,
    parameter_table,
)
from pallas_kernels.scaled_array import FP4_ROW32, FP8_BLOCK32, ScaledArray

RELEASED = [
    ("embed.weight", (129280, 5120), "BF16"),
    ("head.weight", (129280, 5120), "BF16"),
    ("norm.weight", (5120,), "BF16"),
    ("image_newline", (5120,), "BF16"),
    ("layers.0.attn.wq_a.weight", (1280, 5120), "F8_E4M3"),
    ("layers.0.attn.wq_a.scale", (40, 160), "F8_E8M0"),
    ("layers.39.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
    ("layers.39.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
    ("layers.7.attn.wkv.scale", (16, 160), "F8_E8M0"),
    ("layers.7.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
    ("layers.7.attn.wo_a.scale", (256, 128), "F8_E8M0"),
    ("layers.7.attn.wo_b.weight", (5120, 8192), "F8_E4M3"),
    ("layers.7.attn.q_norm.weight", (1280,), "BF16"),
    ("layers.7.attn.attn_sink", (64,), "F32"),
    ("layers.7.hc_attn_fn", (24, 20480), "F32"),
    ("layers.7.hc_ffn_base", (24,), "F32"),
    ("layers.7.hc_ffn_scale", (3,), "F32"),
    ("layers.7.ffn.gate.weight", (384, 5120), "BF16"),
    ("layers.7.ffn.gate.bias_vl", (384,), "F32"),
    ("layers.7.ffn.shared_experts.w2.weight", (5120, 2304), "F8_E4M3"),
    ("layers.7.ffn.shared_experts.w2.scale", (160, 72), "F8_E8M0"),
    ("layers.7.ffn.experts.383.w1.weight", (2304, 2560), "I8"),
    ("layers.7.ffn.experts.383.w1.scale", (2304, 160), "F8_E8M0"),
    ("layers.7.ffn.experts.0.w2.weight", (5120, 1152), "I8"),
    ("layers.7.ffn.experts.0.w2.scale", (5120, 72), "F8_E8M0"),
    ("layers.14.attn.compressor.wgate.weight", (512, 5120), "BF16"),
    ("layers.20.attn.compressor.wkv.weight", (512, 5120), "BF16"),
    ("layers.20.attn.indexer.wk.weight", (128, 512), "BF16"),
    ("layers.36.attn.indexer.wq_b.scale", (128, 40), "F8_E8M0"),
    ("layers.36.attn.indexer.weights_proj.weight", (32, 5120), "BF16"),
    ("layers.1.engram.embed.weight", (384006168, 256), "F8_E4M3"),
    ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
    ("layers.14.engram.wkv.weight", (25600, 6144), "F8_E4M3"),
    ("layers.14.engram.k_weight", (4, 5120), "BF16"),
    ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0"),
    ("mtp.1.ffn.experts.127.w3.weight", (2304, 2560), "I8"),
    ("mtp.2.norm.weight", (5120,), "BF16"),
    ("mtp.2.markov_head.embed.weight", (129280, 256), "BF16"),
    ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
    ("vision.patch_embed.proj.weight", (1024, 588), "BF16"),
    ("vision.blocks.31.attn.wqkv.bias", (3072,), "BF16"),
    ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
    ("vision.norm.weight", (1024,), "BF16"),
    ("aligner.w1.weight", (5120, 9216), "BF16"),
    ("aligner.w2.bias", (5120,), "BF16"),
]
ABSENT = [
    "layers.20.attn.compressor.wgate.weight",
    "layers.24.attn.indexer.wk.weight",
    "layers.3.attn.indexer.wq_b.weight",
    "layers.0.attn.compressor.wkv.weight",
    "mtp.1.main_proj.weight",
    "mtp.1.norm.weight",
    "layers.7.ffn.experts.384.w1.weight",
    "mtp.1.ffn.experts.128.w3.weight",
]


def test_released_table_adds_up_to_the_published_totals() -> None:
    table = parameter_table(ModelConfig.released())
    tensors = [tensor for spec in table for tensor in spec.tensors()]
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 96_085
    assert sum(tensor.size_bytes for tensor in tensors) == 510_286_023_000


def test_released_table_has_the_published_tensors() -> None:
    table = parameter_table(ModelConfig.released())
    found = {t.name: (t.shape, t.dtype) for spec in table for t in spec.tensors()}
    assert {name: found.get(name) for name, *_ in RELEASED} == {
        name: (shape, dtype) for name, shape, dtype in RELEASED
    }
    assert not [name for name in ABSENT if name in found]


def test_released_groups_have_the_published_sizes() -> None:
    values: collections.Counter[str] = collections.Counter()
    stored: collections.Counter[str] = collections.Counter()
    for spec in parameter_table(ModelConfig.released()):
        key = spec.group if spec.group == "engram_table" else spec.part
        values[key] += spec.num_values
        stored[f"{spec.part} {spec.group}"] += sum(t.size_bytes for t in spec.tensors())
    billions = {key: round(count / 1e9, 1) for key, count in values.items()}
    assert billions == {"text": 551.9, "engram_table": 196.6, "draft": 14.2, "vision": 0.5}
    assert round(stored["text engram_table"] / 1e9, 2) == 202.76
    assert round(stored["text routed_experts"] / 1e9, 2) == 288.78
    assert round(stored["draft routed_experts"] / 1e9, 2) == 7.22


def test_tiny_table_is_the_golden_checkpoint(golden: Path) -> None:
    with (golden / "tiny-v41" / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    del header["__metadata__"]
    stored = {name: (tuple(t["shape"]), t["dtype"]) for name, t in header.items()}
    table = parameter_table(ModelConfig.tiny())
    assert {t.name: (t.shape, t.dtype) for spec in table for t in spec.tensors()} == stored
    assert len(stored) == 1823


def test_each_leaf_stands_at_its_path() -> None:
    tree = build_parameters(ModelConfig.tiny(), lambda spec: spec)
    for spec in parameter_table(ModelConfig.tiny()):
        node: Any = tree
        for step in spec.path:
            node = node[step] if isinstance(step, int) else getattr(node, step)
        assert node is spec


@pytest.mark.parametrize("name", ["tiny", "released"])
def test_leaves_have_the_stacked_packed_shape_and_an_axis_name_per_dimension(name: str) -> None:
    config = getattr(ModelConfig, name)()
    for spec in parameter_table(config):
        leaf = spec.abstract()
        assert len(leaf.shape) == len(spec.axes), spec.name
        tensors = spec.tensors()
        stack = (spec.num_stacked,) if spec.num_stacked else ()
        assert leaf.shape == (*stack, *spec.shape), spec.name
        first = leaf.codes if isinstance(leaf, ScaledArray) else leaf
        assert first.shape == (*stack, *tensors[0].shape)
        assert first.dtype == DTYPES[tensors[0].dtype]


def test_abstract_tree_of_the_released_model() -> None:
    tree: Any = abstract_parameters(ModelConfig.released())
    experts = tree.layers[39].ffn.experts.w1
    assert isinstance(experts, ScaledArray)
    assert experts.format == FP4_ROW32
    assert experts.shape == (384, 2304, 5120)
    assert experts.codes.shape == (384, 2304, 2560)
    assert experts.scale.shape == (384, 2304, 160)
    assert tree.layers[0].attn.wq_a.format == FP8_BLOCK32
    assert tree.layers[20].attn.compressor.wgate is None
    assert tree.layers[24].attn.compressor is None
    assert tree.layers[24].attn.indexer.wk is None
    assert tree.layers[25].attn.indexer is None
    assert tree.draft.layers[2].ffn.experts.w2.shape == (128, 5120, 2304)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    assert size == 510_286_023_000


def test_only_the_wanted_parts_are_made() -> None:
    seen: list[ParameterSpec] = []
    tree = build_parameters(ModelConfig.tiny(), seen.append, {"text", "vision"})
    assert {spec.part for spec in seen} == {"text", "vision"}
    assert tree.draft is None
    assert tree.vision is not None


@pytest.mark.parametrize("parts", [{"draft"}, {"text", "audio"}, set()])
def test_unknown_or_missing_parts_are_refused(parts: set[str]) -> None:
    with pytest.raises(ValueError, match="expected 'text' and any others of"):
        build_parameters(ModelConfig.tiny(), lambda spec: spec, parts)
