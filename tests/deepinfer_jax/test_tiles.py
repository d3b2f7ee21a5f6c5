"""Goal: a step cut into tiles is the same step, and the program of a tile knows nothing of it.

Method: tiles of a batch by hand; functions mapped over tiles against the function itself. That the
model's values are the same bits in any company is tested end to end.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import steps, tiles
from deepinfer_jax.batch import Replay, StepShape, TokenView
from tests.deepinfer_jax.golden_model import batch_arrays, to_batch

SHAPE = StepShape(num_rows=3, num_tokens=12, num_blocks=2, samples_every_token=False)
# Five tokens from position 7 on in slot 1, then two from position 0 on in slot 2.
BATCH = to_batch(
    SHAPE,
    batch_arrays(SHAPE, [(np.arange(1, 6), 7, 1, [1, 2]), (np.array([8, 9]), 0, 2, [3, 4])]),
)


def test_tiles_hold_every_token_at_its_place() -> None:
    whole = TokenView.of(BATCH)
    parts = [TokenView.of(tiles.tile_of(BATCH, start, 4)) for start in (0, 4, 8)]
    for name in ("row", "is_real"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))
    for name in ("position", "slot"):
        joined = np.concatenate([getattr(part.history, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole.history, name))
    # The second tile goes on with the first row, and begins the second one.
    second = parts[1]
    assert second.history.row_start.tolist() == [11, 0, 0, 0]
    assert second.row_end.tolist() == [12, 2, 2, 0]
    assert tiles.tile_of(BATCH, 4, 4).num_tokens.tolist() == [1, 2, 0]
    assert tiles.tile_of(BATCH, 4, 4).token_ids.tolist() == [5, 8, 9, 0]


def test_steps_that_cannot_be_cut_into_tiles_are_refused() -> None:
    model: Any = SimpleNamespace(tile_tokens=5)
    nothing: Any = None
    with pytest.raises(ValueError, match="12 tokens; expected a multiple of the tile of 5"):
        tiles.forward(model, nothing, nothing, BATCH)
    shape = dataclasses.replace(SHAPE, replay=Replay())
    with pytest.raises(ValueError, match="prefill_r3_t12_b2_replay0 replays"):
        steps._layers(model, shape, nothing, nothing, BATCH, None, None)


@pytest.mark.parametrize(("num_used", "num_computed"), [(0, 0), (1, 4), (8, 8), (9, 10)])
def test_a_mapped_function_runs_for_the_tiles_in_use(num_used: int, num_computed: int) -> None:
    arrays = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.arange(10)}

    def function(some: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        assert some["x"].shape == (4, 2)
        return some["x"].sum(axis=1), some["y"] + 1

    sums, numbers = tiles.map_tiles(function, arrays, 4, jnp.int32(num_used))
    expected = np.where(np.arange(10) < num_computed, np.arange(10) * 4.0 + 1, 0)
    np.testing.assert_array_equal(sums, expected)
    assert numbers.tolist() == [n + 1 if n < num_computed else 0 for n in range(10)]


def test_the_number_of_tiles_does_not_change_a_product(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(32, 96)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(96, 40)), jnp.float32)

    def product(some: jax.Array) -> jax.Array:
        return jnp.dot(some, weight, precision="highest")

    @jax.jit
    def run(x: jax.Array, num_used: int) -> jax.Array:
        return tiles.map_tiles(product, x, 8, jnp.int32(num_used))

    every = np.asarray(run(x, 32))
    np.testing.assert_allclose(every, x @ weight, rtol=1e-4, atol=1e-4)
    order = rng.permutation(32)
    np.testing.assert_array_equal(np.asarray(run(x[order], 32)), every[order])
    # One row alone in a step of another size.
    np.testing.assert_array_equal(np.asarray(run(x[5:6], 1))[0], every[5])
