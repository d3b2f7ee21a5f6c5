"""The small configuration has every kind of layer and is accepted everywhere.

Goal: the model that ships exercises the whole architecture. Method: read it as the loader does.
"""

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.topology import LayerKind, Topology
from scripts.tiny_model.small_config import VOCAB_SIZE, small_config


def test_every_kind_of_layer_is_there() -> None:
    config = ModelConfig.from_hf(small_config({"image": 25, "noise": 26}, VOCAB_SIZE))
    layers = Topology.of(config).layers
    assert {layer.kind for layer in layers} == set(LayerKind)
    assert {layer.ratio for layer in layers} == {0, 1, 2}
    assert any(layer.makes_candidates for layer in layers)
    assert any(layer.uses_candidates for layer in layers)
    assert config.num_nextn_predict_layers == 3
    # The heights of the tables are those that the hash rule gives.
    EngramTables.of(config, np.arange(VOCAB_SIZE, dtype=np.int32))


def test_selection_really_leaves_entries_out_at_512_tokens() -> None:
    config = ModelConfig.from_hf(small_config({"image": 25, "noise": 26}, VOCAB_SIZE))
    # Half is left out where two tokens share an entry, three quarters elsewhere.
    assert config.index_topk * 2 <= 512 // 2
    assert config.candidate_topk_blocks * config.candidate_block_size < 512
