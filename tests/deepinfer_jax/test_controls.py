"""Goal: each control changes the logits of its own rows as documented, and a step that asks for
nothing leaves them alone.

Method: a decode step with drafts, padding and shared slots, against a transcription in numpy that
walks tokens one by one; then single controls whose effect can be worked out by hand.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import StepBatch, StepShape, pack
from deepinfer_jax.controls import (
    BIASES_MAX,
    COUNT_MAX,
    IN_PROMPT,
    Controls,
    adjusted,
    fields,
    mask_words,
    set_counts,
    settings_size,
)
from tests.deepinfer_jax.golden_model import batch_arrays

VOCAB = 77
SHAPE = StepShape(num_rows=3, num_tokens=9, num_blocks=1, samples_every_token=True)
PREFILL = StepShape(num_rows=2, num_tokens=9, num_blocks=1, samples_every_token=False)
NEUTRAL = {
    "adjusts": 1,
    "min_ps": 0,
    "repetition_penalties": 1,
    "next_tokens": -1,
    "bias_tokens": VOCAB,
}


def settings_words(shape: StepShape, **values: Any) -> np.ndarray:
    """Words of settings that change nothing but what is given."""
    words = []
    for name, (dims, dtype) in fields(shape).items():
        array = np.full(dims, NEUTRAL.get(name, 0), dtype)
        if name in values:
            array[:] = values[name]
        words.append(array.reshape(-1).view(np.int32))
    return np.concatenate(words)


def pack_masks(legal: np.ndarray) -> np.ndarray:
    """[M, W] int32 of [M, V] bool."""
    padded = np.zeros((len(legal), 32 * mask_words(legal.shape[1])), bool)
    padded[:, : legal.shape[1]] = legal
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def controls_of(
    shape: StepShape,
    legal: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    **values: Any,
) -> Controls:
    if legal is None:
        legal = np.ones((shape.num_samples, VOCAB), bool)
    if counts is None:
        counts = np.zeros((5, VOCAB), np.uint16)
    words = settings_words(shape, **values)
    return Controls(jnp.asarray(words), jnp.asarray(pack_masks(legal)), jnp.asarray(counts))


@functools.cache
def _program(shape: StepShape) -> Any:
    def run(
        logits: jax.Array, buffer: jax.Array, index: jax.Array, controls: Controls
    ) -> jax.Array:
        return adjusted(logits, StepBatch.unpack(buffer, shape), index, shape, controls)

    return jax.jit(run)


def adjust(
    shape: StepShape, logits: np.ndarray, arrays: dict[str, np.ndarray], controls: Controls
) -> np.ndarray:
    last = np.maximum(np.cumsum(arrays["num_tokens"]) - 1, 0)
    index = np.arange(shape.num_tokens) if shape.samples_every_token else last
    program = _program(shape)
    return np.asarray(program(logits, pack(arrays, shape), index, controls))


def rows_of(*lengths: int) -> list[tuple[np.ndarray, int, int, list[int]]]:
    """Rows of tokens 10, 11, ... in slots 4, 3, 2, at scattered positions."""
    ids = np.arange(10, 10 + sum(lengths)) % VOCAB
    cuts = np.cumsum([0, *lengths])
    return [(ids[cuts[i] : cuts[i + 1]], 20 * (i + 1), 4 - i, [1 + i]) for i in range(len(lengths))]


def expected_row(
    x: np.ndarray,
    counts: np.ndarray,
    legal: np.ndarray,
    setting: dict[str, float],
    bias: dict[int, float],
) -> np.ndarray:
    """One row, token by token, in float64."""
    x = x.astype(np.float64).copy()
    for token, value in bias.items():
        x[token] += value
    for token in range(len(x)):
        in_output, in_prompt = int(counts[token]) % IN_PROMPT, counts[token] >= IN_PROMPT
        if in_output or in_prompt:
            r = setting["repetition"]
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= setting["frequency"] * in_output + setting["presence"] * (in_output > 0)
    x[~legal] = -np.inf
    if setting["min_p"] and setting["temperature"]:
        weight = np.exp((x - x.max()) / setting["temperature"])
        x[weight < setting["min_p"]] = -np.inf
    return x


def test_everything_at_once(rng: np.random.Generator) -> None:
    rows = rows_of(4, 1, 2)
    # A draft that repeats, and one that the prompt holds.
    rows[0][0][:] = [10, 11, 11, 12]
    arrays = batch_arrays(SHAPE, rows)
    arrays["temperatures"][:] = [0.7, 1.5, 0.0]
    counts = np.zeros((5, VOCAB), np.uint16)
    counts[:, 12], counts[:, 30], counts[2:, 40] = IN_PROMPT, IN_PROMPT + 3, 2
    legal = rng.random((SHAPE.num_samples, VOCAB)) < 0.8
    bias_tokens = np.full((3, BIASES_MAX), VOCAB)
    bias_values = np.zeros((3, BIASES_MAX))
    bias_tokens[0, :2], bias_values[0, :2] = [5, 30], [3.0, -50.0]
    bias_tokens[2, :1], bias_values[2, :1] = [5], [-1.5]
    columns: dict[str, Any] = {
        "min_ps": [0.05, 0.0, 0.3],
        "repetition_penalties": [1.3, 0.8, 1.0],
        "presence_penalties": [0.5, 0.0, -1.0],
        "frequency_penalties": [0.25, 1.0, 0.0],
    }
    logits = rng.normal(size=(SHAPE.num_samples, VOCAB)).astype(np.float32) * 3
    columns |= {"bias_tokens": bias_tokens, "bias_values": bias_values}
    found = adjust(SHAPE, logits, arrays, controls_of(SHAPE, legal, counts, **columns))
    at = 0
    for row, (ids, _, slot, _) in enumerate(rows):
        setting = {
            "temperature": float(arrays["temperatures"][row]),
            "min_p": columns["min_ps"][row],
            "repetition": columns["repetition_penalties"][row],
            "presence": columns["presence_penalties"][row],
            "frequency": columns["frequency_penalties"][row],
        }
        bias = dict(zip(bias_tokens[row].tolist(), bias_values[row].tolist(), strict=True))
        bias.pop(VOCAB)
        known = counts[slot].copy()
        for number, token in enumerate(ids.tolist()):
            known[token] += number > 0  # The first token of a row is in the counts already.
            wanted = expected_row(logits[at], known, legal[at], setting, bias)
            np.testing.assert_allclose(found[at], wanted, rtol=1e-5, atol=1e-5)
            at += 1
    assert np.isinf(found).any() and np.isfinite(found).any(axis=1).all()


def test_a_step_that_asks_for_nothing_is_left_alone(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(SHAPE.num_samples, VOCAB)).astype(np.float32)
    nothing = Controls(
        jnp.zeros(settings_size(SHAPE), jnp.int32),
        jnp.zeros((SHAPE.num_samples, mask_words(VOCAB)), jnp.int32),
        jnp.full((5, VOCAB), 7, jnp.uint16),
    )
    found = adjust(SHAPE, logits, batch_arrays(SHAPE, rows_of(3, 2, 1)), nothing)
    np.testing.assert_array_equal(found, logits)


def test_a_prompt_is_not_taken_for_drafts(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(2, VOCAB)).astype(np.float32)
    controls = controls_of(PREFILL, frequency_penalties=1.0)
    found = adjust(PREFILL, logits, batch_arrays(PREFILL, rows_of(5, 3)), controls)
    np.testing.assert_array_equal(found, logits)


@pytest.mark.parametrize("count", [1, 2, COUNT_MAX])
def test_penalties_of_one_token(count: int) -> None:
    logits = np.full((2, VOCAB), -1.0, np.float32)
    logits[:, 3] = 2.0
    counts = np.zeros((5, VOCAB), np.uint16)
    counts[4, 3], counts[4, 6] = count, IN_PROMPT
    arrays = batch_arrays(PREFILL, rows_of(2, 2))
    found = adjust(
        PREFILL, logits, arrays, controls_of(PREFILL, None, counts, frequency_penalties=0.5)
    )
    assert found[0, 3] == 2 - 0.5 * count and found[0, 6] == -1 and (found[1] == logits[1]).all()
    found = adjust(
        PREFILL, logits, arrays, controls_of(PREFILL, None, counts, presence_penalties=0.5)
    )
    assert found[0, 3] == 1.5 and found[0, 6] == -1
    found = adjust(
        PREFILL, logits, arrays, controls_of(PREFILL, None, counts, repetition_penalties=2)
    )
    assert found[0, 3] == 1 and found[0, 6] == -2 and found[0, 5] == -1


def test_min_p_goes_by_the_share_of_the_best() -> None:
    logits = np.full((2, VOCAB), -30.0, np.float32)
    logits[:, :3] = np.log([0.5, 0.26, 0.24])
    arrays = batch_arrays(PREFILL, rows_of(1, 1))
    arrays["temperatures"][:] = [1.0, 0.0]
    found = adjust(PREFILL, logits, arrays, controls_of(PREFILL, min_ps=0.5))
    assert np.isfinite(found[0]).tolist() == [True, True] + [False] * (VOCAB - 2)
    assert np.isfinite(found[1]).all(), "a greedy row needs no floor"
    # At a higher temperature the others come closer to the best.
    arrays["temperatures"][:] = 2.0
    found = adjust(PREFILL, logits, arrays, controls_of(PREFILL, min_ps=0.5))
    assert np.isfinite(found[0]).sum() == 3


def test_setting_counts() -> None:
    counts = jnp.asarray(np.arange(12, dtype=np.uint16).reshape(4, 3))
    past = jnp.full(2, 4)  # After the last slot: nothing.
    cleared, slots = jnp.array([1, 4]), jnp.array([2, 1, 4])
    tokens, values = jnp.array([0, 2, 1]), jnp.array([IN_PROMPT + 1, 5, 9])
    found = np.asarray(set_counts(counts, cleared, slots, tokens, values))
    assert found.tolist() == [[0, 1, 2], [0, 0, 5], [IN_PROMPT + 1, 7, 8], [9, 10, 11]]
    same = set_counts(counts, past, past, past * 0, past)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(counts))
