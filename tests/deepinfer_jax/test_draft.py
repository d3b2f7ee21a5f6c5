"""Goal: the draft module proposes what the published one does. Method: independent golden numbers
of every intermediate value, after prompts that went through the paged cache; its settings and its
helpers by themselves.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import DraftCache
from deepinfer_jax.draft import DraftRows, DraftSettings, draft, fill_drafts
from deepinfer_jax.layers.primitives import Arithmetic
from deepinfer_jax.sampling import accept
from pallas_kernels import ops
from tests.deepinfer_jax import golden_draft, golden_model
from tests.deepinfer_jax.golden_draft import DECODE, NUM_DRAFTS, PREFILL


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_golden_values(golden: Path, cache_format: str) -> None:
    data, prompts = np.load(golden / "dspark.npz"), np.load(golden / "forward.npz")
    cache, compared = golden_draft.layout(cache_format).zeros(), set()
    for length in (77, 24, 7):
        # Slot and block are those of the longer prompt before, whose entries must not show.
        row = (prompts[f"ids_{length}"], 0, 2, [3])
        step = golden_draft.run(cache_format, PREFILL, [row], cache)
        cache, suffix = step.cache, f"_{cache_format}_{length}"
        exact = {"anchor": step.result.tokens[0, :1], "draft_tokens": step.result.drafts[0]}
        close = {
            "features": step.seen["features"][:length],
            "main_x": step.seen["main_x"][:length],
            "raw_hidden": step.seen["raw_hidden"][0],
            "base_logits": step.seen["base_logits"][0],
            "draft_logits": step.seen["draft_logits"][0],
            "confidence_logit": step.seen["scores"][0],
        }
        for name, value in exact.items():
            np.testing.assert_array_equal(value, data[name + suffix], err_msg=name + suffix)
        for name, value in close.items():
            expected = data[name + suffix].reshape(value.shape)
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-4, err_msg=name + suffix)
        compared |= {name + suffix for name in (*exact, *close)}
        chance = 1 / (1 + np.exp(-data["confidence_logit" + suffix].astype(np.float64).ravel()))
        np.testing.assert_allclose(step.result.confidences[0], chance, atol=1e-4)
    assert compared == {name for name in data.files if f"_{cache_format}_" in name}


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_chunks_and_company_do_not_change_the_drafts(golden: Path, cache_format: str) -> None:
    data, prompts = np.load(golden / "dspark.npz"), np.load(golden / "forward.npz")
    ids = prompts["ids_77"]
    cache = golden_draft.layout(cache_format).zeros()
    for start, end in ((0, 30), (30, 33), (33, 77)):
        rows = [(prompts["ids_7"], 0, 1, [2]), (ids[start:end], start, 3, [4])]
        step = golden_draft.run(cache_format, PREFILL, rows, cache)
        cache = step.cache
    for row, length in ((0, 7), (1, 77)):
        suffix = f"_{cache_format}_{length}"
        np.testing.assert_array_equal(step.result.drafts[row], data["draft_tokens" + suffix])
        np.testing.assert_allclose(
            step.seen["scores"][row], data["confidence_logit" + suffix].ravel(), atol=1e-4
        )
    # Nothing is ever written to the slot of padding rows.
    assert cache.draft is not None
    assert not any(np.any(np.asarray(a[0])) for a in (cache.draft.tokens, cache.draft.logits))


def drafted_rows(step: golden_draft.Step, first_visible: int) -> DraftRows:
    """The rows of `step` again: one sequence of 24 tokens in slot 2."""
    return DraftRows(
        anchors=jnp.asarray(step.result.tokens[:, 0]),
        positions=jnp.asarray([23, -1, -1]),
        slots=jnp.asarray([2, 0, 0]),
        is_real=jnp.asarray([True, False, False]),
        first_visible=jnp.asarray([first_visible, 0, 0]),
        temperatures=jnp.zeros(3),
        top_ks=jnp.zeros(3, jnp.int32),
        top_ps=jnp.ones(3),
        seeds=jnp.zeros((3, 2), jnp.uint32),
    )


CALIBRATION = (0.5, 1.0, 2.0, 1e-3, 3.0)


@functools.cache
def redraft() -> Any:
    """`(weights, draft cache, rows) -> confidences`, read in the other way and with CALIBRATION."""
    model, _ = golden_draft.load("noq")
    settings = DraftSettings(CALIBRATION, reads_normalised=True)
    arithmetic = Arithmetic(model.config, model.precision)
    return jax.jit(lambda weights, *rest: draft(arithmetic, settings, weights, *rest)[0])


@functools.cache
def step_of_24() -> golden_draft.Step:
    ids = np.load(golden_model.DIRECTORY.parent / "forward.npz")["ids_24"]
    cache = golden_draft.layout("noq").zeros()
    return golden_draft.run("noq", PREFILL, [(ids, 0, 2, [3])], cache)


def test_settings_of_the_confidence_head() -> None:
    _, weights = golden_draft.load("noq")
    step, module = step_of_24(), weights.parameters.draft
    assert step.cache.draft is not None and module is not None
    confidences = redraft()(weights.parameters, step.cache.draft, drafted_rows(step, 0))[0]
    raw = step.seen["raw_hidden"][0].astype(np.float64)
    hidden = raw / np.sqrt(np.mean(raw**2, axis=1, keepdims=True)) * np.asarray(module.norm, float)
    before = [int(step.result.tokens[0, 0]), *step.result.drafts[0, :-1]]
    markov = np.asarray(module.markov_embed, float)[before]
    weight = np.asarray(module.confidence_proj, float)[0]
    scores = np.concatenate([hidden, markov], axis=1) @ weight / np.array(CALIBRATION)
    assert np.abs(scores[3]) > 60, "one score is to be clipped"
    expected = 1 / (1 + np.exp(-np.clip(scores, -60, 60)))
    np.testing.assert_allclose(confidences, expected, rtol=1e-3, atol=1e-5)
    assert np.abs(confidences - step.result.confidences[0]).max() > 0.05


def test_what_the_rings_do_not_hold_is_not_seen() -> None:
    _, weights = golden_draft.load("noq")
    step = step_of_24()
    clean = step.cache.draft
    assert clean is not None
    # The window of eight reaches from 16 to 23; what lies before 20 belongs to nobody.
    strange = clean._replace(
        rings=tuple(
            ring.at[2, jnp.arange(16, 20) % ring.shape[1]].set(np.nan) for ring in clean.rings
        )
    )
    parameters, rows = weights.parameters, drafted_rows(step, 20)
    seen = redraft()(parameters, clean, rows)[0]
    np.testing.assert_array_equal(redraft()(parameters, strange, rows)[0], seen)
    everything = redraft()(parameters, clean, drafted_rows(step, 0))[0]
    assert np.abs(np.asarray(seen) - np.asarray(everything)).max() > 1e-3


def test_rows_of_a_step_know_where_their_past_begins() -> None:
    batch = golden_model.to_batch(DECODE, golden_model.batch_arrays(DECODE, ROWS))
    kept = jnp.asarray([2, 1, 6])
    rows = DraftRows.of(batch, jnp.asarray([1, 2, 3]), kept)
    np.testing.assert_array_equal(rows.positions, [41, 7, 14])
    np.testing.assert_array_equal(rows.first_visible, 0)
    short = batch._replace(
        visible_starts=jnp.asarray([30, 2, 0]), tail_starts=jnp.asarray([0, 5, 9])
    )
    rows = DraftRows.of(short, jnp.asarray([1, 2, 3]), kept)
    np.testing.assert_array_equal(rows.first_visible, [30, 5, 9])


def test_settings_that_contradict_themselves_are_refused() -> None:
    for calibration in ((), (1.0, 0.0), (-1.0,)):
        with pytest.raises(ValueError, match="expected temperatures above 0"):
            DraftSettings(calibration)
    with pytest.raises(ValueError, match="2 temperatures; expected 1 or 5"):
        DraftSettings((1.0, 2.0)).temperatures(5)
    np.testing.assert_array_equal(DraftSettings((2.0,)).temperatures(3), [2.0, 2.0, 2.0])


def waiting_drafts(vocab_size: int = 8) -> DraftCache:
    """Slots 0 to 3 with drafts 10 s, 10 s + 1, ... modulo the vocabulary."""
    rng = np.random.default_rng(4)
    return DraftCache(
        rings=(),
        tokens=jnp.asarray(np.arange(4)[:, None] * 10 + np.arange(NUM_DRAFTS), jnp.int32)
        % vocab_size,
        probability=jnp.asarray(rng.uniform(0.05, 0.5, (4, NUM_DRAFTS)), jnp.float32),
        logits=jnp.asarray(rng.normal(size=(4, NUM_DRAFTS, vocab_size)), jnp.float32),
        lengths=jnp.zeros(4, jnp.int32),
    )


ROWS = [
    (np.array([77, 0, 0]), 40, 3, [1]),
    (np.array([78]), 7, 2, [2]),
    (np.array([79, 5, 5, 5, 5, 5]), 9, 1, [3]),
]


def test_waiting_drafts_take_their_places() -> None:
    batch = golden_model.to_batch(DECODE, golden_model.batch_arrays(DECODE, ROWS))
    filled = fill_drafts(batch, waiting_drafts(1000))
    expected = [77, 30, 31, 78, 79, 10, 11, 12, 13, 14, 0, 0, 0, 0]
    np.testing.assert_array_equal(filled.token_ids, expected)


def test_each_row_is_accepted_by_its_own_settings(rng: np.random.Generator) -> None:
    arrays = golden_model.batch_arrays(DECODE, ROWS)
    arrays["temperatures"][:] = [0.7, 1.0, 1.5]
    arrays["top_ks"][:], arrays["top_ps"][:] = [6, 0, 7], [0.9, 1.0, 0.99]
    drafts = waiting_drafts()
    together, by_itself, seen = jax.jit(accept), jax.jit(ops.accept_tokens), set()
    for seed in range(12):
        logits = jnp.asarray(rng.normal(size=(DECODE.num_tokens, 8)), jnp.float32)
        arrays["seed_low"][:], arrays["seed_high"][:] = [seed, 8, 9], [1, seed, seed]
        batch = golden_model.to_batch(DECODE, arrays)
        accepted, following = together(logits, batch, drafts)
        at = 0
        for row, (ids, start, slot, _) in enumerate(ROWS):
            alone = by_itself(
                logits[at : at + 6],
                jnp.zeros(6, jnp.int32),
                jnp.zeros(1, jnp.int32),
                drafts.tokens[slot, None],
                drafts.probability[slot, None],
                jnp.asarray([len(ids) - 1]),
                drafts.logits,
                jnp.asarray([slot]),
                *(jnp.asarray(arrays[n][row, None]) for n in ("temperatures", "top_ks", "top_ps")),
                jnp.asarray([[arrays["seed_high"][row], arrays["seed_low"][row]]]),
                jnp.asarray([start + 1]),
            )
            assert (int(alone[0][0]), int(alone[1][0])) == (int(accepted[row]), int(following[row]))
            seen.add((row, int(accepted[row])))
            at += len(ids)
    assert len(seen) > 5, "rows are to end in several ways"
