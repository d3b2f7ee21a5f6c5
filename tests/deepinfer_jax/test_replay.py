"""Goal: bounded replay runs the upper layers on a prompt's tail only, and starting without window
history masks exactly what is absent. Method: `mask`, which drops nothing, as the oracle for
`compact`; equality with the exact model wherever the bounds leave nothing out.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import Replay, StepBatch, StepShape, last_tokens, pack
from deepinfer_jax.cache import KVCache
from deepinfer_jax.model import Weights, forward, logits, upper_batch
from deepinfer_jax.replay import ReplayError, check_replay
from deepinfer_jax.steps import compile_step
from deepinfer_jax.topology import Topology
from tests.deepinfer_jax import golden_model

LENGTH = 77
NUM_TOKENS = 80
EXACT = StepShape(2, NUM_TOKENS, 1, samples_every_token=False)
MASK = StepShape(2, NUM_TOKENS, 1, samples_every_token=False, replay=Replay())
SLOT, BLOCK = 1, 3


@functools.cache
def compiled(shape: StepShape) -> Any:
    """`(weights, buffer, cache) -> (logits after each row's last token, cache)`."""
    model, _ = golden_model.load("noq")

    @jax.jit
    def run(weights: Weights, buffer: jax.Array, cache: KVCache) -> Any:
        batch = StepBatch.unpack(buffer, shape)
        residual, cache = forward(model, weights, cache, batch, replay=shape.replay)
        index = last_tokens(upper_batch(batch, shape.replay))
        return logits(model, weights, residual, index), cache

    return run


def compact(num_tail_tokens: int) -> StepShape:
    return StepShape(2, NUM_TOKENS, 1, samples_every_token=False, replay=Replay(num_tail_tokens))


def run(
    shape: StepShape,
    ids: np.ndarray,
    chunks: list[tuple[int, int]],
    *,
    tail_start: int = 0,
    visible_start: int = 0,
    entry_start: int = 0,
    cache: KVCache | None = None,
) -> tuple[np.ndarray, KVCache]:
    """Logits after the last of `chunks` (start, end) of one prompt, and the cache.

    The sequence is the second row, behind a sequence of one token that is all tail.
    """
    model, weights = golden_model.load("noq")
    used = golden_model.layout(model).zeros() if cache is None else cache
    out = None
    for start, end in chunks:
        rows = [(ids[:1], 0, 2, [4]), (ids[start:end], start, SLOT, [BLOCK])]
        arrays = golden_model.batch_arrays(shape, rows)
        if shape.replay is not None:
            arrays["tail_starts"] = np.array([0, tail_start], np.int32)
            arrays["visible_starts"] = np.array([0, visible_start], np.int32)
            arrays["entry_starts"] = np.array([0, entry_start], np.int32)
        out, used = compiled(shape)(weights, jnp.asarray(pack(arrays, shape)), used)
    return np.asarray(out), used


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.load(Path(__file__).parents[1] / "golden" / "forward.npz")[f"ids_{LENGTH}"]


CHUNKS = [(0, 40), (40, LENGTH)]


def test_a_mask_that_hides_nothing_is_exact(ids: np.ndarray) -> None:
    exact, exact_cache = run(EXACT, ids, CHUNKS)
    out, cache = run(MASK, ids, CHUNKS)
    np.testing.assert_array_equal(out, exact)
    jax.tree.map(np.testing.assert_array_equal, cache, exact_cache)


def test_a_tail_of_everything_is_exact_to_rounding(ids: np.ndarray) -> None:
    """XLA fuses the shortened program differently; a step without anything to leave out therefore
    runs the exact program.
    """
    exact, _ = run(EXACT, ids, CHUNKS)
    out, _ = run(compact(41), ids, CHUNKS)
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("keep", (1, 4, 39))
@pytest.mark.parametrize("chunks", ([(0, LENGTH)], CHUNKS), ids=("whole", "chunks"))
def test_mask_is_the_oracle_of_compact(
    keep: int, chunks: list[tuple[int, int]], ids: np.ndarray
) -> None:
    tail_start = LENGTH - keep
    masked, mask_cache = run(MASK, ids, chunks, tail_start=tail_start)
    out, cache = run(compact(41), ids, chunks, tail_start=tail_start)
    # The two differ in the number of rows of their products, hence not bit for bit.
    np.testing.assert_allclose(out, masked, rtol=0, atol=2e-5)
    _assert_equal_caches(cache, mask_cache, tail_start)
    exact, exact_cache = run(EXACT, ids, chunks)
    # Six upper layers with windows of 8 reach back 42 positions, the last ones very faintly.
    assert (np.abs(out[1] - exact[1]).max() > 1e-3) == (keep < 39)
    np.testing.assert_allclose(out[0], exact[0], rtol=0, atol=2e-5)
    # What lasts is made from every token: lower layers and all compressed entries are exact.
    for source, expected in zip(cache.sources, exact_cache.sources, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[BLOCK], b[BLOCK], rtol=0, atol=2e-5),
            (source.entries, source.index_keys),
            (expected.entries, expected.index_keys),
        )


def test_a_chunk_before_the_tail_leaves_the_upper_rings_alone(ids: np.ndarray) -> None:
    model, _ = golden_model.load("noq")
    _, cache = run(compact(41), ids, [(0, 30)], tail_start=40)
    for layer in model.topology.layers:
        ring = np.asarray(cache.rings[layer.layer_index])[SLOT]
        assert layer.is_encoder == bool(np.any(ring != 0))


def test_starting_without_window_history(ids: np.ndarray) -> None:
    """A prefix hit whose window state is not there: the entries are, the windows are masked."""
    cut = 40
    _, prefix = run(MASK, ids, [(0, cut)])
    # Another slot's leavings stand where the window history was.
    _, prefix = run(MASK, ids[::-1].copy(), [(0, LENGTH)], cache=_with_blocks_of(prefix))
    prefix = _with_blocks_of(prefix, restore=run(MASK, ids, [(0, cut)])[1])
    before = jax.tree.map(np.asarray, prefix.sources)
    # Three tokens lead in, for the n-grams of the first visible one.
    chunk = [(cut - 3, LENGTH)]
    out, cache = run(MASK, ids, chunk, visible_start=cut, cache=prefix)
    fresh = _with_blocks_of(golden_model.layout(golden_model.load("noq")[0]).zeros(), prefix)
    again, _ = run(MASK, ids, chunk, visible_start=cut, cache=fresh)
    np.testing.assert_array_equal(out, again, "what the slot held before is not seen")
    seen, _ = run(MASK, ids, chunk, visible_start=0, cache=fresh)
    assert np.abs(out[1] - seen[1]).max() > 1e-3, "lead-in tokens are not part of the window"
    for layer, (source, old) in enumerate(zip(cache.sources, before, strict=True)):
        ratio = (2, 2, 1)[layer]
        np.testing.assert_array_equal(
            np.asarray(source.entries)[BLOCK, : cut // ratio],
            np.asarray(old.entries)[BLOCK, : cut // ratio],
            "entries of the prefix, which others may share, are not written again",
        )


def test_nothing_absent_means_nothing_masked(ids: np.ndarray) -> None:
    """With the whole past visible the window start changes nothing, bit for bit."""
    exact, _ = run(EXACT, ids, CHUNKS)
    out, _ = run(MASK, ids, CHUNKS, visible_start=0)
    np.testing.assert_array_equal(out, exact)


def _with_blocks_of(cache: KVCache, restore: KVCache | None = None) -> KVCache:
    """`cache` with the blocks of `restore`, its slots as they are."""
    if restore is None:
        return cache
    sources = tuple(
        mine._replace(entries=theirs.entries, index_keys=theirs.index_keys)
        for mine, theirs in zip(cache.sources, restore.sources, strict=True)
    )
    return cache._replace(sources=sources)


def _assert_equal_caches(cache: KVCache, expected: KVCache, tail_start: int) -> None:
    """Everything alive: rings of the lower layers, tails of the upper ones, entries, classes."""
    model, _ = golden_model.load("noq")
    length = cache.rings[0].shape[1]
    first = max(tail_start, LENGTH - length)
    places = np.arange(first, LENGTH) % length
    for layer in model.topology.layers:
        ring, other = cache.rings[layer.layer_index], expected.rings[layer.layer_index]
        kept = slice(None) if layer.is_encoder else places
        np.testing.assert_allclose(ring[SLOT][kept], other[SLOT][kept], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(cache.classes, expected.classes)


def test_a_step_samples_after_the_tail(ids: np.ndarray) -> None:
    """The compiled prefill step of a shape with replay draws from the logits of the tail."""
    model, weights = golden_model.load("noq")
    cache = golden_model.layout(model).zeros()
    shape = compact(41)
    step = compile_step(model, shape, weights, cache)
    arrays = golden_model.batch_arrays(
        shape, [(ids[:1], 0, 2, [4]), (ids[:LENGTH], 0, SLOT, [BLOCK])]
    )
    arrays["tail_starts"] = np.array([0, LENGTH - 20], np.int32)
    arrays |= {name: np.zeros(2, np.int32) for name in ("visible_starts", "entry_starts")}
    tokens, _ = step(weights, jnp.asarray(pack(arrays, shape)), cache)
    out, _ = run(compact(41), ids, [(0, LENGTH)], tail_start=LENGTH - 20)
    np.testing.assert_array_equal(tokens, np.argmax(out, axis=1))


def test_an_engram_above_the_split_is_refused(ids: np.ndarray) -> None:
    model, weights = golden_model.load("noq")
    layers = list(model.topology.layers)
    layers[7] = dataclasses.replace(layers[7], engram_index=0)
    odd = model._replace(topology=Topology(tuple(layers)))
    shape = compact(8)
    arrays = golden_model.batch_arrays(shape, [(ids[:1], 0, SLOT, [BLOCK])])
    arrays |= {
        name: np.zeros(2, np.int32) for name in ("tail_starts", "visible_starts", "entry_starts")
    }
    batch = StepBatch.unpack(jnp.asarray(pack(arrays, shape)), shape)
    cache = golden_model.layout(model).zeros()
    with pytest.raises(ReplayError, match=r"layers \[7\] have an Engram"):
        jax.eval_shape(lambda: forward(odd, weights, cache, batch, replay=shape.replay))
    with pytest.raises(ReplayError, match=r"layers \[7\] have an Engram"):
        check_replay(model.config, odd.topology, 14, drops_tokens=True)
    check_replay(model.config, odd.topology, 14, drops_tokens=False)


def test_what_a_model_cannot_replay_is_refused() -> None:
    """Windows of 8 tokens, and 6 that may be taken back."""
    config = golden_model.load("noq")[0].config
    topology = Topology.of(config)
    check_replay(config, topology, 14, drops_tokens=True)
    with pytest.raises(ReplayError, match="keeps the last 13 tokens of a prompt; .* at least 14"):
        check_replay(config, topology, 13, drops_tokens=True)
    no_split = tuple(dataclasses.replace(layer, is_encoder=True) for layer in topology.layers)
    with pytest.raises(ReplayError, match="must pass all of its layers"):
        check_replay(config, Topology(no_split), 14, drops_tokens=False)
