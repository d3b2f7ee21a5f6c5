"""Goal: every layer reads the entries, index list and candidates that the architecture says.

Method: compare the released and the tiny map with the published tables written out by hand, then
break one rule of the map at a time and look for the layer and the list in the message.
"""

import dataclasses
from typing import Any

import pytest

from deepinfer_jax.config import ModelConfig, ModelConfigError
from deepinfer_jax.topology import LayerKind, Topology

F, X, U, W = LayerKind.FULL, LayerKind.REINDEX, LayerKind.REUSE, LayerKind.WINDOW


def test_released_map() -> None:
    topology = Topology.of(ModelConfig.released())
    layers = topology.layers
    encoder = [W, W] + [F, U, U, U, U, U] * 3
    decoder = [F, U, U, U] + [X, U, U, U] * 4
    assert [layer.kind for layer in layers] == encoder + decoder
    assert [layer.ratio for layer in layers] == [0] * 2 + [2] * 18 + [1] * 20
    assert [layer.kv_source for layer in layers] == (
        [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    )
    index_sources = [20, 24, 28, 32, 36]
    assert [layer.index_source for layer in layers[20:]] == [
        s for s in index_sources for _ in "four"
    ]
    assert [layer.layer_index for layer in layers if layer.makes_candidates] == [20]
    assert [layer.layer_index for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert [layer.layer_index for layer in layers if layer.makes_entries] == [2, 8, 14, 20]
    assert [layer.layer_index for layer in layers if layer.makes_index] == (
        [2, 8, 14, 20, 24, 28, 32, 36]
    )
    assert {
        layer.layer_index: layer.engram_index for layer in layers if layer.engram_index is not None
    } == {1: 0, 14: 1}
    assert topology.num_encoder_layers == 20
    assert [layer.is_encoder for layer in layers] == [True] * 20 + [False] * 20


def test_tiny_map_has_every_kind() -> None:
    topology = Topology.of(ModelConfig.tiny())
    assert [layer.kind for layer in topology.layers] == [W, W, F, U, F, U, F, U, X, U, X, U]
    assert [layer.index_source for layer in topology.layers[6:]] == [6, 6, 8, 8, 10, 10]
    assert topology.num_encoder_layers == 6


def test_a_model_of_window_layers_is_all_encoder() -> None:
    config = dataclasses.replace(
        ModelConfig.tiny(),
        compress_ratios=(0,) * 15,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
    )
    topology = Topology.of(config)
    assert {layer.kind for layer in topology.layers} == {W}
    assert topology.num_encoder_layers == 12
    assert not any(layer.makes_candidates for layer in topology.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compress_ratios": (0, 0, 2, 1) + (2,) * 2 + (1,) * 6 + (0,) * 3},
            "layer 3 has compress ratio 1 .* layer 2 of kv_source_layer_ids, which has ratio 2",
        ),
        (
            {"compress_ratios": (0, 1, 2, 2) + (2,) * 2 + (1,) * 6 + (0,) * 3},
            r"layer 1 has compress ratio 1 but no source .* kv_source_layer_ids \[2, 4, 6\]",
        ),
        ({"index_source_layer_ids": (4, 6)}, "layer 2 .* no source .* index_source_layer_ids"),
        (
            {"index_source_layer_ids": (2, 6, 8, 10)},
            "layer 4 would use the index list of layer 2 on the entries of layer 4",
        ),
        ({"kv_source_layer_ids": (1, 2, 4, 6)}, "kv_source_layer_ids names layer 1, .* ratio is 0"),
        (
            {"index_source_layer_ids": (0, 2, 4, 6)},
            "index_source_layer_ids names layer 0, .* ratio is 0",
        ),
        ({"candidate_source_layer_id": 8}, "candidate_source_layer_id is 8; expected a layer"),
        ({"candidate_source_layer_id": 12}, "candidate_source_layer_id is 12; expected a layer"),
        ({"candidate_source_layer_id": -1}, "candidate_source_layer_id is -1; expected a layer"),
        (
            {"candidate_source_layer_id": 4},
            "layer 8 selects among the entries of layer 6 but the candidates come from layer 4",
        ),
        (
            {"index_source_layer_ids": (2, 3, 4, 6)},
            "layer 3 selects among the entries of layer 2 but the candidates come from layer 6",
        ),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(ModelConfig.tiny(), **changes)
    with pytest.raises(ModelConfigError, match=message):
        Topology.of(config)
