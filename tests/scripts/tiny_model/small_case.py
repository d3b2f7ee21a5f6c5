"""A model of the kind that is trained, small enough for tests, and conversations to run it on."""

# Rows are numpy arrays until they enter a step; their fields are declared as jax's.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepBatch
from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.topology import Topology
from scripts.tiny_model.network import Rows
from scripts.tiny_model.small_config import small_config
from scripts.tiny_model.weights import initial_parameters

LENGTHS, STARTS, ROW = (40, 43), (0, 40), 96
"""Two conversations, packed in one row."""


@functools.cache
def config() -> ModelConfig:
    """One layer of each kind, and so few selected entries that 40 tokens have to choose."""
    parsed = small_config({"image": 25, "noise": 26}, 1024)
    parsed["text_config"] |= {
        "num_hidden_layers": 5,
        "compress_ratios": [0, 2, 2, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "engram_layer_ids": [0, 1],
        "dspark_target_layer_ids": [2, 3, 4],
        "index_topk": 6,
        "candidate_topk_blocks": 2,
        "sliding_window": 8,
    }
    return ModelConfig.from_hf(parsed)


@functools.cache
def tables() -> EngramTables:
    """Constants with one class per token."""
    return EngramTables.of(config(), np.arange(1024, dtype=np.int32))


@functools.cache
def parameters() -> Any:
    """Random weights; norms, biases and sinks too, since constants would hide mistakes."""
    rng = np.random.default_rng(0)
    start = initial_parameters(config(), 3)
    return jax.tree.map(lambda a: a + 0.05 * rng.standard_normal(a.shape).astype(np.float32), start)


def token_ids() -> list[np.ndarray]:
    """The two conversations."""
    rng = np.random.default_rng(1)
    return [rng.integers(30, 1000, length).astype(np.int32) for length in LENGTHS]


def packed_rows(conversations: list[np.ndarray], starts: tuple[int, ...] = STARTS) -> Rows:
    """One row [1, ROW] with the conversations at `starts`."""
    row = Rows(
        np.full((1, ROW), 2, np.int32),
        np.arange(ROW, dtype=np.int32)[None],
        np.zeros((1, ROW), np.int32),
        np.zeros((1, ROW, 2, 6), np.int32),
        np.ones((1, ROW), np.float32),
    )
    for number, (start, ids) in enumerate(zip(starts, conversations, strict=True)):
        here = slice(start, start + len(ids))
        row.token_ids[0, here], row.segment[0, here] = ids, number + 1
        row.position[0, here] = np.arange(len(ids))
        past = np.full((len(ids), 4), tables().pad_class)
        for back in range(4):
            past[back:, back] = tables().token_classes[ids[: len(ids) - back]]
        row.engram_rows[0, here] = tables().rows(past)
    return jax.tree.map(jnp.asarray, row)


def served_model(cache_format: CacheFormat) -> tuple[Model, Weights, KVCache]:
    """The model as it is served, in float32, with a cache for two sequences of one block."""
    precision = Precision(jnp.float32, cache_format)
    model = Model(config(), Topology.of(config()), tables(), precision)
    layout = CacheLayout(config(), precision, num_blocks=4, num_slots=3, has_draft=True)
    weights = Weights(parameters(), jnp.asarray(tables().token_classes))
    return model, weights, layout.zeros()


def prefill_arrays(conversations: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Fields of the step that runs whole conversations."""
    count = len(conversations)
    counts = np.array([len(ids) for ids in conversations], np.int32)
    return {
        "token_ids": np.concatenate(conversations),
        "row_index": np.repeat(np.arange(count, dtype=np.int32), counts),
        "starts": np.zeros(count, np.int32),
        "num_tokens": counts,
        "slots": np.arange(1, count + 1, dtype=np.int32),
        "block_tables": np.arange(1, count + 1, dtype=np.int32)[:, None],
        "temperatures": np.zeros(count, np.float32),
        "top_ks": np.zeros(count, np.int32),
        "top_ps": np.ones(count, np.float32),
        "seed_low": np.zeros(count, np.uint32),
        "seed_high": np.zeros(count, np.uint32),
    }


def prefill_batch(conversations: list[np.ndarray]) -> StepBatch:
    """`prefill_arrays` as a batch."""
    arrays = prefill_arrays(conversations)
    return StepBatch(**{name: jnp.asarray(values) for name, values in arrays.items()})
