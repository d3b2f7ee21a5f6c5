"""The trained network is the served model.

Goal: what is trained (dense, batched, packed rows) is the mathematics of `deepinfer_jax.model`.
Method: the same random weights run through both, two conversations packed in one row of the
network and as two sequences of the model; hidden states, logits and selections have to agree in
float32, with and without quantised caches. Gradients are checked against finite differences where
this file defines them itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import StepBatch
from deepinfer_jax.cache import CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.model import Model, Weights, forward, logits
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.topology import Topology
from scripts.tiny_model.network import Network, Rows, Settings
from scripts.tiny_model.small_config import small_config
from scripts.tiny_model.weights import initial_parameters, split_draft

LENGTHS = (40, 43)
ROW = 96
STARTS = (0, 40)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """The small model with so few selected entries that 40 tokens have to choose."""
    parsed = small_config({"image": 25, "noise": 26}, 1024)
    parsed["text_config"] |= {"index_topk": 6, "candidate_topk_blocks": 2, "sliding_window": 8}
    return ModelConfig.from_hf(parsed)


@pytest.fixture(scope="module")
def tables(config: ModelConfig) -> EngramTables:
    return EngramTables.of(config, np.arange(1024, dtype=np.int32))


@pytest.fixture(scope="module")
def parameters(config: ModelConfig) -> Any:
    text, _ = split_draft(initial_parameters(config, 3))
    rng = np.random.default_rng(0)
    # Norms, biases and sinks start at constants; other values would hide nothing.
    return jax.tree.map(lambda a: a + 0.05 * rng.standard_normal(a.shape).astype(np.float32), text)


@pytest.fixture(scope="module")
def token_ids() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(30, 1000, length).astype(np.int32) for length in LENGTHS]


def packed_rows(token_ids: list[np.ndarray], tables: EngramTables) -> Rows:
    row = Rows(
        np.full((1, ROW), 2, np.int32),
        np.tile(np.arange(ROW, dtype=np.int32), (1, 1)),
        np.zeros((1, ROW), np.int32),
        np.zeros((1, ROW, 2, 6), np.int32),
        np.ones((1, ROW), np.float32),
    )
    for number, (start, ids) in enumerate(zip(STARTS, token_ids, strict=True)):
        here = slice(start, start + len(ids))
        row.token_ids[0, here], row.segment[0, here] = ids, number + 1
        row.position[0, here] = np.arange(len(ids))
        past = np.full((len(ids), 4), tables.pad_class)
        for back in range(4):
            past[back:, back] = tables.token_classes[ids[: len(ids) - back]]
        row.engram_rows[0, here] = tables.rows(past)
    return jax.tree.map(jnp.asarray, row)


def served(
    config: ModelConfig,
    tables: EngramTables,
    parameters: Any,
    token_ids: list[np.ndarray],
    cache_format: CacheFormat,
) -> tuple[np.ndarray, dict[str, Any]]:
    precision = Precision(jnp.float32, cache_format)
    model = Model(config, Topology.of(config), tables, precision)
    weights = Weights(parameters, jnp.asarray(tables.token_classes))
    cache = CacheLayout(config, precision, num_blocks=4, num_slots=3).zeros()
    counts = np.array([len(ids) for ids in token_ids], np.int32)
    batch = StepBatch(
        token_ids=jnp.asarray(np.concatenate(token_ids)),
        row_index=jnp.asarray(np.repeat(np.arange(2, dtype=np.int32), counts)),
        starts=jnp.zeros(2, jnp.int32),
        num_tokens=jnp.asarray(counts),
        slots=jnp.array([1, 2], jnp.int32),
        block_tables=jnp.array([[1], [2]], jnp.int32),
        temperatures=jnp.zeros(2),
        top_ks=jnp.zeros(2, jnp.int32),
        top_ps=jnp.ones(2),
        seed_low=jnp.zeros(2, jnp.uint32),
        seed_high=jnp.zeros(2, jnp.uint32),
    )
    seen: dict[str, Any] = {}
    residual, _ = forward(model, weights, cache, batch, probe=seen.__setitem__)
    everything = jnp.arange(int(counts.sum()))
    return np.asarray(logits(model, weights, residual, everything)), seen


@pytest.mark.parametrize("cache_format", [CacheFormat.NOQ, CacheFormat.KVQ])
def test_equals_the_served_model(
    config: ModelConfig,
    tables: EngramTables,
    parameters: Any,
    token_ids: list[np.ndarray],
    cache_format: CacheFormat,
) -> None:
    expected, seen = served(config, tables, parameters, token_ids, cache_format)
    network = Network(config, Settings(jnp.float32, cache_format, selects=True))
    hidden, trace = network.hidden(parameters, packed_rows(token_ids, tables))
    found = np.asarray(network.logits(parameters, hidden))[0]
    found = np.concatenate([found[s : s + n] for s, n in zip(STARTS, LENGTHS, strict=True)])
    # Selection really takes place, and leaves something out.
    assert np.max((np.asarray(seen["topk_4"]) >= 0).sum(-1)) == 6
    assert 0.1 < float(trace.recall) < 0.9
    difference = np.max(np.abs(found - expected), axis=-1)
    if cache_format is CacheFormat.NOQ:
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4)
    else:
        # Quantised, a value on the edge between two codes may fall either way.
        assert np.median(difference) < 1e-3, difference
