"""Goal: every complete group of tokens becomes one entry and one key, however a prompt is cut.
Method: two sequences run in steps of many cuts, in pools full of NaN; each place of the pools is
then compared with a float64 oracle or must be untouched.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import ROLLBACK_MAX, SourceCache
from deepinfer_jax.layers.compressor import compress
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import CompressorParameters, IndexerParameters
from pallas_kernels.scaled_array import MXFP4_32, NVFP4_16
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import (
    CONFIG,
    QUANTISED_CACHE,
    Row,
    decode,
    encode,
    f64,
    quantise_dequantise,
)

BLOCK_TOKENS, NUM_BLOCKS, NUM_SLOTS, NUM_TOKENS = 8, 7, 4, 16
WIDTH, KEY_WIDTH = CONFIG.head_dim, CONFIG.index_head_dim
BLOCKS = {2: (5, 1, 3), 1: (2, 6, 4)}
"""Blocks of each sequence, by slot."""
LENGTHS = {2: 17, 1: 14}
CUTS = {
    "whole": [{2: 9, 1: 7}, {2: 8, 1: 7}],
    "inside groups": [{2: 3, 1: 1}, {2: 12, 1: 2}, {1: 11}, {2: 2}],
    "one by one": [{2: 1, 1: 13}, *({2: 1} for _ in range(15)), {2: 1, 1: 1}],
}


class Layer:
    """Random weights and inputs of a source layer."""

    def __init__(self, rng: np.random.Generator, ratio: int) -> None:
        self.ratio = ratio
        hidden = CONFIG.hidden_size
        self.compressor = CompressorParameters(
            wkv=by_hand.weight(rng, WIDTH, hidden),
            norm=by_hand.norm_weight(rng, WIDTH),
            wgate=by_hand.weight(rng, WIDTH, hidden) if ratio > 1 else None,
        )
        unused = by_hand.filled(0, 1, 1)
        self.indexer = IndexerParameters(
            wq_b=unused,
            weights_proj=unused,
            wk=by_hand.weight(rng, KEY_WIDTH, WIDTH),
            k_norm=by_hand.norm_weight(rng, KEY_WIDTH),
        )
        self.x = {
            slot: rng.standard_normal((length, hidden)) * 2 for slot, length in LENGTHS.items()
        }

    def empty(self) -> SourceCache:
        per_block = BLOCK_TOKENS // self.ratio
        partial = (NUM_SLOTS, self.ratio - 1 + ROLLBACK_MAX, 2, WIDTH)
        return SourceCache(
            by_hand.filled(np.nan, NUM_BLOCKS, per_block, WIDTH),
            by_hand.filled(np.nan, NUM_BLOCKS, per_block, KEY_WIDTH),
            by_hand.filled(np.nan, *partial) if self.ratio > 1 else None,
        )

    def run(self, source: SourceCache, rows: list[Row], step: StepContext) -> SourceCache:
        function = {1: compress_single, 2: compress_pairs}[self.ratio]
        x = by_hand.tokens_of(rows, self.x, NUM_TOKENS)
        return by_hand.run(function, step, x, self.compressor, self.indexer, source)

    def oracle(self, slot: int, entry: int) -> tuple[np.ndarray, np.ndarray]:
        group = f64(np.float32(self.x[slot][entry * self.ratio : (entry + 1) * self.ratio]))
        values = group @ f64(self.compressor.wkv).T
        if self.compressor.wgate is not None:
            gates = np.exp(group @ f64(self.compressor.wgate).T)
            values = values * gates / gates.sum(axis=0)
        latent = by_hand.rms(values.sum(axis=0), self.compressor.norm)
        key = by_hand.rms(f64(self.indexer.wk) @ latent, self.indexer.k_norm)
        first = entry * self.ratio
        return (
            by_hand.rotated(latent, first, is_scaled=True),
            by_hand.rotated(key, first, is_scaled=True),
        )


def compress_pairs(
    step: StepContext,
    x: jax.Array,
    compressor: CompressorParameters,
    indexer: IndexerParameters,
    source: SourceCache,
) -> SourceCache:
    return compress(x, compressor, indexer, 2, source, step)


def compress_single(
    step: StepContext,
    x: jax.Array,
    compressor: CompressorParameters,
    indexer: IndexerParameters,
    source: SourceCache,
) -> SourceCache:
    return compress(x, compressor, indexer, 1, source, step)


def rows_of(cut: dict[int, int], done: dict[int, int]) -> list[Row]:
    """Two rows, so that all steps have one shape; a sequence that rests has a row of no tokens."""
    rows = [Row(done[slot], cut.get(slot, 0), slot, BLOCKS[slot]) for slot in (2, 1)]
    for row in rows:
        done[row.slot] += row.count
    return rows


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_and_keys_of_every_cut(
    ratio: int, cuts: list[dict[int, int]], rng: np.random.Generator
) -> None:
    layer = Layer(rng, ratio)
    source, done = layer.empty(), {2: 0, 1: 0}
    for cut in cuts:
        rows = rows_of(cut, done)
        source = layer.run(source, rows, by_hand.step_of(rows, NUM_TOKENS))
    assert done == LENGTHS
    expected = jax.tree.map(np.array, layer.empty())
    per_block = BLOCK_TOKENS // ratio
    for slot, length in LENGTHS.items():
        for entry in range(length // ratio):
            place = BLOCKS[slot][entry // per_block], entry % per_block
            expected.entries[place], expected.index_keys[place] = layer.oracle(slot, entry)
    np.testing.assert_allclose(source.entries, expected.entries, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(source.index_keys, expected.index_keys, rtol=1e-4, atol=1e-5)


def test_a_rejected_token_leaves_no_trace(rng: np.random.Generator) -> None:
    """Six tokens are run and five taken back; other tokens then take their positions."""
    layer = Layer(rng, 2)
    rows = [Row(0, 9, 2, BLOCKS[2]), Row(0, 0, 1, BLOCKS[1])]
    source = layer.run(layer.empty(), rows, by_hand.step_of(rows, NUM_TOKENS))
    truth = layer.x[2]
    layer.x = layer.x | {2: np.concatenate([truth[:10], rng.standard_normal((7, 64))])}
    rows = [rows[0]._replace(start=9, count=6), rows[1]]
    source = layer.run(source, rows, by_hand.step_of(rows, NUM_TOKENS))
    layer.x[2] = truth
    rows = [rows[0]._replace(start=10, count=6), rows[1]]
    source = layer.run(source, rows, by_hand.step_of(rows, NUM_TOKENS))
    for entry in range(8):
        place = BLOCKS[2][entry // 4], entry % 4
        np.testing.assert_allclose(
            source.entries[place], layer.oracle(2, entry)[0], rtol=1e-4, atol=1e-5
        )


def test_entries_before_what_is_visible_are_not_made_again(rng: np.random.Generator) -> None:
    """Others may share them, and their inputs may be wrong here."""
    layer = Layer(rng, 2)
    rows = [Row(3, 8, 2, BLOCKS[2], first_visible=6), Row(0, 0, 1, BLOCKS[1])]
    source = layer.run(layer.empty(), rows, by_hand.step_of(rows, NUM_TOKENS))
    written = np.isfinite(source.entries[..., 0])
    places = [(BLOCKS[2][entry // 4], entry % 4) for entry in (3, 4)]
    assert sorted(zip(*np.nonzero(written), strict=True)) == sorted(places)
    for entry, place in zip((3, 4), places, strict=True):
        np.testing.assert_allclose(
            source.entries[place], layer.oracle(2, entry)[0], rtol=1e-4, atol=1e-5
        )


def test_quantised_pools_hold_rounded_entries(rng: np.random.Generator) -> None:
    layer = Layer(rng, 2)
    rows = [Row(0, 9, 2, BLOCKS[2]), Row(0, 7, 1, BLOCKS[1])]
    plain = layer.run(layer.empty(), rows, by_hand.step_of(rows, NUM_TOKENS))
    empty = layer.empty()
    packed = empty._replace(
        entries=encode(by_hand.filled(0, *empty.entries.shape), NVFP4_16),
        index_keys=encode(by_hand.filled(0, *empty.index_keys.shape), MXFP4_32),
    )
    step = by_hand.step_of(rows, NUM_TOKENS, precision=QUANTISED_CACHE)
    got = layer.run(packed, rows, step)
    written = np.isfinite(np.asarray(plain.entries[..., 0]))
    assert written.sum() == 4 + 3
    for array, exact, form in (
        (got.entries, plain.entries, NVFP4_16),
        (got.index_keys, plain.index_keys, MXFP4_32),
    ):
        rounded = np.asarray(quantise_dequantise(jnp.asarray(np.nan_to_num(exact)), form))
        np.testing.assert_array_equal(decode(array), np.where(written[..., None], rounded, 0))
