"""The golden checkpoint, loaded, with one compiled pass that shows logits and intermediates.

Tests of the model share it, since compiling a forward pass takes seconds.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import checkpoint
from deepinfer_jax.batch import StepBatch, StepShape, pack
from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.model import Model, Weights, forward, logits
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.topology import Topology

DIRECTORY = Path(__file__).parents[1] / "golden" / "tiny-v41"

PASS_SHAPE = StepShape(num_rows=4, num_tokens=136, num_blocks=2, samples_every_token=True)
"""One row holds the longest golden prompt, and there is padding of rows and of tokens.

All golden comparisons run in this one shape: XLA sums in another order for another number of
tokens, and a quantised value within float32 noise of a rounding midpoint would then fall to its
other side."""


@functools.cache
def load(cache_format: str, *, quantise_activations: bool = False) -> tuple[Model, Weights]:
    """Model and weights of the golden checkpoint in float32."""
    config = checkpoint.read_config(DIRECTORY)
    tables = checkpoint.read_engram_tables(DIRECTORY, config)
    precision = Precision(jnp.float32, CacheFormat(cache_format), quantise_activations)
    weights = Weights(checkpoint.load(DIRECTORY, config), jnp.asarray(tables.token_classes))
    return Model(config, Topology.of(config), tables, precision), weights


def layout(model: Model, num_blocks: int = 16, num_slots: int = 6) -> CacheLayout:
    """A small cache."""
    return CacheLayout(model.config, model.precision, num_blocks, num_slots)


def batch_arrays(
    shape: StepShape, rows: list[tuple[np.ndarray, int, int, list[int]]]
) -> dict[str, np.ndarray]:
    """Fields of a greedy step from rows of (token ids, start, slot, blocks), padded."""
    arrays = {
        "token_ids": np.zeros(shape.num_tokens, np.int32),
        "row_index": np.full(shape.num_tokens, shape.num_rows, np.int32),
        "starts": np.zeros(shape.num_rows, np.int32),
        "num_tokens": np.zeros(shape.num_rows, np.int32),
        "slots": np.zeros(shape.num_rows, np.int32),
        "temperatures": np.zeros(shape.num_rows, np.float32),
        "top_ks": np.zeros(shape.num_rows, np.int32),
        "top_ps": np.ones(shape.num_rows, np.float32),
        "seed_low": np.zeros(shape.num_rows, np.uint32),
        "seed_high": np.zeros(shape.num_rows, np.uint32),
        "block_tables": np.zeros((shape.num_rows, shape.num_blocks), np.int32),
    }
    at = 0
    for i, (ids, start, slot, blocks) in enumerate(rows):
        arrays["token_ids"][at : at + len(ids)] = ids
        arrays["row_index"][at : at + len(ids)] = i
        arrays["starts"][i], arrays["num_tokens"][i], arrays["slots"][i] = start, len(ids), slot
        arrays["block_tables"][i, : len(blocks)] = blocks
        at += len(ids)
    return arrays


def to_batch(shape: StepShape, arrays: dict[str, np.ndarray]) -> StepBatch:
    """The batch on the device, by the way of one packed buffer."""
    return StepBatch.unpack(jnp.asarray(pack(arrays, shape)), shape)


@functools.cache
def compiled_pass(
    cache_format: str, shape: StepShape, *, quantise_activations: bool = False
) -> Any:
    """`(weights, batch, cache) -> (logits of every token, probed values, cache)`, jitted."""
    model, _ = load(cache_format, quantise_activations=quantise_activations)

    @jax.jit
    def run(weights: Weights, batch: StepBatch, cache: KVCache) -> Any:
        seen: dict[str, Any] = {}
        residual, cache = forward(model, weights, cache, batch, seen.__setitem__)
        token_index = jnp.arange(shape.num_tokens)
        return logits(model, weights, residual, token_index), seen, cache

    return run


def whole_prompt(
    cache_format: str, ids: np.ndarray, *, quantise_activations: bool = False
) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits [n, V] and probed values of one prompt in a single step."""
    model, weights = load(cache_format, quantise_activations=quantise_activations)
    run = compiled_pass(cache_format, PASS_SHAPE, quantise_activations=quantise_activations)
    rows = [(ids, 0, 2, [3, 1])]
    batch = to_batch(PASS_SHAPE, batch_arrays(PASS_SHAPE, rows))
    out, seen, _ = run(weights, batch, layout(model).zeros())
    return np.asarray(out)[: len(ids)], jax.tree.map(lambda a: np.asarray(a)[: len(ids)], seen)
