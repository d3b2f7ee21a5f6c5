"""Goal: a token of a step finds exactly its own sequence's past, wherever that past lies.
Method: whole sequences are kept aside as plain lists; rings are filled from them position by
position, with NaN in every place that was never written, and each value found is looked up.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.history import TokenHistory
from pallas_kernels.scaled_array import FP8_32, ScaledArray, decode, encode, quantise_dequantise

RING = 7
NUM_SLOTS = 4
ROWS = ((0, 3, 2), (5, 4, 1), (23, 1, 3))
"""(first position, tokens in this step, slot) of each row; two padding tokens follow."""


def history_of(rows: tuple[tuple[int, int, int], ...], num_padding: int) -> TokenHistory:
    position = [start + i for start, count, _ in rows for i in range(count)] + [0] * num_padding
    starts = [start for start, count, _ in rows for _ in range(count)] + [0] * num_padding
    slots = [slot for _, count, slot in rows for _ in range(count)] + [0] * num_padding
    columns = (position, starts, slots, [0] * len(position))
    return TokenHistory(*(jnp.asarray(column, jnp.int32) for column in columns))


def value_at(slot: int, position: int) -> float:
    return 100.0 * slot + position


def ring_and_recent(rows: tuple[tuple[int, int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    ring = np.full((NUM_SLOTS, RING), np.nan, np.float32)
    recent = []
    for start, count, slot in rows:
        for position in range(start):
            ring[slot, position % RING] = value_at(slot, position)
        recent += [value_at(slot, start + i) for i in range(count)]
    return ring, np.array(recent + [np.nan, np.nan], np.float32)


@jax.jit
def jitted_gather(history: TokenHistory, ring: Any, recent: Any, distances: jax.Array) -> Any:
    return history.gather(ring, recent, distances)


def gather(
    history: TokenHistory, ring: np.ndarray, recent: np.ndarray, num_distances: int
) -> tuple[np.ndarray, np.ndarray]:
    distances = jnp.asarray(np.arange(num_distances))
    values, exists = jitted_gather(history, jnp.asarray(ring), jnp.asarray(recent), distances)
    return np.asarray(values), np.asarray(exists)


def test_each_distance_finds_the_token_of_its_own_row() -> None:
    ring, recent = ring_and_recent(ROWS)
    values, exists = gather(history_of(ROWS, num_padding=2), ring, recent, RING + 1)
    t = 0
    for start, count, slot in ROWS:
        for position in range(start, start + count):
            # The ring reaches `RING` positions back from the first token of the row.
            for d in range(min(RING, position - start + RING) + 1):
                assert bool(exists[t, d]) == (position - d >= 0)
                if position - d >= 0:
                    assert values[t, d] == value_at(slot, position - d), (t, d)
            t += 1


def test_padding_tokens_have_only_themselves() -> None:
    ring, recent = ring_and_recent(ROWS)
    _, exists = gather(history_of(ROWS, num_padding=2), ring, recent, 4)
    np.testing.assert_array_equal(exists[-2:], [[True, False, False, False]] * 2)


def test_a_chunk_longer_than_the_ring_finds_its_own_tokens() -> None:
    rows = ((2, 20, 1),)
    ring, recent = ring_and_recent(rows)
    values, exists = gather(history_of(rows, num_padding=2), ring, recent, 6)
    assert bool(exists[4:20].all())
    for t in range(20):
        for d in range(min(6, t + 3)):
            assert values[t, d] == value_at(1, 2 + t - d)


def test_what_was_left_out_on_purpose_does_not_exist() -> None:
    """Neither in the ring nor among tokens of the step that come before it."""
    rows = ((5, 4, 1),)
    ring, recent = ring_and_recent(rows)
    for first_visible in (3, 7):
        history = history_of(rows, num_padding=0)._replace(
            first_visible=jnp.asarray([first_visible] * 4, jnp.int32)
        )
        _, exists = gather(history, ring, recent, 4)
        for t, position in enumerate(range(5, 9)):
            expected = [position - d >= first_visible for d in range(4)]
            assert exists[t].tolist() == expected


def test_wide_values_keep_their_dimensions_and_their_format(rng: np.random.Generator) -> None:
    rows = ((3, 2, 2),)
    past = rng.standard_normal((5, 32)).astype(np.float32)
    ring = np.zeros((NUM_SLOTS, RING, 32), np.float32)
    ring[2, :3] = past[:3]
    history = history_of(rows, num_padding=0)
    plain, _ = gather(history, ring, past[3:], 3)
    assert plain.shape == (2, 3, 32)
    np.testing.assert_array_equal(plain[1], past[[4, 3, 2]])

    @jax.jit
    def packed(ring: jax.Array, recent: jax.Array) -> ScaledArray:
        # Distances known when tracing may come as a numpy array.
        return history.gather(encode(ring, FP8_32), encode(recent, FP8_32), np.arange(3))[0]

    found = packed(jnp.asarray(ring), jnp.asarray(past[3:]))
    assert found.format is FP8_32
    rounded = jax.jit(quantise_dequantise, static_argnums=1)(jnp.asarray(plain), FP8_32)
    np.testing.assert_array_equal(jax.jit(decode)(found), rounded)
