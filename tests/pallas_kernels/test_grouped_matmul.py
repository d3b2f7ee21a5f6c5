"""Goal: routed experts give the weighted sum of their clamped gated products.
Method: golden gates at two clamps; a float64 oracle that visits one token and one expert at a
time; tokens that must not matter carry NaN.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from pallas_kernels.cases import Case
from pallas_kernels.mosaic.grouped_matmul import group_rows
from pallas_kernels.reference.grouped_matmul import swiglu
from pallas_kernels.scaled_array import (
    FP4_ROW32,
    FP8_32,
    Format,
    decode,
    encode,
    quantise_dequantise,
)
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick

E, F, D = 5, 64, 32
grouped_matmul = jax.jit(ops.grouped_matmul, static_argnames=("limit", "activation_format"))
rounded = jax.jit(quantise_dequantise, static_argnums=1)


def oracle(
    x: np.ndarray,
    index: np.ndarray,
    weight: np.ndarray,
    experts: tuple[np.ndarray, ...],
    limit: float,
    form: Format | None = None,
) -> np.ndarray:
    w1, w3, w2 = (w.astype(np.float64) for w in experts)
    x = np.asarray(rounded(jnp.asarray(x), form), np.float64)
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for e, g in zip(index[t], weight[t], strict=True):
            gate = np.minimum(w1[e] @ x[t], limit)
            up = np.clip(w3[e] @ x[t], -limit, limit)
            # The weight comes before the last product, where it is still rounded.
            hidden = g * gate / (1 + np.exp(-gate)) * up
            hidden = np.asarray(rounded(jnp.asarray(hidden, jnp.float32)[None], form)[0])
            out[t] += w2[e] @ hidden.astype(np.float64)
    return out


@pytest.fixture
def experts(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    return tuple(jnp.asarray(rng.standard_normal(s) * 0.4, jnp.float32) for s in shapes)


def routes(rng: np.random.Generator, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    index = np.stack([rng.permutation(E)[:2] for _ in range(num_tokens)]).astype(np.int32)
    return index, rng.random((num_tokens, 2)).astype(np.float32)


def test_golden_gates_at_two_clamps(golden: Path) -> None:
    with np.load(golden / "ops.npz") as data:
        gate, up = np.split(data["swiglu_in_gate_up"], 2, axis=1)
        for limit in (2, 10):
            got = swiglu(jnp.asarray(gate), jnp.asarray(up), limit)
            np.testing.assert_allclose(got, data[f"swiglu_out_clamp{limit}"], rtol=1e-5, atol=1e-7)


def test_the_gate_is_clamped_from_above_only() -> None:
    got = swiglu(jnp.asarray([50.0, -50.0, -3.0]), jnp.asarray([50.0, 50.0, -50.0]), 2.0)
    silu = [2 / (1 + np.exp(-2)), -50 / (1 + np.exp(50)), -3 / (1 + np.exp(3))]
    np.testing.assert_allclose(got, np.array(silu) * [2, 2, -2], rtol=1e-5)


@pytest.mark.parametrize("limit", [0.7, 10.0])
def test_each_token_sums_its_experts(
    limit: float, experts: tuple[jax.Array, ...], rng: np.random.Generator
) -> None:
    x = rng.standard_normal((6, D)).astype(np.float32)
    index, weight = routes(rng, 6)
    got = grouped_matmul(jnp.asarray(x), index, weight, *experts, limit=limit)
    assert got.dtype == jnp.float32
    expected = oracle(x, index, weight, tuple(np.asarray(w) for w in experts), limit)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_packed_weights_and_rounded_inputs(
    experts: tuple[jax.Array, ...], rng: np.random.Generator
) -> None:
    x = jnp.asarray(rng.standard_normal((6, D)) * 3, jnp.bfloat16)
    index, weight = routes(rng, 6)
    packed: Any = [jax.jit(encode, static_argnums=1)(w, FP4_ROW32) for w in experts]
    got = grouped_matmul(x, index, weight, *packed, limit=2.0, activation_format=FP8_32)
    widened = tuple(np.asarray(jax.jit(decode)(w)) for w in packed)
    x = np.asarray(x).astype(np.float32)
    expected = oracle(x, index, weight, widened, 2.0, FP8_32)
    # Float32 sums in another order may move a hidden value to the neighbouring FP8 code.
    np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(np.mean(np.abs(got - expected)), 0, atol=1e-3)
    assert np.abs(oracle(x, index, weight, widened, 2.0) - expected).max() > 0.05


def test_weight_zero_switches_a_pair_off(
    experts: tuple[jax.Array, ...], rng: np.random.Generator
) -> None:
    x = jnp.asarray(rng.standard_normal((6, D)), jnp.float32)
    index, weight = routes(rng, 6)
    weight[1] = 0.0
    weight[2, 0] = 0.0
    got = grouped_matmul(x, index, weight, *experts, limit=2.0)
    np.testing.assert_array_equal(got[1], np.zeros(D))
    other = index.copy()
    other[2, 0] = next(e for e in range(E) if e not in index[2])
    np.testing.assert_array_equal(got[2], grouped_matmul(x, other, weight, *experts, limit=2.0)[2])


def test_a_token_does_not_depend_on_its_company(
    experts: tuple[jax.Array, ...], rng: np.random.Generator
) -> None:
    x = rng.standard_normal((6, D)).astype(np.float32)
    index, weight = routes(rng, 6)
    expected = grouped_matmul(jnp.asarray(x), index, weight, *experts, limit=2.0)
    x[[0, 5]] = np.nan
    got = grouped_matmul(jnp.asarray(x), index, weight, *experts, limit=2.0)
    np.testing.assert_array_equal(got[1:5], expected[1:5])


def test_no_tokens(experts: tuple[jax.Array, ...]) -> None:
    index, weight = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)
    out = grouped_matmul(jnp.zeros((0, D)), index, weight, *experts, limit=2.0)
    assert out.shape == (0, D)


@TIME_LIMIT
@quick("grouped_matmul")
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check_case(case)


def test_rows_are_sorted_into_tiles_of_one_expert() -> None:
    index = jnp.array([[2, 0], [2, 1], [0, 2], [1, 2]], jnp.int32)
    weight = jnp.array([[1.0, 2.0], [3.0, 0.0], [4.0, 5.0], [0.0, 6.0]])
    groups = jax.tree.map(np.asarray, group_rows(index, weight, 4, 2))
    # Expert 0 has two rows, expert 1 none that is on, expert 2 has four.
    np.testing.assert_array_equal(groups.tile_expert[:3], [0, 2, 2])
    assert np.all(groups.tile_expert[3:] == -1)
    np.testing.assert_array_equal(groups.token[:6], [0, 2, 0, 1, 2, 3])
    np.testing.assert_array_equal(groups.route[:6], [2.0, 4.0, 1.0, 3.0, 5.0, 6.0])
    num_rows = groups.token.shape[0]
    assert num_rows == 2 * groups.tile_expert.shape[0]
    off = num_rows
    np.testing.assert_array_equal(groups.place, [2, 0, 3, off, 1, 4, off, 5])


@pytest.mark.parametrize("tile_rows", [8, 32])
def test_there_is_a_tile_for_every_row_however_tokens_choose(
    tile_rows: int, rng: np.random.Generator
) -> None:
    for num_tokens, num_experts, num_chosen in ((1, 7, 7), (40, 3, 1), (9, 12, 4)):
        index = np.stack([rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
        weight = jnp.ones(index.shape)
        groups = group_rows(jnp.asarray(index, jnp.int32), weight, num_experts, tile_rows)
        place = np.asarray(groups.place)
        assert len(set(place)) == place.size and place.max() < groups.token.shape[0]
        owner = np.asarray(groups.tile_expert)[place // tile_rows]
        np.testing.assert_array_equal(owner, index.reshape(-1))
        np.testing.assert_array_equal(
            np.asarray(groups.token)[place], np.arange(place.size) // num_chosen
        )
