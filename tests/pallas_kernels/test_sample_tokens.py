"""Goal: draws follow the filtered distribution and depend on seed and position alone.
Method: a float64 oracle of the filters; a chi-square test over thousands of positions; the same
rows drawn alone, in another order and in other company.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from pallas_kernels.cases import Case, find
from pallas_kernels.mosaic import sample_tokens as kernel
from pallas_kernels.reference.sample_tokens import probabilities as probabilities_of_rows
from pallas_kernels.reference.sample_tokens import uniform
from pallas_kernels.selection import INTERPRET
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick, run

sample_tokens = jax.jit(ops.sample_tokens)
VOCAB = 16
NUM_ROWS = 4000


def sample(
    logits: np.ndarray,
    temperature: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
    top_p: float | np.ndarray = 1.0,
    seed: tuple[int, int] | np.ndarray = (1, 2),
    position: int | np.ndarray = 0,
) -> np.ndarray:
    """One token per row; single values stand for every row.

    Rows and vocabulary are filled up to one size, which is compiled once: greedy rows below, and
    tokens of no probability behind.
    """
    m, v = logits.shape
    full = np.pad(logits, ((0, 0), (0, VOCAB - v)), constant_values=-np.inf)

    def column(value: object, dtype: type, shape: tuple[int, ...] = ()) -> jax.Array:
        out = np.zeros((NUM_ROWS, *shape), dtype)
        out[:m] = value
        return jnp.asarray(out)

    out = sample_tokens(
        jnp.asarray(np.pad(full, ((0, NUM_ROWS - m), (0, 0))), jnp.float32),
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(seed, np.uint32, (2,)),
        column(position, np.int32),
    )
    assert out.dtype == jnp.int32
    return np.asarray(out)[:m]


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What is left of one row, in float64."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept = order[: top_k or None]
    p = np.exp((logits[kept] - logits[kept[0]]) / temperature)
    p /= p.sum()
    num_kept = next(n for n in range(1, len(p) + 1) if n == len(p) or p[:n].sum() >= top_p)
    out = np.zeros(len(logits))
    out[kept[:num_kept]] = p[:num_kept] / p[:num_kept].sum()
    return out


def spread(count: int) -> np.ndarray:
    """The same row `count` times, with clear gaps between its values."""
    row = np.random.default_rng(3).permutation(VOCAB) * 0.3
    return np.tile(row, (count, 1))


def test_temperature_zero_takes_the_largest_and_the_lower_of_equals() -> None:
    logits = np.array([[1.0, 5.0, 5.0, 2.0], [7.0, 1.0, 7.0, 7.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(sample(logits, temperature=0.0), [1, 0, 0])
    # Beside rows that draw, and whatever the filters of the row say.
    got = sample(logits, temperature=np.array([0.0, 1.0, 0.0]), top_k=2, top_p=0.1)
    np.testing.assert_array_equal(got[[0, 2]], [1, 0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.5, 6, 0.6)],
)
def test_draws_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    count = NUM_ROWS
    logits = spread(count)
    drawn = sample(logits, temperature, top_k, top_p, position=np.arange(count))
    p = probabilities(logits[0], temperature, top_k, top_p)
    seen = np.bincount(drawn, minlength=VOCAB)
    assert seen[p == 0].sum() == 0
    expected = p[p > 0] * count
    chi_square = ((seen[p > 0] - expected) ** 2 / expected).sum()
    # Five standard deviations above the mean of the distribution.
    freedom = max(len(expected) - 1, 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (seen, expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 0.0), (0, 1e-9), (1, 0.5)])
def test_the_tightest_filters_leave_the_best(top_k: int, top_p: float) -> None:
    logits = spread(50)
    drawn = sample(logits, 2.0, top_k, top_p, position=np.arange(50))
    np.testing.assert_array_equal(drawn, logits.argmax(axis=1))


def test_the_loosest_filters_are_no_filters() -> None:
    logits, positions = spread(200), np.arange(200)
    free = sample(logits, position=positions)
    for top_k in (VOCAB, VOCAB + 5):
        np.testing.assert_array_equal(sample(logits, top_k=top_k, position=positions), free)


def test_top_k_keeps_the_lower_of_equals() -> None:
    logits = np.tile(np.array([1.0, 2.0, 1.0, 1.0]), (200, 1))
    drawn = sample(logits, top_k=2, position=np.arange(200))
    assert set(drawn.tolist()) == {0, 1}


def test_top_p_stops_as_soon_as_its_mass_is_reached() -> None:
    logits = np.tile(np.log([0.5, 0.25, 0.125, 0.125]), (400, 1))
    for top_p, left in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.9, 4)):
        drawn = sample(logits, top_p=top_p, position=np.arange(400))
        assert set(drawn.tolist()) == set(range(left)), top_p


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """Of the best two, 0.5 and 0.25, the first alone has two thirds."""
    logits = np.tile(np.log([0.5, 0.25, 0.125, 0.125]), (200, 1))
    drawn = sample(logits, top_k=2, top_p=0.6, position=np.arange(200))
    assert set(drawn.tolist()) == {0}


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 2e-38])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([[3.0, -7.0, 9.0, 8.9], [-1.0, -2.0, -3.0, -0.5]])
    np.testing.assert_array_equal(sample(logits, temperature), [2, 3])


def test_a_huge_temperature_is_uniform() -> None:
    drawn = sample(spread(3200), 1e30, position=np.arange(3200))
    seen = np.bincount(drawn, minlength=VOCAB)
    assert ((seen - 200) ** 2 / 200).sum() < 15 + 5 * np.sqrt(30)


def test_masked_tokens_are_never_drawn() -> None:
    logits = spread(500)
    logits[:, ::3] = -np.inf
    drawn = sample(logits, 5.0, position=np.arange(500))
    assert set(drawn.tolist()) == {v for v in range(VOCAB) if v % 3}


def test_a_row_is_drawn_alike_in_any_company(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((40, VOCAB))
    seeds = rng.integers(0, 2**32, (40, 2), np.uint64)
    positions = rng.integers(0, 1 << 20, 40)
    temperature = rng.uniform(0.5, 2, 40)
    temperature[::7] = 0.0
    all_at_once = sample(logits, temperature, seed=seeds, position=positions)
    order = rng.permutation(40)
    shuffled = sample(
        logits[order], temperature[order], seed=seeds[order], position=positions[order]
    )
    np.testing.assert_array_equal(shuffled, all_at_once[order])
    for i in (0, 11):
        row = logits[i], temperature[i], 0, 1.0, seeds[i], positions[i]
        dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.uint32, jnp.int32
        alone = sample_tokens(
            *(jnp.asarray(a, dtype)[None] for a, dtype in zip(row, dtypes, strict=True))
        )
        assert alone[0] == all_at_once[i]


def test_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    """Both halves of the seed count, up to their last bits."""
    seeds = [(0, 0), (0, 1), (1, 0), (2**32 - 1, 7), (2**31 - 1, 7)]
    draw = jax.jit(uniform)
    columns = []
    for seed in seeds:
        numbers = draw(np.tile(np.array(seed, np.uint32), (1000, 1)), np.arange(1000))
        columns.append(np.asarray(numbers, np.float64))
    for numbers in columns:
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        assert len(np.unique(numbers)) > 990
        assert abs(numbers.mean() - 0.5) < 5 / np.sqrt(12 * 1000)
    correlation = np.corrcoef(columns)
    assert np.abs(correlation - np.eye(len(seeds))).max() < 5 / np.sqrt(1000)


@TIME_LIMIT
@quick("sample_tokens")
def test_the_kernel_gives_what_the_reference_gives(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row of many kept tokens would keep the interpreter busy for minutes.
    monkeypatch.setattr(kernel, "LISTED", 16)
    check_case(case)


@TIME_LIMIT
def test_the_kernel_proposes_and_accepts_what_the_reference_does(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, one greedy and one with a filter, whose drafts come from rougher logits."""
    monkeypatch.setattr(kernel, "LISTED", 16)
    logits = np.round(16 * rng.standard_normal((2, 256))) / 8
    rough = jnp.asarray(logits + np.round(8 * rng.standard_normal((2, 256))) / 8, jnp.float32)
    kept = (jnp.asarray([0.0, 1.0]), jnp.asarray([0, 6]), jnp.ones(2))
    seed, place = jnp.asarray([[1, 2], [3, 4]], jnp.uint32), jnp.asarray([5, 9])
    asked = (rough, *kept, seed, place - 1, place)
    drafts = run("propose_tokens", "reference", asked, {})
    made = run("propose_tokens", "interpret", asked, {})
    np.testing.assert_array_equal(made[0], drafts[0])
    np.testing.assert_allclose(made[1], drafts[1], rtol=1e-5)
    # Each row has its last known token and one draft.
    of_rows = jnp.asarray(np.repeat(logits, 2, axis=0), jnp.float32)
    row, first, slot = jnp.asarray([0, 0, 1, 1]), jnp.asarray([0, 2]), jnp.arange(2)
    judged = (drafts[0][:, None], drafts[1][:, None], jnp.ones(2, jnp.int32), rough[:, None], slot)
    args = (of_rows, row, first, *judged, *kept, seed, place)
    made, meant = (run("accept_tokens", how, args, {}) for how in ("interpret", "reference"))
    np.testing.assert_array_equal(made, meant)


@TIME_LIMIT
def test_bounds_leave_the_distribution_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw shows one token of a row; this shows all of them, equal ones at the bound among
    them."""
    monkeypatch.setattr(kernel, "LISTED", 16)
    case = next(c for c in find("sample_tokens", "quick") if c.name == "each_filter")
    (logits, *settings, _, _), _ = case.arguments(jax.random.key(7))
    found = jax.jit(lambda *asked: kernel.bounds(*asked, interpret=INTERPRET))(logits, *settings)
    assert np.all(found.is_known)
    expected = np.asarray(probabilities_of_rows(logits, *settings))
    shares = found.shares(logits, jnp.arange(256), settings[0])
    np.testing.assert_allclose(shares[1:], expected[1:], rtol=1e-5, atol=1e-9)
    assert found.best[0] == np.argmax(expected[0])
    # The last of equal logits are cut off somewhere.
    cut = (np.asarray(logits) == np.asarray(found.cutoff)[:, None]) & (expected == 0)
    assert np.any(cut[1:])


def test_the_kernel_refuses_a_vocabulary_of_odd_size() -> None:
    column = jnp.zeros(1, jnp.int32)
    args = (
        jnp.zeros((1, 96)),
        jnp.ones(1),
        column,
        jnp.ones(1),
        jnp.zeros((1, 2), jnp.uint32),
        column,
    )
    with pytest.raises(
        NotImplementedError, match=r"logits are \(1, 96\); expected a multiple of 256"
    ):
        run("sample_tokens", "interpret", args, {})
