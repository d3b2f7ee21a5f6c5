"""Goal: drafts leave no trace, neither in the text nor in the cache. Method: two sequences of the
golden checkpoint in one batch. Their greedy text with drafts equals the golden text; after steps
that refuse some drafts, everything a sequence can be asked for equals, bit for bit, what steps of
the accepted tokens alone leave, and so do the logits that follow; and what is wrong is refused.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import steps
from deepinfer_jax.batch import StepShape, buffer_size
from deepinfer_jax.cache import ROLLBACK_MAX, CacheLayout, KVCache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.parameter_table import abstract_parameters
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.steps import SpeculativeResult, compile_step, run_speculative_step
from deepinfer_jax.topology import Topology
from tests.deepinfer_jax import golden_draft, golden_model
from tests.deepinfer_jax.golden_draft import DECODE, NUM_DRAFTS, PREFILL, Step

FORMATS = ("noq", "kvq")
SLOTS, BLOCKS = (1, 3), ([2], [4])
GOLDEN = golden_model.DIRECTORY.parent


class Running(NamedTuple):
    """Two sequences: their prompt lengths, the tokens after them, and the cache."""

    lengths: tuple[int, int]
    texts: tuple[list[int], list[int]]
    cache: KVCache

    @property
    def processed(self) -> list[int]:
        """Tokens of each that the model has seen: all but the last."""
        return [n + len(text) - 1 for n, text in zip(self.lengths, self.texts, strict=True)]


def begin(cache_format: str, **columns: Any) -> Running:
    """The prompts of 7 and of 24 tokens, after prefill."""
    prompts = [np.load(GOLDEN / "forward.npz")[f"ids_{n}"] for n in (7, 24)]
    rows = [(ids, 0, s, b) for ids, s, b in zip(prompts, SLOTS, BLOCKS, strict=True)]
    cache = golden_draft.layout(cache_format).zeros()
    step = golden_draft.run(cache_format, PREFILL, rows, cache, **columns)
    first = [golden_draft.emitted(step.result, row) for row in (0, 1)]
    assert golden_draft.emitted(step.result, 2) == [], "a padding row adds nothing"
    return Running((7, 24), (first[0], first[1]), step.cache)


def advance(
    cache_format: str,
    running: Running,
    num_drafts: list[int],
    only: int | None = None,
    **columns: Any,
) -> tuple[Running, Step, list[np.ndarray]]:
    """One decode step of both sequences, or of `only` one, and the logits of the kept tokens."""
    members = [0, 1] if only is None else [only]
    rows = []
    for i in members:
        # The device puts the drafts behind the first token itself.
        ids = np.array([running.texts[i][-1], *[-7] * num_drafts[i]])
        rows.append((ids, running.processed[i], SLOTS[i], BLOCKS[i]))
    step = golden_draft.run(cache_format, DECODE, rows, running.cache, **columns)
    texts, kept, at = list(running.texts), [], 0
    for row, i in enumerate(members):
        tokens = golden_draft.emitted(step.result, row)
        kept.append(step.seen["logits"][at : at + len(tokens)])
        texts[i] = texts[i] + tokens
        at += num_drafts[i] + 1
    return Running(running.lengths, (texts[0], texts[1]), step.cache), step, kept


@functools.cache
def text_without_drafts(cache_format: str) -> tuple[list[int], list[int]]:
    """Forty tokens of both sequences, one at a time."""
    running = begin(cache_format)
    while len(running.texts[0]) < 40:
        running, _, _ = advance(cache_format, running, [0, 0])
    return running.texts


@pytest.mark.parametrize("cache_format", FORMATS)
def test_greedy_text_with_drafts_is_the_golden_text(cache_format: str) -> None:
    expected = np.load(GOLDEN / "greedy.npz")[f"tokens_{cache_format}"]
    plain = text_without_drafts(cache_format)
    np.testing.assert_array_equal(plain[1], expected)
    running, num_steps = begin(cache_format), 0
    while min(map(len, running.texts)) < 40:
        running, _, _ = advance(cache_format, running, [NUM_DRAFTS, NUM_DRAFTS])
        num_steps += 1
    for text, one_by_one in zip(running.texts, plain, strict=True):
        assert text[:40] == one_by_one
    # The weights are random, but a few drafts are right.
    assert sum(map(len, running.texts)) > 2 * num_steps + 2


def forced(running: Running, right: list[int], cache_format: str) -> Running:
    """The same with drafts of which the first `right` ones of each sequence are right."""
    cache = running.cache
    for i, plain in enumerate(text_without_drafts(cache_format)):
        n = len(running.texts[i])
        drafts = [*plain[n : n + right[i]], (plain[n + right[i]] + 1) % 300, 5, 5, 5, 5]
        cache = golden_draft.with_drafts(cache, SLOTS[i], drafts[:NUM_DRAFTS])
    return running._replace(cache=cache)


OUTCOMES = ((5, 0), (0, 0), (5, 5), (1, 0), (5, 2), (3, 3), (4, 0), (2, 1), (5, 4), (5, 1))
"""Drafts of a step and how many of them are right: every number of both, and of wrong ones."""


@pytest.mark.parametrize("cache_format", FORMATS)
def test_refused_drafts_leave_no_trace(cache_format: str) -> None:
    mixed = alone = begin(cache_format)
    for outcomes in zip(OUTCOMES, reversed(OUTCOMES), strict=True):
        num_drafts, right = ([outcome[part] for outcome in outcomes] for part in (0, 1))
        mixed, _, mixed_logits = advance(
            cache_format, forced(mixed, right, cache_format), num_drafts
        )
        alone, _, alone_logits = advance(cache_format, forced(alone, right, cache_format), right)
        assert mixed.texts == alone.texts
        assert [len(a) - 1 for a in mixed_logits] == right
        for a, b in zip(mixed_logits, alone_logits, strict=True):
            np.testing.assert_array_equal(a, b)
        assert_same_state(cache_format, mixed, alone)
    # The same text one token at a time, each sequence as far as it came.
    single = begin(cache_format)
    for i in (0, 1):
        while len(single.texts[i]) < len(mixed.texts[i]):
            single, _, _ = advance(cache_format, single, [0, 0], only=i)
    assert single.texts == mixed.texts
    assert_same_state(cache_format, mixed, single)


def assert_same_state(cache_format: str, one: Running, other: Running) -> None:
    for i, length in enumerate(one.processed):
        states = [
            golden_draft.live(cache_format, running.cache, SLOTS[i], BLOCKS[i], length)
            for running in (one, other)
        ]
        different = [name for name in states[0] if states[0][name] != states[1][name]]
        assert not different, (i, length, different)


def test_sampled_text_is_the_same_in_any_company() -> None:
    settings: dict[str, Any] = {
        "temperatures": [0.0, 0.9],
        "top_ks": [0, 40],
        "top_ps": [1.0, 0.95],
        "seed_low": [0, 11],
        "seed_high": [0, 3],
    }
    mine = {name: values[1:] for name, values in settings.items()}
    both = alone = begin("kvq", **settings)
    num_drafts = [2, 3]
    for _ in range(8):
        both, _, _ = advance("kvq", both, num_drafts, **settings)
        alone, _, _ = advance("kvq", alone, num_drafts, only=1, **mine)
    assert both.texts[1] == alone.texts[1]
    assert both.texts[1][:9] != text_without_drafts("kvq")[1][:9], "it is drawn"
    greedy = both.texts[0][:9]
    assert greedy == text_without_drafts("kvq")[0][:9], "its neighbour is not"


def test_unpacked_results_are_what_was_packed() -> None:
    tokens = np.array([[1, 2, -1], [3, -1, -1]], np.int32)
    drafts = np.array([[4, 5], [6, 7]], np.int32)
    confidences = np.array([[0.5, 0.25], [1.0, 0.0]], np.float32)
    words = np.concatenate([tokens, drafts, confidences.view(np.int32)], axis=1)
    result = SpeculativeResult.unpack(words)
    np.testing.assert_array_equal(result.tokens, tokens)
    np.testing.assert_array_equal(result.drafts, drafts)
    np.testing.assert_array_equal(result.confidences, confidences)


def test_compiled_steps_are_speculative_where_the_cache_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []

    def stands_in(name: str) -> Any:
        def run(*inputs: Any) -> tuple[jax.Array, Any]:
            chosen.append(name)
            return inputs[3], inputs[4]

        return run

    for name in ("run_step", "run_speculative_step"):
        monkeypatch.setattr(steps, name, stands_in(name))
    model, weights = golden_draft.load("noq")
    for has_draft in (False, True):
        layout = CacheLayout(model.config, model.precision, 2, 2, has_draft=has_draft)
        compile_step(model, DECODE, weights, layout.abstract())
    assert chosen == ["run_step", "run_speculative_step"]


def test_parts_that_do_not_fit_are_refused() -> None:
    model, weights = golden_draft.load("noq")
    _, text_only = golden_model.load("noq")
    buffer = jax.ShapeDtypeStruct((buffer_size(DECODE),), jnp.int32)

    def trace(weights: Any, cache: KVCache) -> None:
        run = functools.partial(run_speculative_step, model, DECODE)
        jax.eval_shape(run, weights, buffer, cache)

    with pytest.raises(ValueError, match="no room for drafts"):
        trace(weights, golden_model.layout(model).abstract())
    with pytest.raises(ValueError, match="no draft module; load the part 'draft'"):
        trace(text_only, golden_draft.layout("noq").abstract())


def test_bytes_of_the_released_model() -> None:
    config = ModelConfig.released()
    precision = Precision(jnp.bfloat16, CacheFormat.KVQ)
    plain = CacheLayout(config, precision, 3, 3)
    drafting = CacheLayout(config, precision, 3, 3, has_draft=True)
    assert drafting.bytes_per_block == plain.bytes_per_block
    # Three rings, five drafts with their probabilities and bfloat16 logits, and a length.
    added = 3 * 134 * 528 + 5 * (4 + 4 + 2 * 129280) + 4
    assert drafting.bytes_per_slot - plain.bytes_per_slot == added


@pytest.mark.parametrize(
    ("changed", "message"),
    (
        ({"dspark_block_size": ROLLBACK_MAX}, "dspark_block_size is 6; .* at most 5 drafts"),
        (
            {"num_nextn_predict_layers": 0, "compress_ratios": (0, 0, 2, 2, 2, 2, *(1,) * 6)},
            "this model has no draft module",
        ),
    ),
)
def test_models_that_cannot_draft_get_no_room(changed: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(ModelConfig.tiny(), **changed)
    with pytest.raises(ValueError, match=message):
        CacheLayout(config, Precision(), 3, 3, has_draft=True)
    CacheLayout(config, Precision(), 3, 3)


def test_a_speculative_step_of_the_released_model_traces() -> None:
    config = ModelConfig.released()
    last_class = config.engram_compressed_vocab_size - 1
    classes = np.minimum(np.arange(config.vocab_size), last_class).astype(np.int32)
    precision = Precision(jnp.bfloat16, CacheFormat.KVQ, quantise_activations=True)
    model = Model(config, Topology.of(config), EngramTables.of(config, classes), precision)
    abstract_classes: Any = jax.ShapeDtypeStruct(classes.shape, jnp.int32)
    weights = Weights(abstract_parameters(config, {"text", "draft"}), abstract_classes)
    given = CacheLayout(config, precision, 20_000, 257, has_draft=True).abstract()
    shape = StepShape(num_rows=256, num_tokens=1536, num_blocks=64, samples_every_token=True)
    buffer = jax.ShapeDtypeStruct((buffer_size(shape),), jnp.int32)
    step = functools.partial(run_speculative_step, model, shape)
    words, cache = jax.eval_shape(step, weights, buffer, given)
    assert words.shape == (256, 3 * config.dspark_block_size + 1)
    # The cache can be updated in place only if it comes back as it went in.
    assert jax.tree.structure(cache) == jax.tree.structure(given)
    for after, before in zip(jax.tree.leaves(cache), jax.tree.leaves(given), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
