"""Goal: each token gets its best entries and no other, under every limit on what it may see.
Method: golden candidate blocks; a float64 oracle that scores and sorts one token at a time; keys
are small integers, so scores are exact and ties frequent; unused places hold NaN.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, ops
from pallas_kernels.reference import index_topk as reference
from pallas_kernels.scaled_array import MXFP4_32, decode, encode
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick

PER_BLOCK = 3
TABLES = np.array([[4, 1, 6, 2], [5, 3, 0, 0]], np.int32)
"""Row 0 may hold twelve entries; row 1 owns two blocks, padded with block 0."""
ROW = np.array([0, 0, 0, 1, 1, 0, 1], np.int32)
NUM_VISIBLE = np.array([12, 7, 1, 6, 4, 0, 5], np.int32)

index_topk = jax.jit(
    ops.index_topk, static_argnames=("k", "candidate_block_size", "num_candidate_blocks")
)


def padded(numbers: list[int], size: int) -> list[int]:
    return sorted(numbers) + [-1] * (size - len(numbers))


def best(scores: dict[int, float], k: int) -> list[int]:
    return padded(sorted(scores, key=lambda n: (-scores[n], n))[:k], k)


class Case:
    """Random queries of seven tokens over the blocks of two rows."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.q = rng.integers(-3, 4, (7, 2, 4)).astype(np.float32)
        self.weight = rng.integers(-2, 4, (7, 2)).astype(np.float32)
        self.keys = np.full((7, PER_BLOCK, 4), np.nan, np.float32)
        for row, entries in enumerate((12, 6)):
            for n in range(entries):
                place = TABLES[row, n // PER_BLOCK], n % PER_BLOCK
                self.keys[place] = rng.integers(-3, 4, 4)

    def run(self, candidates: np.ndarray | None = None, **sizes: int) -> Any:
        inside = None if candidates is None else jnp.asarray(candidates)
        found, made = index_topk(jnp.asarray(self.q), *self.others(), inside, **sizes)
        assert found.dtype == jnp.int32
        return np.asarray(found).tolist(), None if made is None else np.asarray(made).tolist()

    def others(self) -> tuple[jax.Array, ...]:
        """Arguments after the queries."""
        arrays = self.weight, self.keys, TABLES, ROW, NUM_VISIBLE
        return tuple(jnp.asarray(a) for a in arrays)

    def scores(self, t: int) -> dict[int, float]:
        """Score of every visible entry of a token."""
        out = {}
        for n in range(NUM_VISIBLE[t]):
            key = self.keys[TABLES[ROW[t], n // PER_BLOCK], n % PER_BLOCK]
            out[n] = sum(
                float(w) * max(0.0, float(q @ key))
                for q, w in zip(self.q[t], self.weight[t], strict=True)
            )
        return out


@pytest.fixture
def case(rng: np.random.Generator) -> Case:
    return Case(rng)


@pytest.mark.parametrize("k", [1, 4, 12, 20])
def test_the_best_entries_in_ascending_order(case: Case, k: int) -> None:
    """Including a token that sees one entry, one that sees none, and more places than entries."""
    found, made = case.run(k=k)
    assert found == [best(case.scores(t), k) for t in range(7)]
    assert made is None


def test_equal_scores_keep_the_lower_index(case: Case) -> None:
    case.weight[:] = 0.0
    found, _ = case.run(k=3)
    assert found[0] == [0, 1, 2]
    assert found[2] == [0, -1, -1]


def test_negative_scores_are_chosen_before_nothing(case: Case) -> None:
    case.weight[:] = -1.0
    found, _ = case.run(k=20)
    assert found == [padded(list(range(n)), 20) for n in NUM_VISIBLE]


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
def test_reindexing_stays_inside_candidates(case: Case, block_size: int) -> None:
    candidates = np.array([[0, -1], [1, -1], [0, 1], [-1, -1], [0, -1], [0, 1], [2, 1]], np.int32)
    found, _ = case.run(candidates, k=4, candidate_block_size=block_size)
    for t in range(7):
        inside = {n: s for n, s in case.scores(t).items() if n // block_size in candidates[t]}
        assert found[t] == best(inside, 4), t


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("num_blocks", [1, 2, 9])
def test_candidates_are_the_best_blocks_and_the_newest(
    case: Case, block_size: int, num_blocks: int
) -> None:
    found, made = case.run(k=4, candidate_block_size=block_size, num_candidate_blocks=num_blocks)
    for t in range(7):
        scores = case.scores(t)
        blocks: dict[int, float] = {}
        for n, score in scores.items():
            blocks[n // block_size] = max(score, blocks.get(n // block_size, -np.inf))
        if blocks:
            blocks[max(blocks)] = np.inf
        assert made[t] == best(blocks, num_blocks), t
        # The token's own entries are not restricted to its candidates.
        assert found[t] == best(scores, 4), t


def test_golden_candidates(golden: Path) -> None:
    with np.load(golden / "ops.npz") as data:

        @jax.jit
        def apply(scores: jax.Array, num_visible: jax.Array) -> jax.Array:
            return reference.in_blocks(reference.best_blocks(scores, num_visible, 4, 3), 30, 4)

        inside = np.asarray(apply(data["cand_logits"], data["cand_lens"]))
        visible = np.arange(30) < data["cand_lens"][:, None]
        np.testing.assert_array_equal(inside & visible, data["cand_mask_b4_k3"])


def test_quantised_queries_and_keys_score_by_their_values(rng: np.random.Generator) -> None:
    pack = jax.jit(encode, static_argnums=1)
    q = pack(jnp.asarray(rng.standard_normal((7, 2, 32)), jnp.float32), MXFP4_32)
    keys = pack(jnp.asarray(rng.standard_normal((7, PER_BLOCK, 32)), jnp.float32), MXFP4_32)
    weight = jnp.asarray(rng.random((7, 2)), jnp.float32)
    others = jnp.asarray(TABLES), jnp.asarray(ROW), jnp.asarray(NUM_VISIBLE)
    packed, _ = index_topk(q, weight, keys, *others, k=4)
    widen = jax.jit(decode)
    plain, _ = index_topk(widen(q), weight, widen(keys), *others, k=4)
    np.testing.assert_array_equal(packed, plain)


def test_a_large_step_is_scored_in_parts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tokens of 24 products each, three at a time, the last one alone."""
    monkeypatch.setattr(reference, "_SCORES_MAX", 3 * 24)
    # A size that no other test uses, since a compiled function would keep the old limit.
    found, _ = case.run(k=5)
    assert found == [best(case.scores(t), 5) for t in range(7)]
    program = jax.make_jaxpr(lambda q: index_topk(q, *case.others(), k=6))(case.q)
    assert "scan" in str(program)


@TIME_LIMIT
@quick("index_topk")
def test_the_kernel_gives_what_the_reference_gives(case: cases.Case) -> None:
    check_case(case)


def test_no_tokens_choose_nothing() -> None:
    case = next(c for c in cases.find("index_topk", "quick") if c.name == "no_tokens")
    args, sizes = case.arguments(jax.random.key(0))
    entries, made = ops.index_topk(*args, implementation="reference", **sizes)
    assert made is not None
    assert entries.shape == (0, 5) and made.shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"k": 600}, "600 entries and 3 blocks are wanted"),
        ({"candidate_block_size": 4}, "candidate blocks hold 4 entries; expected 8"),
    ],
)
def test_the_kernel_refuses_what_it_does_not_cover(changes: dict[str, int], reason: str) -> None:
    case = next(c for c in cases.find("index_topk", "quick") if c.name == "two_rows")
    args, sizes = case.abstract()
    with pytest.raises(NotImplementedError, match=reason):
        kernel = functools.partial(ops.index_topk, implementation="interpret", **sizes | changes)
        jax.eval_shape(kernel, *args)
