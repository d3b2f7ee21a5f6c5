"""Goal: attention sees the window and the selected entries, and nothing else, in every step.
Method: a float64 oracle over whole sequences, cut into steps in several ways, with NaN in every
ring and block place that was not written.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import ROLLBACK_MAX, SourceCache
from deepinfer_jax.layers.attention import attention
from deepinfer_jax.layers.compressor import compress
from deepinfer_jax.layers.indexer import Selection
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import (
    AttentionParameters,
    CompressorParameters,
    IndexerParameters,
)
from deepinfer_jax.precision import Precision
from deepinfer_jax.topology import Topology
from pallas_kernels.scaled_array import FP8_32, ScaledArray
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import (
    CONFIG,
    PLAIN,
    QUANTISED_CACHE,
    Row,
    decode,
    encode,
    f64,
    quantise_dequantise,
)

NUM_TOKENS, NUM_SLOTS, NUM_BLOCKS, BLOCK_TOKENS = 24, 4, 7, 8
HEADS, WIDTH, HIDDEN = CONFIG.num_attention_heads, CONFIG.head_dim, CONFIG.hidden_size
LENGTHS = {2: 21, 1: 6}
BLOCKS = {2: (5, 1, 3), 1: (2, 0, 0)}
CUTS = {
    "whole": [{2: 18, 1: 6}, {2: 3}],
    "chunks": [{2: 5, 1: 1}, {2: 15, 1: 3}, {2: 1, 1: 2}],
    "one by one": [{2: 12}, *({2: 1, 1: 1} for _ in range(6)), {2: 3}],
}
LAYERS = Topology.of(CONFIG).layers
WINDOW_LAYER, FULL_LAYER, REUSE_LAYER = LAYERS[0], LAYERS[2], LAYERS[3]


def random_parameters(rng: np.random.Generator) -> AttentionParameters:
    rank, groups = CONFIG.q_lora_rank, CONFIG.o_groups
    return AttentionParameters(
        wq_a=by_hand.weight(rng, rank, HIDDEN),
        wq_b=by_hand.weight(rng, HEADS * WIDTH, rank),
        wkv=by_hand.weight(rng, WIDTH, HIDDEN),
        wo_a=by_hand.weight(rng, groups * CONFIG.o_lora_rank, HEADS * WIDTH // groups),
        wo_b=by_hand.weight(rng, HIDDEN, groups * CONFIG.o_lora_rank),
        q_norm=by_hand.norm_weight(rng, rank),
        kv_norm=by_hand.norm_weight(rng, WIDTH),
        attn_sink=jnp.asarray(rng.standard_normal(HEADS), jnp.float32),
    )


def window(step: StepContext, x: jax.Array, parameters: Any, ring: Any) -> Any:
    out, ring, selection = attention(x, parameters, WINDOW_LAYER, ring, None, Selection(), step)
    assert selection == Selection()
    return out, ring


def reuse(
    step: StepContext, x: jax.Array, parameters: Any, ring: Any, source: Any, selection: Any
) -> Any:
    out, ring, selection = attention(x, parameters, REUSE_LAYER, ring, source, selection, step)
    return out, ring, source, selection


def full(step: StepContext, x: jax.Array, parameters: Any, ring: Any, source: Any) -> Any:
    """A full layer: entries are made first, then attended to."""
    source = compress(x, parameters.compressor, parameters.indexer, FULL_LAYER.ratio, source, step)
    out, ring, selection = attention(x, parameters, FULL_LAYER, ring, source, Selection(), step)
    return out, ring, source, selection


def oracle(
    x: np.ndarray,
    parameters: AttentionParameters,
    position: int,
    entries: np.ndarray,
    *,
    is_scaled: bool,
) -> np.ndarray:
    """Output of one token of a sequence `x`, which also sees `entries` [N, WIDTH]."""
    p, x = parameters, f64(np.float32(x))
    first = max(0, position - CONFIG.sliding_window + 1)
    keys = [
        by_hand.rotated(by_hand.rms(f64(p.wkv) @ x[s], p.kv_norm), s, is_scaled=is_scaled)
        for s in range(first, position + 1)
    ]
    keys = np.concatenate([np.stack(keys), entries])
    q = f64(p.wq_b) @ by_hand.rms(f64(p.wq_a) @ x[position], p.q_norm)
    q = by_hand.rotated(q.reshape(HEADS, WIDTH), position, is_scaled=is_scaled)
    weights = np.exp(q @ keys.T / np.sqrt(WIDTH))
    total = weights.sum(axis=1) + np.exp(f64(p.attn_sink))
    out = weights @ keys / total[:, None]
    out = by_hand.rotated(out, position, is_scaled=is_scaled, inverse=True)
    per_group = HEADS // CONFIG.o_groups
    first_weight = f64(p.wo_a).reshape(CONFIG.o_groups, CONFIG.o_lora_rank, -1)
    middle = [
        first_weight[g] @ out[g * per_group : (g + 1) * per_group].reshape(-1)
        for g in range(CONFIG.o_groups)
    ]
    return f64(p.wo_b) @ np.concatenate(middle)


def empty_ring() -> jax.Array:
    return by_hand.filled(np.nan, NUM_SLOTS, CONFIG.sliding_window + ROLLBACK_MAX, WIDTH)


def inputs(rng: np.random.Generator) -> dict[int, np.ndarray]:
    return {slot: rng.standard_normal((length, HIDDEN)) for slot, length in LENGTHS.items()}


def in_steps(
    cuts: list[dict[int, int]],
    x: dict[int, np.ndarray],
    parameters: Any,
    ring: Any,
    precision: Precision = PLAIN,
) -> tuple[dict[int, np.ndarray], Any]:
    """Outputs of a window layer for both sequences, put together from steps."""
    parts: dict[int, list[np.ndarray]] = {slot: [] for slot in LENGTHS}
    done = dict.fromkeys(LENGTHS, 0)
    for cut in cuts:
        rows = [Row(done[slot], cut.get(slot, 0), slot) for slot in LENGTHS]
        step = by_hand.step_of(rows, NUM_TOKENS, precision=precision)
        out, ring = by_hand.run(
            window, step, by_hand.tokens_of(rows, x, NUM_TOKENS), parameters, ring
        )
        at = 0
        for row in rows:
            parts[row.slot].append(np.asarray(out[at : at + row.count]))
            at += row.count
            done[row.slot] += row.count
    assert done == LENGTHS
    return {slot: np.concatenate(some) for slot, some in parts.items()}, ring


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_a_window_layer_in_steps(cuts: list[dict[int, int]], rng: np.random.Generator) -> None:
    parameters, x = random_parameters(rng), inputs(rng)
    got, _ = in_steps(cuts, x, parameters, empty_ring())
    nothing = np.zeros((0, WIDTH))
    for slot, length in LENGTHS.items():
        for position in range(length):
            expected = oracle(x[slot], parameters, position, nothing, is_scaled=False)
            np.testing.assert_allclose(got[slot][position], expected, rtol=1e-4, atol=1e-5)


def test_a_quantised_window_is_the_same_from_step_and_ring(rng: np.random.Generator) -> None:
    """Tokens of the running step are rounded as they will be in the ring."""
    parameters, x = random_parameters(rng), inputs(rng)
    ring = encode(by_hand.filled(0, *empty_ring().shape), FP8_32)
    whole, ring_after = in_steps(CUTS["whole"], x, parameters, ring, QUANTISED_CACHE)
    single, _ = in_steps(CUTS["one by one"], x, parameters, ring, QUANTISED_CACHE)
    exact, plain_ring = in_steps(CUTS["whole"], x, parameters, empty_ring())
    for slot in LENGTHS:
        np.testing.assert_allclose(single[slot], whole[slot], rtol=0, atol=1e-5)
        assert np.abs(exact[slot] - whole[slot]).max() > 1e-3
    assert isinstance(ring_after, ScaledArray)
    rounded = quantise_dequantise(jnp.asarray(np.nan_to_num(plain_ring)), FP8_32)
    np.testing.assert_array_equal(decode(ring_after), rounded)


def test_a_reusing_layer_adds_the_selected_entries(rng: np.random.Generator) -> None:
    """Also entries of tokens that the window holds; both count."""
    parameters, x = random_parameters(rng), inputs(rng)
    rows = [Row(0, 18, 2, BLOCKS[2]), Row(0, 6, 1, BLOCKS[1])]
    entries = np.full((NUM_BLOCKS, 4, WIDTH), np.nan, np.float32)
    index = np.full((NUM_TOKENS, CONFIG.index_topk), -1, np.int32)
    values = rng.standard_normal((NUM_BLOCKS * 4, WIDTH)).astype(np.float32)
    for t in range(1, NUM_TOKENS):
        chosen = rng.permutation(NUM_BLOCKS * 4)[: t % 9]
        index[t, CONFIG.index_topk - len(chosen) :] = chosen
        entries.reshape(-1, WIDTH)[chosen] = values[chosen]
    source = SourceCache(jnp.asarray(entries), by_hand.filled(0, NUM_BLOCKS, 4, 32), None)
    selection = Selection(jnp.asarray(index))
    step = by_hand.step_of(rows, NUM_TOKENS)
    tokens = by_hand.tokens_of(rows, x, NUM_TOKENS)
    out, _, source_after, selection_after = by_hand.run(
        reuse, step, tokens, parameters, empty_ring(), source, selection
    )
    where = [(row.slot, position) for row in rows for position in row.positions]
    for t, (slot, position) in enumerate(where):
        seen = f64(values[index[t][index[t] >= 0]])
        expected = oracle(x[slot], parameters, position, seen, is_scaled=True)
        np.testing.assert_allclose(out[t], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(source_after.entries, source.entries)
    np.testing.assert_array_equal(selection_after.entry_index, index)


def test_a_full_layer_attends_to_what_it_just_made(rng: np.random.Generator) -> None:
    """It is a reusing layer on the cache and the selection that it returns."""
    parameters, x = random_parameters(rng), inputs(rng)
    plain = parameters
    parameters = dataclasses.replace(
        parameters,
        compressor=CompressorParameters(
            wkv=by_hand.weight(rng, WIDTH, HIDDEN),
            norm=by_hand.norm_weight(rng, WIDTH),
            wgate=by_hand.weight(rng, WIDTH, HIDDEN),
        ),
        indexer=IndexerParameters(
            wq_b=by_hand.weight(
                rng, CONFIG.index_n_heads * CONFIG.index_head_dim, CONFIG.q_lora_rank
            ),
            weights_proj=by_hand.weight(rng, CONFIG.index_n_heads, HIDDEN),
            wk=by_hand.weight(rng, CONFIG.index_head_dim, WIDTH),
            k_norm=by_hand.norm_weight(rng, CONFIG.index_head_dim),
        ),
    )
    rows = [Row(0, 18, 2, BLOCKS[2]), Row(0, 6, 1, BLOCKS[1])]
    source = SourceCache(
        by_hand.filled(np.nan, NUM_BLOCKS, BLOCK_TOKENS // 2, WIDTH),
        by_hand.filled(np.nan, NUM_BLOCKS, BLOCK_TOKENS // 2, CONFIG.index_head_dim),
        by_hand.filled(np.nan, NUM_SLOTS, 1 + ROLLBACK_MAX, 2, WIDTH),
    )
    step = by_hand.step_of(rows, NUM_TOKENS)
    tokens = by_hand.tokens_of(rows, x, NUM_TOKENS)
    out, ring, made, selection = by_hand.run(full, step, tokens, parameters, empty_ring(), source)
    assert np.isfinite(np.asarray(out)).all()
    # The first token completes no pair, the second one does, and sees it at once.
    index = np.asarray(selection.entry_index)
    assert (index[0] == -1).all()
    assert index[1].max() == BLOCKS[2][0] * BLOCK_TOKENS // 2
    assert (index[17] >= 0).sum() == CONFIG.index_topk
    again, ring_again, _, _ = by_hand.run(reuse, step, tokens, plain, empty_ring(), made, selection)
    np.testing.assert_allclose(out, again, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ring, ring_again, rtol=1e-6)
    without, _ = by_hand.run(window, step, tokens, plain, empty_ring())
    assert np.abs(out[17] - without[17]).max() > 0.01
