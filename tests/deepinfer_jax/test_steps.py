"""Goal: a sequence gives the same answer however its tokens are cut into steps and whoever shares
them. Method: prompts in chunks, then token by token through the paged cache, alone and in a mixed
batch with scattered blocks and reused slots, against the golden logits and greedy tokens.
"""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import StepShape, pack
from deepinfer_jax.cache import KVCache
from deepinfer_jax.steps import compile_programs, compile_step
from tests.deepinfer_jax import golden_model

SHAPE = golden_model.PASS_SHAPE


class Sequence:
    """Feeds one prompt, chunk by chunk, and collects the logits of its tokens."""

    def __init__(self, ids: np.ndarray, slot: int, blocks: list[int], chunks: list[int]) -> None:
        self.ids, self.slot, self.blocks = ids, slot, blocks
        self.cuts = [int(c) for c in np.minimum(np.cumsum([0, *chunks]), len(ids))]
        self.cuts += range(self.cuts[-1] + 1, len(ids) + 1)
        self.logits: list[np.ndarray] = []

    def next_row(self) -> tuple[np.ndarray, int, int, list[int]] | None:
        """The next chunk; None when the prompt is used up."""
        if len(self.cuts) < 2:
            return None
        start, end = self.cuts.pop(0), self.cuts[0]
        return self.ids[start:end], start, self.slot, self.blocks


def run(cache_format: str, sequences: list[Sequence], cache: KVCache | None = None) -> KVCache:
    """Runs all sequences together, one chunk each a step, as far as they fit."""
    model, weights = golden_model.load(cache_format)
    step = golden_model.compiled_pass(cache_format, SHAPE)
    used = golden_model.layout(model).zeros() if cache is None else cache
    while True:
        turns = [(s, s.next_row()) for s in sequences]
        rows = [(s, row) for s, row in turns if row is not None]
        if not rows:
            return used
        arrays = golden_model.batch_arrays(SHAPE, [row for _, row in rows])
        out, _, used = step(weights, golden_model.to_batch(SHAPE, arrays), used)
        at = 0
        for sequence, row in rows:
            sequence.logits += list(np.asarray(out)[at : at + len(row[0])])
            at += len(row[0])


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_chunks_and_single_tokens_equal_the_whole_prompt(golden: Path, cache_format: str) -> None:
    data = np.load(golden / "forward.npz")
    ids = data["ids_130"]
    # Odd chunks end inside compression groups; 40 is longer than the window ring.
    alone = Sequence(ids, 1, [4, 2], [24, 1, 17, 40, 3, 1, 1, 1, 22])
    run(cache_format, [alone])
    _assert_golden(alone, data, 130, cache_format)


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_mixed_batch_on_a_used_cache(golden: Path, cache_format: str) -> None:
    data = np.load(golden / "forward.npz")
    used = run(cache_format, [Sequence(data["ids_130"][::-1].copy(), 3, [5, 9], [20])])
    lengths = (7, 24, 77, 130)
    # Slots and blocks that the first sequence left behind are handed out again.
    company = [
        Sequence(data["ids_7"], 3, [9], [3]),
        Sequence(data["ids_24"], 1, [5], [6, 1, 6]),
        Sequence(data["ids_77"], 4, [7], [5, 6, 6, 1, 40]),
        Sequence(data["ids_130"], 2, [2, 11], [1, 6, 6, 5, 30, 1, 1, 1, 50]),
    ]
    run(cache_format, company, used)
    for sequence, length in zip(company, lengths, strict=True):
        _assert_golden(sequence, data, length, cache_format)


@pytest.mark.parametrize("cache_format", ("noq", "kvq"))
def test_compiled_steps_give_the_golden_greedy_tokens(golden: Path, cache_format: str) -> None:
    data = np.load(golden / "greedy.npz")
    prompt, expected = data["prompt"], data[f"tokens_{cache_format}"]
    model, weights = golden_model.load(cache_format)
    cache = golden_model.layout(model).zeros()
    prefill = StepShape(num_rows=2, num_tokens=16, num_blocks=1, samples_every_token=False)
    decode = StepShape(num_rows=2, num_tokens=2, num_blocks=1, samples_every_token=True)
    progress: list[tuple[int, int]] = []
    programs = {
        shape.name: partial(compile_step, model, shape, weights, cache)
        for shape in (prefill, decode)
    }
    steps = compile_programs(programs, lambda *p: progress.append(p))
    assert progress == [(1, 2), (2, 2)]
    given = cache.rings[0]
    # The prompt in two chunks as the second row, behind a row of other company.
    company = (prompt[:1], 0, 2, [3])
    for start, end in ((0, 14), (14, 24)):
        rows = [company, (prompt[start:end], start, 1, [1])]
        tokens, cache = _call(steps, prefill, rows, weights, cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "the cache is donated"
    received = [int(tokens[1])]
    while len(received) < len(expected):
        row = (np.array(received[-1:]), 24 + len(received) - 1, 1, [1])
        tokens, cache = _call(steps, decode, [row], weights, cache)
        received.append(int(tokens[0]))
    np.testing.assert_array_equal(received, expected)


def test_programs_are_compiled_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)
    open_now: list[str] = []
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def watch(name: str) -> Iterator[None]:
        open_now.append(name)
        yield
        seen.append(sorted(open_now))

    # Each waits for the other one, so one after the other would never end.
    programs = {"a": both.wait, "b": both.wait, "c": lambda: "compiled"}
    compiled = compile_programs(programs, watch=watch)
    assert compiled.keys() == {"a", "b", "c"} and compiled["c"] == "compiled"
    assert seen[0] == ["a", "b"]


def _call(
    steps: Any, shape: StepShape, rows: Any, weights: Any, cache: KVCache
) -> tuple[np.ndarray, KVCache]:
    buffer = jnp.asarray(pack(golden_model.batch_arrays(shape, rows), shape))
    tokens, cache = steps[shape.name](weights, buffer, cache)
    return np.asarray(tokens), cache


def _assert_golden(sequence: Sequence, data: Any, length: int, cache_format: str) -> None:
    atol = 5e-3 if cache_format == "kvq" and length > 77 else 1e-4
    expected = data[f"logits_{cache_format}_{length}"]
    np.testing.assert_allclose(np.array(sequence.logits), expected, rtol=0, atol=atol)
