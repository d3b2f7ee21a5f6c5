"""Goal: drafts change how fast text comes and never which text. Method: thousands of sequences over
a small vocabulary, drafted from one table of transitions and verified against another, several
rounds long: chi-square of what comes out against the target's own transitions. Beside it exact
cases: greedy rows, no drafts, equal and disjoint distributions, company, wrong calls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops

VOCAB, DRAFTS, ROWS, FEW = 6, 3, 12000, 400
TARGET = np.random.default_rng(1).normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + np.random.default_rng(2).normal(size=(VOCAB, VOCAB)).astype(np.float32)
"""Logits of the next token after each token; the draft knows the target's roughly."""

sample_tokens = jax.jit(ops.sample_tokens)
propose_tokens = jax.jit(ops.propose_tokens)
accept_tokens = jax.jit(ops.accept_tokens)


class Settings(NamedTuple):
    """How all rows are drawn."""

    temperature: float
    top_k: int
    top_p: float

    def columns(self, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        return (
            jnp.full(num_rows, self.temperature, jnp.float32),
            jnp.full(num_rows, self.top_k, jnp.int32),
            jnp.full(num_rows, self.top_p, jnp.float32),
        )

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """Rows of `logits` [M, V] after the filters, in float64."""
        out = np.zeros(logits.shape)
        for row, values in zip(out, logits.astype(np.float64), strict=True):
            order = sorted(range(len(values)), key=lambda v: (-values[v], v))
            kept = order[: self.top_k or None]
            p = np.exp((values[kept] - values[kept[0]]) / self.temperature)
            p /= p.sum()
            num_kept = min(len(p), 1 + int(np.sum(np.cumsum(p) < self.top_p)))
            row[kept[:num_kept]] = p[:num_kept] / p[:num_kept].sum()
        return out


PLAIN, FILTERED = Settings(1.0, 0, 1.0), Settings(0.8, 4, 0.9)


class Drafted(NamedTuple):
    """Drafts of every row and where they came from."""

    tokens: jax.Array
    probability: jax.Array
    logits: jax.Array


def seeds(num_rows: int) -> jax.Array:
    numbers = np.random.default_rng(7).integers(0, 2**32, (num_rows, 2), np.uint64)
    return jnp.asarray(numbers, jnp.uint32)


def propose(table: np.ndarray, anchors: jax.Array, at: jax.Array, settings: Settings) -> Drafted:
    """Drafts after the tokens `anchors` that stand at the positions `at`."""
    token, results = anchors, []
    num_rows = len(anchors)
    for number in range(DRAFTS):
        logits = jnp.asarray(table)[token]
        columns = (*settings.columns(num_rows), seeds(num_rows))
        token, probability = propose_tokens(logits, *columns, at, at + 1 + number)
        results.append((token, probability, logits))
    return Drafted(*(jnp.stack(parts, axis=1) for parts in zip(*results, strict=True)))


def verify(
    table: np.ndarray,
    anchors: jax.Array,
    at: jax.Array,
    drafted: Drafted,
    num_drafts: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts and the token after them; every row has its anchor and all its drafts."""
    num_rows = len(anchors)
    inputs = jnp.concatenate([anchors[:, None], drafted.tokens], axis=1).reshape(-1)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return accept_tokens(
        jnp.asarray(table)[inputs],
        jnp.repeat(rows, DRAFTS + 1),
        rows * (DRAFTS + 1),
        drafted.tokens,
        drafted.probability,
        num_drafts,
        drafted.logits,
        rows,
        *settings.columns(num_rows),
        seeds(num_rows),
        at + 1,
    )


def continue_text(settings: Settings, num_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `num_rounds` tokens of every row after token 0 at position 10, and how many drafts
    the first round accepted.

    The schedule has a bias on purpose: whether a position is verified depends on what was drafted
    for it in an earlier round, as it may where the confidences of that round count.
    """
    rows, width = np.arange(ROWS), num_rounds * (DRAFTS + 1) + 1
    text, earlier = np.zeros((ROWS, width), np.int32), np.full((ROWS, width), -1)
    used, counts = np.ones(ROWS, np.int32), []
    for _ in range(num_rounds):
        anchors, at = jnp.asarray(text[rows, used - 1]), jnp.asarray(used + 9)
        drafted = propose(DRAFT, anchors, at, settings)
        num_drafts = np.where(earlier[rows, used] == 1, 0, DRAFTS).astype(np.int32)
        counts_now, following = verify(
            TARGET, anchors, at, drafted, jnp.asarray(num_drafts), settings
        )
        num_accepted = np.asarray(counts_now)
        for number in range(DRAFTS):
            tokens = np.asarray(drafted.tokens[:, number])
            earlier[rows, used + number] = tokens
            text[rows, used + number] = np.where(number < num_accepted, tokens, 0)
        used = used + num_accepted
        text[rows, used] = following
        used = used + 1
        counts.append(num_accepted)
    return text[:, 1 : num_rounds + 1], counts[0]


def assert_follows(seen: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square of counts against expected counts, with five standard deviations of room."""
    assert seen[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    seen, expected = seen[expected > 0], expected[expected > 0]
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (chi_square, freedom)


@pytest.mark.parametrize("settings", (PLAIN, FILTERED))
def test_text_follows_the_target_whatever_the_drafts(settings: Settings) -> None:
    text, first_accepted = continue_text(settings, num_rounds=3)
    q, p = settings.distribution(TARGET), settings.distribution(DRAFT)
    joint = q[0][:, None, None] * q[:, :, None] * q[None, :, :]
    cells = np.ravel_multi_index(tuple(text.T), joint.shape)
    assert_follows(np.bincount(cells, minlength=joint.size), joint.reshape(-1) * ROWS)
    # And no more is refused than has to be.
    expected = np.minimum(q[0], p[0]).sum()
    assert 0.2 < expected < 0.9
    error = np.sqrt(expected * (1 - expected) / ROWS)
    assert abs(np.mean(first_accepted > 0) - expected) < 5 * error


@pytest.mark.parametrize("judges_illegal", (True, False))
def test_masked_text_follows_its_target_only_if_the_first_illegal_draft_is_judged(
    judges_illegal: bool,
) -> None:
    """Drafts know nothing of a mask. To leave the first illegal one out looks harmless, since it
    can never be accepted; but its place is then drawn as if nothing had been drafted for it.
    """
    is_legal = np.arange(VOCAB) % 3 > 0
    masked = np.where(is_legal, TARGET, -np.inf).astype(np.float32)
    anchors, at = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, 10, jnp.int32)
    drafted = propose(DRAFT, anchors, at, PLAIN)
    tokens = np.asarray(drafted.tokens)
    num_legal = np.cumprod(is_legal[tokens], axis=1).sum(axis=1)
    num_drafts = np.minimum(num_legal + judges_illegal, DRAFTS).astype(np.int32)
    results = verify(masked, anchors, at, drafted, jnp.asarray(num_drafts), PLAIN)
    accepted, following = map(np.asarray, results)
    assert (accepted <= num_legal).all()
    seen = np.bincount(np.where(accepted > 0, tokens[:, 0], following), minlength=VOCAB)
    expected = PLAIN.distribution(masked)[0] * ROWS
    if judges_illegal:
        assert_follows(seen, expected)
    else:
        with pytest.raises(AssertionError):
            assert_follows(seen, expected)


def small_case(num_rows: int, settings: Settings, table: np.ndarray) -> Any:
    """Anchors, positions and drafts of a few rows."""
    anchors = jnp.arange(num_rows, dtype=jnp.int32) % VOCAB
    at = jnp.arange(num_rows, dtype=jnp.int32) * 3 + 5
    return anchors, at, propose(table, anchors, at, settings)


def test_without_drafts_the_next_token_is_the_sampled_one() -> None:
    for settings in (PLAIN, FILTERED, Settings(0.0, 0, 1.0)):
        anchors, at, drafted = small_case(FEW, settings, DRAFT)
        none = jnp.zeros(FEW, jnp.int32)
        accepted, following = verify(TARGET, anchors, at, drafted, none, settings)
        sampled = sample_tokens(
            jnp.asarray(TARGET)[anchors], *settings.columns(FEW), seeds(FEW), at + 1
        )
        np.testing.assert_array_equal(accepted, 0)
        np.testing.assert_array_equal(following, sampled)


def test_drafts_of_the_target_itself_are_all_accepted() -> None:
    settings = Settings(1.3, 5, 0.95)
    anchors, at, drafted = small_case(FEW, settings, TARGET)
    for limit in (1, DRAFTS):
        limits = jnp.full(FEW, limit, jnp.int32)
        accepted, following = verify(TARGET, anchors, at, drafted, limits, settings)
        np.testing.assert_array_equal(accepted, limit)
        # And the token after them is the one that is sampled at its position without drafts.
        logits = jnp.asarray(TARGET)[drafted.tokens[:, limit - 1]]
        sampled = sample_tokens(logits, *settings.columns(FEW), seeds(FEW), at + 1 + limit)
        np.testing.assert_array_equal(following, sampled)


def test_a_refusal_without_any_residual_still_draws_a_token() -> None:
    """Rounding can refuse a draft where both distributions are equal; here it is made to."""
    anchors, at, drafted = small_case(FEW, FILTERED, TARGET)
    refused = drafted._replace(probability=jnp.full((FEW, DRAFTS), 1e9, jnp.float32))
    all_drafts = jnp.full(FEW, DRAFTS, jnp.int32)
    accepted, following = verify(TARGET, anchors, at, refused, all_drafts, FILTERED)
    np.testing.assert_array_equal(accepted, 0)
    assert np.all(FILTERED.distribution(TARGET)[np.asarray(anchors), np.asarray(following)] > 0)


def test_drafts_outside_the_filters_are_never_accepted() -> None:
    worst = np.argmin(TARGET, axis=1)
    only_worst = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    only_worst[np.arange(VOCAB), worst] = 0.0
    settings = Settings(2.0, VOCAB - 1, 1.0)
    anchors, at, drafted = small_case(FEW, settings, only_worst)
    np.testing.assert_array_equal(drafted.probability, 1.0)
    all_drafts = jnp.full(FEW, DRAFTS, jnp.int32)
    accepted, following = verify(TARGET, anchors, at, drafted, all_drafts, settings)
    np.testing.assert_array_equal(accepted, 0)
    assert not np.any(np.asarray(following) == worst[np.asarray(anchors)])


def test_greedy_accepts_while_the_draft_is_the_best_token() -> None:
    greedy, best = Settings(0.0, 0, 1.0), np.argmax(TARGET, axis=1)
    anchors, at, _ = small_case(DRAFTS + 1, greedy, DRAFT)
    right = np.zeros((DRAFTS + 1, DRAFTS), np.int32)
    token = np.asarray(anchors)
    for number in range(DRAFTS):
        right[:, number] = token = best[token]
    # Row i is wrong from draft i on, and right again after it, which must not count.
    tokens = right.copy()
    for row in range(DRAFTS):
        tokens[row, row] = (right[row, row] + 1) % VOCAB
    drafted = Drafted(
        jnp.asarray(tokens),
        jnp.ones(tokens.shape, jnp.float32),
        jnp.zeros((*tokens.shape, VOCAB), jnp.float32),
    )
    all_drafts = jnp.full(DRAFTS + 1, DRAFTS, jnp.int32)
    accepted, following = verify(TARGET, anchors, at, drafted, all_drafts, greedy)
    np.testing.assert_array_equal(accepted, np.arange(DRAFTS + 1))
    before = np.concatenate([np.asarray(anchors)[:, None], right], axis=1)
    expected = best[before[np.arange(DRAFTS + 1), np.arange(DRAFTS + 1)]]
    np.testing.assert_array_equal(following, expected)
    # A greedy row beside one that draws says the same.
    mixed = jnp.asarray([0.0, 0.0, 0.0, 1.0], jnp.float32)
    rows = jnp.arange(DRAFTS + 1, dtype=jnp.int32)
    columns = (mixed, *greedy.columns(DRAFTS + 1)[1:], seeds(DRAFTS + 1), at + 1)
    inputs = np.concatenate([np.asarray(anchors)[:, None], tokens], axis=1).reshape(-1)
    accepted, _ = accept_tokens(
        jnp.asarray(TARGET)[inputs],
        jnp.repeat(rows, DRAFTS + 1),
        rows * (DRAFTS + 1),
        drafted.tokens,
        drafted.probability,
        all_drafts,
        jnp.asarray(np.log(np.eye(VOCAB) + 1e-30)[tokens], jnp.float32),
        rows,
        *columns,
    )
    np.testing.assert_array_equal(accepted[:DRAFTS], np.arange(DRAFTS))


def test_a_row_is_judged_alike_in_any_company() -> None:
    anchors, at, drafted = small_case(FEW, FILTERED, DRAFT)
    all_drafts = jnp.full(FEW, DRAFTS, jnp.int32)
    accepted, following = verify(TARGET, anchors, at, drafted, all_drafts, FILTERED)
    assert 0 < np.sum(np.asarray(accepted) == 0) < FEW
    # Alone, in another slot, with rows of other lengths before it and padding behind it.
    for row in range(0, FEW, 40):
        inputs = jnp.concatenate([jnp.asarray([3]), anchors[row, None], drafted.tokens[row]])
        logits = jnp.asarray(TARGET)[jnp.pad(inputs, (0, 2))]
        slot = jnp.asarray([2, 1, 0])
        pool = jnp.stack([drafted.logits[0], drafted.logits[row], drafted.logits[0]])
        three = jnp.asarray([0, row, 0])
        alone, after = accept_tokens(
            logits,
            jnp.asarray([0, 1, 1, 1, 1, 2, 2]),
            jnp.asarray([0, 1, 5]),
            drafted.tokens[three],
            drafted.probability[three],
            jnp.asarray([0, DRAFTS, 0]),
            pool,
            slot,
            *FILTERED.columns(3),
            seeds(FEW)[three],
            at[three] + 1,
        )
        assert (int(alone[1]), int(after[1])) == (int(accepted[row]), int(following[row]))


def test_drafts_use_other_random_numbers_than_the_text() -> None:
    logits = jnp.broadcast_to(jnp.asarray(TARGET)[0], (FEW, VOCAB))
    at = jnp.arange(FEW, dtype=jnp.int32)
    columns = (*PLAIN.columns(FEW), jnp.zeros((FEW, 2), jnp.uint32))
    sampled = sample_tokens(logits, *columns, at + 1)
    draws = [propose_tokens(logits, *columns, at - back, at + 1)[0] for back in (0, 1)]
    chance = np.sum(PLAIN.distribution(TARGET)[0] ** 2)
    for a, b in ((sampled, draws[0]), (sampled, draws[1]), (draws[0], draws[1])):
        assert abs(np.mean(np.asarray(a) == np.asarray(b)) - chance) < 5 * 0.5 / np.sqrt(FEW)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    (
        ("logits", (4,), r"\[T, V\]"),
        ("row", (5,), r"\[8\]"),
        ("first", (3,), r"\[2\]"),
        ("draft_probability", (2, 2), r"\[2, 3\]"),
        ("num_drafts", (1,), r"\[2\]"),
        ("draft_logits", (2, 3, 5), r"\[S, 3, 6\]"),
        ("slot", (3,), r"\[2\]"),
        ("temperature", (8,), r"\[2\]"),
        ("seed", (2,), r"\[2, 2\]"),
        ("position", (8,), r"\[2\]"),
    ),
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], expected: str) -> None:
    shapes = {
        "logits": (8, VOCAB),
        "row": (8,),
        "first": (2,),
        "draft_tokens": (2, DRAFTS),
        "draft_probability": (2, DRAFTS),
        "num_drafts": (2,),
        "draft_logits": (2, DRAFTS, VOCAB),
        "slot": (2,),
        "temperature": (2,),
        "top_k": (2,),
        "top_p": (2,),
        "seed": (2, 2),
        "position": (2,),
    }
    arrays: dict[str, Any] = {
        key: jnp.zeros(shape if key == name else s) for key, s in shapes.items()
    }
    with pytest.raises(ValueError, match=f"{name} is .*expected {expected}"):
        ops.accept_tokens(**arrays)
