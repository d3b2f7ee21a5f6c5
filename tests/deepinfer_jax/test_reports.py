"""Goal: log probabilities are those of the model, for sampled tokens and for prompts, whatever the
sampling settings, with and without drafts; and masks decide what is sampled.

Method: steps of the golden checkpoint against the log-softmax of the golden logits, in float64.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepBatch, StepShape, pack
from deepinfer_jax.cache import KVCache
from deepinfer_jax.controls import Controls
from deepinfer_jax.reports import TOP_LOGPROBS_MAX, Logprobs, emitted_after, logprobs
from tests.deepinfer_jax import golden_draft, golden_model
from tests.deepinfer_jax.golden_draft import DECODE, PREFILL, VOCAB_SIZE
from tests.deepinfer_jax.test_controls import pack_masks, settings_words


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    below = logits - logits.max(axis=-1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=-1, keepdims=True))


def run(
    shape: StepShape,
    rows: list[golden_draft.Row],
    cache: KVCache,
    legal: np.ndarray | None = None,
    temperature: float = 0.0,
    **settings: Any,
) -> golden_draft.Step:
    every = np.ones((shape.num_samples, VOCAB_SIZE), bool)
    masks = pack_masks(every if legal is None else legal)
    words = settings_words(shape, **{"adjusts": legal is not None, **settings})
    counts = jnp.zeros((golden_draft.NUM_SLOTS, VOCAB_SIZE), jnp.uint16)
    controls = Controls(jnp.asarray(words), jnp.asarray(masks), counts)
    temperatures = [temperature] * shape.num_rows
    return golden_draft.run("noq", shape, rows, cache, controls, temperatures=temperatures)


def empty_cache() -> KVCache:
    return golden_draft.layout("noq").zeros()


def first_tokens(step: golden_draft.Step) -> np.ndarray:
    return step.result.tokens[:, 0]


def check(found: Logprobs | None, at: int, tokens: np.ndarray, expected: np.ndarray) -> None:
    """`found` from index `at` on is about `tokens` [N], by log probabilities [N, V]."""
    assert found is not None
    some = slice(at, at + len(tokens))
    chosen = expected[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(found.chosen[some], chosen, atol=1e-4)
    order = np.sort(expected, axis=1)[:, ::-1][:, :TOP_LOGPROBS_MAX]
    np.testing.assert_allclose(found.top[some], order, atol=1e-4)
    of_ids = np.take_along_axis(expected, found.top_tokens[some], axis=1)
    np.testing.assert_allclose(found.top[some], of_ids, atol=1e-4)


def test_a_prompt_in_chunks_and_the_token_after_it(golden: Path) -> None:
    data = np.load(golden / "forward.npz")
    ids, expected = data["ids_24"], log_softmax(data["logits_noq_24"])
    rows = [(data["ids_7"], 0, 2, [2]), (ids[:13], 0, 1, [1])]
    step = run(PREFILL, rows, empty_cache(), reports=1, next_tokens=[-1, ids[13], -1])
    check(step.report.prompt, 7, ids[1:14], expected[:13])
    sampled = step.report.sampled
    check(sampled, 0, first_tokens(step)[:1], log_softmax(data["logits_noq_7"])[-1:])
    # A hot draw reports the same: probabilities are those of the model, not of the sampler.
    step = run(PREFILL, [(ids[13:], 13, 1, [1])], step.cache, temperature=2.0, reports=1)
    check(step.report.sampled, 0, first_tokens(step)[:1], expected[-1:])
    assert step.report.prompt is not None
    assert not step.report.prompt.chosen.any(), "nobody asked for the prompt"


def test_nothing_is_reported_unless_it_is_wanted(golden: Path) -> None:
    ids = np.load(golden / "forward.npz")["ids_7"]
    rows = [(ids, 0, 1, [1])]
    quiet = run(PREFILL, rows, empty_cache())
    loud = run(PREFILL, rows, empty_cache(), reports=1, next_tokens=0)
    assert first_tokens(quiet)[0] == first_tokens(loud)[0]
    assert not any(a.any() for a in jax.tree.leaves(quiet.report[1:]))
    assert all(a.any() for a in jax.tree.leaves(loud.report[1:]))


def test_masks_decide_and_reports_do_not_follow_them(golden: Path) -> None:
    data = np.load(golden / "forward.npz")
    legal = np.zeros((PREFILL.num_samples, VOCAB_SIZE), bool)
    legal[0, 300] = legal[1, 3] = legal[2, 0] = True
    rows = [(data["ids_7"], 0, 1, [1]), (data["ids_7"], 0, 2, [2])]
    for temperature in (0.0, 1.0):
        step = run(PREFILL, rows, empty_cache(), legal, temperature, reports=1)
        assert first_tokens(step)[:2].tolist() == [300, 3]
        expected = log_softmax(data["logits_noq_7"])[[-1, -1]]
        check(step.report.sampled, 0, np.array([300, 3]), expected)


def test_reports_of_verified_drafts(golden: Path) -> None:
    data, greedy = np.load(golden / "forward.npz"), np.load(golden / "greedy.npz")
    text = np.concatenate([data["ids_24"], greedy["tokens_noq"]])
    before = run(PREFILL, [(text[:24], 0, 1, [1])], empty_cache())
    # Two right drafts, then a wrong one; measured against the same text token by token.
    drafts = [*text[25:27].tolist(), 5, 6, 7]
    cache = golden_draft.with_drafts(before.cache, 1, drafts)
    verified = run(DECODE, [(text[24:28], 24, 1, [1])], cache, reports=1)
    assert golden_draft.emitted(verified.result, 0) == text[25:28].tolist()
    cache = before.cache
    for number in range(3):
        position = 24 + number
        alone = run(DECODE, [(text[[position]], position, 1, [1])], cache, reports=1)
        cache = alone.cache
        for name in Logprobs._fields:
            found = getattr(verified.report.sampled, name)[number]
            expected = getattr(alone.report.sampled, name)[0]
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)


def test_a_mask_refuses_a_draft(golden: Path) -> None:
    data, greedy = np.load(golden / "forward.npz"), np.load(golden / "greedy.npz")
    text = np.concatenate([data["ids_24"], greedy["tokens_noq"]])
    before = run(PREFILL, [(text[:24], 0, 1, [1])], empty_cache())
    cache = golden_draft.with_drafts(before.cache, 1, [*text[25:28].tolist(), 5, 6])
    legal = np.ones((DECODE.num_samples, VOCAB_SIZE), bool)
    legal[1] = False
    legal[1, 7] = True
    for temperature in (0.0, 1e-3):
        step = run(DECODE, [(text[24:28], 24, 1, [1])], cache, legal, temperature)
        assert golden_draft.emitted(step.result, 0) == [text[25], 7]


def test_what_came_after_each_token() -> None:
    rows = [(np.array([10, 11, 12, 13]), 5, 1, [1]), (np.array([20, 21]), 9, 2, [2])]
    buffer = jnp.asarray(pack(golden_model.batch_arrays(DECODE, rows), DECODE))
    batch = StepBatch.unpack(buffer, DECODE)
    found = emitted_after(batch, jnp.array([2, 1]), jnp.array([90, 91]))
    assert np.asarray(found)[[0, 1, 2, 4, 5]].tolist() == [11, 12, 90, 21, 91]


def test_a_small_vocabulary_has_fewer_top_tokens() -> None:
    found = logprobs(jnp.zeros((2, 3)), jnp.array([1, 2]))
    np.testing.assert_allclose(np.asarray(found.top), np.full((2, 3), -np.log(3.0)), rtol=1e-6)
    assert np.asarray(found.chosen).shape == (2,)
