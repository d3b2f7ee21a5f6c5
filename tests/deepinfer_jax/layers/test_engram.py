"""Goal: the right rows of the memory are read, and added as far as each stream agrees.
Method: golden rows and gates; n-grams of sequences cut in many ways against a walk backwards over
the whole sequence; images and starts break the walk.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import ROLLBACK_MAX
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.engram import engram, ngram_classes, table_rows
from deepinfer_jax.layers.primitives import StepContext
from deepinfer_jax.parameters import EngramParameters
from tests.deepinfer_jax.layers import by_hand
from tests.deepinfer_jax.layers.by_hand import CONFIG, Row

NUM_TOKENS, NUM_SLOTS = 12, 4
ORDER = CONFIG.engram_max_ngram_size
RING = ORDER - 1 + ROLLBACK_MAX
IMAGE = CONFIG.image_token_id
CLASSES = np.minimum(np.arange(CONFIG.vocab_size), CONFIG.engram_compressed_vocab_size - 1)
TABLES = EngramTables.of(CONFIG, CLASSES[::-1].astype(np.int32))


def classes_of(
    step: StepContext, ids: jax.Array, token_classes: jax.Array, ring: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return ngram_classes(ids, token_classes, ring, TABLES, step)


def walk_back(ids: np.ndarray, position: int) -> list[int]:
    out = []
    for distance in range(ORDER):
        at = position - distance
        if at < 0 or ids[at] == IMAGE:
            return out + [TABLES.pad_class] * (ORDER - distance)
        out.append(int(TABLES.token_classes[ids[at]]))
    return out


@pytest.mark.parametrize(
    "cuts", [[(9, 3), (11, 0)], [(1, 1), (2, 1), (1, 1), (6, 6)], [(1, 0)] * 7 + [(0, 12), (12, 0)]]
)
def test_ngrams_of_every_cut(cuts: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Rings hold garbage where nothing was written; the second sequence has images in it."""
    sequences = {2: rng.integers(0, 300, 20), 3: rng.integers(0, 300, 20)}
    sequences[3][[2, 3, 7]] = IMAGE
    ring = jnp.asarray(rng.integers(-5, 5, (NUM_SLOTS, RING)), jnp.int32)
    done = {2: 0, 3: 0}
    for cut in cuts:
        rows = []
        for slot, count in zip((2, 3), cut, strict=True):
            rows.append(Row(done[slot], count, slot))
            done[slot] += count
        where = [(row.slot, position) for row in rows for position in row.positions]
        ids = np.zeros(NUM_TOKENS, np.int32)
        ids[: len(where)] = [sequences[slot][position] for slot, position in where]
        step = by_hand.step_of(
            rows, NUM_TOKENS, images=tuple(np.flatnonzero(ids == IMAGE).tolist())
        )
        token_classes = jnp.asarray(TABLES.token_classes)
        found, ring = by_hand.run(classes_of, step, jnp.asarray(ids), token_classes, ring)
        assert found.dtype == ring.dtype == jnp.int32
        for t, (slot, position) in enumerate(where):
            assert found[t].tolist() == walk_back(sequences[slot], position), (slot, position)


def test_ngrams_reach_into_tokens_that_windows_do_not_see() -> None:
    """A prompt resumed without its windows brings the last tokens before along for this."""
    ids = np.arange(100, 120)
    row = Row(7, 9, 2, first_visible=10)
    step = by_hand.step_of([row], NUM_TOKENS)
    padded = np.pad(ids[row.positions], (0, NUM_TOKENS - row.count)).astype(np.int32)
    ring = jnp.asarray(np.full((NUM_SLOTS, RING), 5, np.int32))
    args = jnp.asarray(padded), jnp.asarray(TABLES.token_classes), ring
    found, _ = by_hand.run(classes_of, step, *args)
    for position in range(10, 16):
        assert found[position - 7].tolist() == walk_back(ids, position)


def test_golden_rows_of_the_released_constants(golden: Path) -> None:
    """Products close to 2^63, in a program whose other integers have 32 bits."""
    released = ModelConfig.released()
    classes = np.minimum(np.arange(129280), 99091).astype(np.int32)
    tables = EngramTables.of(released, classes)
    with np.load(golden / "ops.npz") as data:
        for index in (0, 1):
            rows = jax.jit(lambda ids, index=index: table_rows(ids, tables, index))(
                jnp.asarray(data["hash_ngram_ids"])
            )
            assert rows.dtype == jnp.int32
            np.testing.assert_array_equal(rows, data["hash_rows_real"][index])


def test_rows_equal_those_on_the_host(rng: np.random.Generator) -> None:
    classes = rng.integers(0, CONFIG.engram_compressed_vocab_size, (50, ORDER)).astype(np.int32)
    classes[0] = CONFIG.engram_compressed_vocab_size - 1
    for index in (0, 1):
        rows = jax.jit(lambda c, index=index: table_rows(c, TABLES, index))(jnp.asarray(classes))
        np.testing.assert_array_equal(rows, TABLES.rows(classes)[:, index])


def add(
    step: StepContext, streams: jax.Array, rows: jax.Array, parameters: EngramParameters
) -> jax.Array:
    assert parameters.embed is not None
    return engram(streams, parameters.embed[rows], parameters, step)


def golden_case(golden: Path) -> tuple[jax.Array, EngramParameters, np.ndarray]:
    """Streams, and a memory whose row t is the golden key and value of token t, told apart by a
    matrix that only copies."""
    with np.load(golden / "ops.npz") as data:
        memory = np.concatenate([data["eg_k"].reshape(6, -1), data["eg_v"]], axis=1)
        parameters = EngramParameters(
            embed=jnp.asarray(memory),
            wkv=jnp.asarray(np.eye(memory.shape[1], dtype=np.float32)),
            q_weight=jnp.asarray(data["eg_wh"]),
            k_weight=jnp.asarray(data["eg_we"]),
        )
        return jnp.asarray(data["eg_h"]), parameters, data["eg_out_fp32"]


def test_golden_gates(golden: Path) -> None:
    streams, parameters, expected = golden_case(golden)
    step = by_hand.step_of([Row(0, 6, 1)], 6)
    got = np.array(by_hand.run(add, step, streams, jnp.asarray(np.arange(6)[:, None]), parameters))
    # One product is exactly zero. The golden gate is then 1/2, the models' has the sign of +0.
    gate = 1 / (1 + np.exp(-1e-3))
    value = by_hand.f64(parameters.embed)[0, 4 * 64 :]
    np.testing.assert_allclose(got[0, 0], streams[0, 0] + gate * value, rtol=0, atol=1e-6)
    got[0, 0] = expected[0, 0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_image_tokens_and_the_order_of_rows(golden: Path) -> None:
    streams, parameters, _ = golden_case(golden)
    assert parameters.embed is not None
    width = parameters.embed.shape[1] // 2
    # Halves of two rows joined in order make one golden row again.
    embed = jnp.asarray(by_hand.f64(parameters.embed).reshape(-1, width), jnp.float32)
    halves = dataclasses.replace(parameters, embed=embed)
    rows = np.array([[2 * t, 2 * t + 1] for t in range(6)])
    step = by_hand.step_of([Row(0, 6, 1)], 6, images=(1, 4))
    got = by_hand.run(add, step, streams, rows, halves)
    step = by_hand.step_of([Row(0, 6, 1)], 6)
    without = by_hand.run(add, step, streams, rows[:, :1] // 2, parameters)
    text = np.array([0, 2, 3, 5])
    np.testing.assert_array_equal(got[text], without[text])
    np.testing.assert_array_equal(got[np.array([1, 4])], streams[np.array([1, 4])])


def test_streams_keep_their_type(golden: Path) -> None:
    streams, parameters, expected = golden_case(golden)
    step = by_hand.step_of([Row(0, 6, 1)], 6)
    rows = jnp.asarray(np.arange(6)[:, None])
    got = by_hand.run(add, step, jnp.asarray(by_hand.f64(streams), jnp.bfloat16), rows, parameters)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(by_hand.f64(got), expected, rtol=2**-6, atol=0.03)
