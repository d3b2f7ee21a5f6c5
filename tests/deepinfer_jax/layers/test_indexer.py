"""Goal: each token selects the entries that the equations say, as places in the pool.
Method: a float64 oracle of scores, cut-offs and candidate blocks for two sequences whose blocks
lie scattered in a pool of NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import SourceCache
from deepinfer_jax.layers.indexer import Selection, select
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import IndexerParameters
from deepinfer_jax.topology import LayerTopology, Topology
from pallas_kernels.scaled_array import MXFP4_32
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import (
    CONFIG,
    QUANTISED_CACHE,
    Row,
    encode,
    f64,
    quantise_dequantise,
)

BLOCK_TOKENS, NUM_BLOCKS, NUM_TOKENS = 8, 12, 8
HEADS, KEY_WIDTH = CONFIG.index_n_heads, CONFIG.index_head_dim
ROWS = [Row(37, 4, 2, (5, 1, 9, 3, 11, 7)), Row(0, 3, 1, (2, 0, 0, 0, 0, 0))]
"""Enough entries for more than the best eight, and more than four candidate blocks of four."""
LAYERS = Topology.of(CONFIG).layers
FULL_PAIRS, FULL_SINGLE, REINDEX = LAYERS[2], LAYERS[6], LAYERS[8]


class Case:
    """Random queries, and the keys of two sequences by slot."""

    def __init__(self, rng: np.random.Generator, layer: LayerTopology) -> None:
        self.layer = layer
        self.per_block = BLOCK_TOKENS // layer.ratio
        self.parameters = IndexerParameters(
            wq_b=by_hand.weight(rng, HEADS * KEY_WIDTH, CONFIG.q_lora_rank),
            weights_proj=by_hand.weight(rng, HEADS, CONFIG.hidden_size),
        )
        self.x = rng.standard_normal((NUM_TOKENS, CONFIG.hidden_size)).astype(np.float32)
        self.latent = rng.standard_normal((NUM_TOKENS, CONFIG.q_lora_rank)).astype(np.float32)
        self.keys = {
            row.slot: rng.standard_normal((row.positions[-1] + 1, KEY_WIDTH)).astype(np.float32)
            for row in ROWS
        }
        self.pool = np.full((NUM_BLOCKS, self.per_block, KEY_WIDTH), np.nan, np.float32)
        for row in ROWS:
            for entry in range((row.start + row.count) // layer.ratio):
                self.pool[self.place(row, entry)] = self.keys[row.slot][entry]

    def place(self, row: Row, entry: int) -> tuple[int, int]:
        return row.blocks[entry // self.per_block], entry % self.per_block

    def run(self, step: StepContext, selection: Selection, pool: Any = None) -> Selection:
        entries = by_hand.filled(0, NUM_BLOCKS, self.per_block, CONFIG.head_dim)
        keys = jnp.asarray(self.pool) if pool is None else pool
        function = {FULL_PAIRS: select_pairs, FULL_SINGLE: select_single, REINDEX: select_again}[
            self.layer
        ]
        source = SourceCache(entries, keys, None)
        args = jnp.asarray(self.x), jnp.asarray(self.latent), self.parameters
        return by_hand.run(function, step, *args, source, selection)

    def scores(self, t: int, row: Row, position: int, *, is_rounded: bool = False) -> np.ndarray:
        """Score of each entry that the token sees."""
        q = (f64(self.parameters.wq_b) @ self.latent[t]).reshape(HEADS, KEY_WIDTH)
        q = by_hand.rotated(q, position, is_scaled=True)
        keys = self.keys[row.slot][: (position + 1) // self.layer.ratio]
        if is_rounded:
            q = f64(quantise_dequantise(jnp.asarray(q, jnp.float32), MXFP4_32))
            keys = f64(quantise_dequantise(jnp.asarray(self.keys[row.slot]), MXFP4_32))[: len(keys)]
        weight = f64(self.parameters.weights_proj) @ self.x[t] / np.sqrt(HEADS * KEY_WIDTH)
        return np.maximum(q @ keys.T, 0).T @ weight

    def flat(self, row: Row, entries: list[int]) -> list[int]:
        places = [self.place(row, entry) for entry in sorted(entries)]
        flat = [block * self.per_block + offset for block, offset in places]
        return flat + [-1] * (CONFIG.index_topk - len(flat))


def select_pairs(step: StepContext, *args: Any) -> Selection:
    return _select(step, FULL_PAIRS, *args)


def select_single(step: StepContext, *args: Any) -> Selection:
    return _select(step, FULL_SINGLE, *args)


def select_again(step: StepContext, *args: Any) -> Selection:
    return _select(step, REINDEX, *args)


def _select(
    step: StepContext,
    layer: LayerTopology,
    x: jax.Array,
    latent: jax.Array,
    parameters: IndexerParameters,
    source: SourceCache,
    selection: Selection,
) -> Selection:
    return select(x, latent, parameters, layer, source, selection, step)


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:count]


def best_blocks(scores: np.ndarray) -> list[int]:
    size, count = CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
    if not len(scores):
        return [-1] * count
    of_block = np.array([scores[at : at + size].max() for at in range(0, len(scores), size)])
    of_block[-1] = np.inf
    blocks = sorted(best(of_block, count))
    return blocks + [-1] * (count - len(blocks))


TOKENS = [
    (t, row, position)
    for row in ROWS
    for t, position in enumerate(row.positions, start=4 if row.slot == 1 else 0)
]


@pytest.mark.parametrize("layer", [FULL_PAIRS, FULL_SINGLE], ids=["pairs", "single"])
def test_the_best_visible_entries_as_places(layer: LayerTopology, rng: np.random.Generator) -> None:
    case = Case(rng, layer)
    got = case.run(by_hand.step_of(ROWS, NUM_TOKENS), Selection())
    assert got.entry_index is not None
    assert got.entry_index.dtype == jnp.int32
    for t, row, position in TOKENS:
        chosen = best(case.scores(t, row, position), CONFIG.index_topk)
        assert got.entry_index[t].tolist() == case.flat(row, chosen), (row, position)
    # The last token is padding and sees nothing.
    assert got.entry_index[7].tolist() == [-1] * CONFIG.index_topk


def test_the_candidate_source_also_makes_candidates(rng: np.random.Generator) -> None:
    case = Case(rng, FULL_SINGLE)
    got = case.run(by_hand.step_of(ROWS, NUM_TOKENS), Selection())
    assert got.candidates is not None
    for t, row, position in TOKENS:
        assert got.candidates[t].tolist() == best_blocks(case.scores(t, row, position))
    assert (
        Case(rng, FULL_PAIRS).run(by_hand.step_of(ROWS, NUM_TOKENS), Selection()).candidates is None
    )


def test_reindexing_selects_inside_the_candidates(rng: np.random.Generator) -> None:
    case = Case(rng, REINDEX)
    candidates = np.full((NUM_TOKENS, CONFIG.candidate_topk_blocks), -1, np.int32)
    candidates[:4] = [[0, 2, 5, 9], [1, 3, 4, 9], [0, 1, 2, 9], [3, -1, -1, -1]]
    candidates[4:7, 0] = 0
    before = Selection(None, jnp.asarray(candidates))
    got = case.run(by_hand.step_of(ROWS, NUM_TOKENS), before)
    assert got.entry_index is not None
    differs = False
    for t, row, position in TOKENS:
        scores = case.scores(t, row, position)
        blocks = np.arange(len(scores)) // CONFIG.candidate_block_size
        inside = np.isin(blocks, candidates[t])
        chosen = [
            n for n in best(np.where(inside, scores, -np.inf), CONFIG.index_topk) if inside[n]
        ]
        assert got.entry_index[t].tolist() == case.flat(row, chosen), (row, position)
        differs |= set(chosen) != set(best(scores, CONFIG.index_topk))
    assert differs
    # Candidates stay for the layers above.
    np.testing.assert_array_equal(got.candidates, candidates)


def test_queries_are_rounded_like_the_keys_they_meet(rng: np.random.Generator) -> None:
    case = Case(rng, FULL_SINGLE)
    step = by_hand.step_of(ROWS, NUM_TOKENS, precision=QUANTISED_CACHE)
    pool = encode(jnp.asarray(np.nan_to_num(case.pool)), MXFP4_32)
    got = case.run(step, Selection(), pool)
    assert got.entry_index is not None
    differs = False
    for t, row, position in TOKENS:
        chosen = best(case.scores(t, row, position, is_rounded=True), CONFIG.index_topk)
        assert got.entry_index[t].tolist() == case.flat(row, chosen), (row, position)
        differs |= set(chosen) != set(best(case.scores(t, row, position), CONFIG.index_topk))
    assert differs
