"""Goal: a token attends to its window and its selected entries under one softmax with a sink.
Method: a float64 oracle that walks over whole sequences, kept aside as plain lists; whatever the
token must not see, in rings, blocks and other rows, holds NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from pallas_kernels.cases import Case
from pallas_kernels.history import TokenHistory
from pallas_kernels.mosaic.sparse_attention import window_rows
from pallas_kernels.scaled_array import FP8_32, NVFP4_16, Format, decode, encode
from tests.pallas_kernels.interpreted import TIME_LIMIT, check_case, quick

H, D, WINDOW, RING = 2, 32, 4, 6
SCALE = 0.3
SINK = np.array([0.5, -1.0], np.float32)
ROWS = ((0, 1, 2), (9, 12, 1), (2, 3, 3))
"""(first position, tokens in this step, slot); the second chunk is longer than the ring."""

sparse_attention = jax.jit(ops.sparse_attention, static_argnames=("window", "scale"))


class Sequences:
    """Window entries of whole sequences, by slot and position, and a pool of entries."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.latents = {
            slot: rng.standard_normal((start + count, D)).astype(np.float32)
            for start, count, slot in ROWS
        }
        self.tokens = [
            (slot, start, position)
            for start, count, slot in ROWS
            for position in range(start, start + count)
        ]
        self.ring = np.full((4, RING, D), np.nan, np.float32)
        for start, _, slot in ROWS:
            for position in range(start):
                self.ring[slot, position % RING] = self.latents[slot][position]
        self.recent = np.stack([self.latents[slot][p] for slot, _, p in self.tokens])
        self.q = rng.standard_normal((len(self.tokens), H, D)).astype(np.float32)
        # Entries 3 and 10 were never written.
        self.entries = rng.standard_normal((4, 3, D)).astype(np.float32)
        self.entries.reshape(-1, D)[[3, 10]] = np.nan
        good = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9, 11, -1, -1, -1])
        self.index = np.stack([rng.permutation(good)[:5] for _ in self.tokens]).astype(np.int32)
        self.index[0] = -1
        slot, start, position = (
            jnp.asarray([token[i] for token in self.tokens], jnp.int32) for i in range(3)
        )
        first_visible = jnp.asarray([0] * len(self.tokens), jnp.int32)
        self.history = TokenHistory(position, start, slot, first_visible)

    def run(self, ring: Any, recent: Any, entries: Any, **changes: Any) -> np.ndarray:
        index = None if entries is None else jnp.asarray(self.index)
        arguments = {"sink": jnp.asarray(SINK), "window": WINDOW, "scale": SCALE} | changes
        sink = arguments.pop("sink")
        out = sparse_attention(
            jnp.asarray(self.q), ring, recent, self.history, entries, index, sink, **arguments
        )
        assert out.dtype == jnp.float32
        return np.asarray(out)

    def oracle(self, t: int, *, with_entries: bool, latents: Any, entries: Any) -> np.ndarray:
        slot, _, position = self.tokens[t]
        first = max(0, position - WINDOW + 1)
        keys = [latents[slot][p].astype(np.float64) for p in range(first, position + 1)]
        if with_entries:
            keys += [entries.reshape(-1, D)[i].astype(np.float64) for i in self.index[t] if i >= 0]
        out = np.zeros((H, D))
        for h in range(H):
            logits = np.array([SCALE * float(self.q[t, h] @ key) for key in keys])
            weights = np.exp(logits)
            out[h] = weights @ np.stack(keys) / (weights.sum() + np.exp(SINK[h]))
        return out


@pytest.fixture
def sequences(rng: np.random.Generator) -> Sequences:
    return Sequences(rng)


@pytest.mark.parametrize("with_entries", [False, True])
def test_window_and_selected_entries(sequences: Sequences, with_entries: bool) -> None:
    s = sequences
    entries = jnp.asarray(s.entries) if with_entries else None
    out = s.run(jnp.asarray(s.ring), jnp.asarray(s.recent), entries)
    for t in range(len(s.tokens)):
        expected = s.oracle(t, with_entries=with_entries, latents=s.latents, entries=s.entries)
        np.testing.assert_allclose(out[t], expected, rtol=1e-5, atol=1e-5)


def test_quantised_rings_and_entries(sequences: Sequences) -> None:
    s = sequences

    def rounded(x: np.ndarray, form: Format) -> tuple[Any, np.ndarray]:
        packed = jax.jit(encode, static_argnums=1)(jnp.asarray(x), form)
        return packed, np.asarray(jax.jit(decode)(packed))

    ring, _ = rounded(s.ring, FP8_32)
    recent, _ = rounded(s.recent, FP8_32)
    entries, widened = rounded(s.entries, NVFP4_16)
    out = s.run(ring, recent, entries)
    latents = {slot: rounded(x, FP8_32)[1] for slot, x in s.latents.items()}
    for t in range(len(s.tokens)):
        expected = s.oracle(t, with_entries=True, latents=latents, entries=widened)
        np.testing.assert_allclose(out[t], expected, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow(sequences: Sequences) -> None:
    """With a steep softmax each head copies its best entry."""
    s = sequences
    out = s.run(jnp.asarray(s.ring), jnp.asarray(s.recent), None, scale=3e4)
    slot, _, position = s.tokens[5]
    keys = s.latents[slot][position - WINDOW + 1 : position + 1]
    for h in range(H):
        dots = keys @ s.q[5, h]
        expected = keys[dots.argmax()] if dots.max() > 0 else np.zeros(D)
        np.testing.assert_allclose(out[5, h], expected, rtol=1e-5)


def test_the_sink_takes_its_share(sequences: Sequences) -> None:
    s = sequences
    args = jnp.asarray(s.ring), jnp.asarray(s.recent), None
    heavy = s.run(*args, sink=jnp.asarray([200.0, -200.0]))
    np.testing.assert_array_equal(heavy[:, 0], np.zeros_like(heavy[:, 0]))
    # A sink far below every logit takes nothing: the first token copies its only entry.
    np.testing.assert_allclose(heavy[0, 1], s.latents[2][0], rtol=1e-5)


def test_a_token_without_any_entry_gives_zero(sequences: Sequences) -> None:
    s = sequences
    out = s.run(jnp.asarray(s.ring), jnp.asarray(s.recent), jnp.asarray(s.entries), window=0)
    np.testing.assert_array_equal(out[0], np.zeros((H, D)))
    assert np.isfinite(out).all()
    assert (out[1] != 0).any()


def test_low_precision_queries_are_widened(sequences: Sequences) -> None:
    s = sequences
    narrow = jnp.asarray(s.q, jnp.bfloat16)
    s.q = np.asarray(narrow, np.float32)
    expected = s.run(jnp.asarray(s.ring), jnp.asarray(s.recent), None)
    got = sparse_attention(
        narrow,
        jnp.asarray(s.ring),
        jnp.asarray(s.recent),
        s.history,
        None,
        None,
        jnp.asarray(SINK),
        window=WINDOW,
        scale=SCALE,
    )
    np.testing.assert_array_equal(got, expected)


@TIME_LIMIT
@quick("sparse_attention")
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check_case(case)


def test_the_list_of_a_window_names_ring_rows_and_rows_of_this_step() -> None:
    # One sequence at positions 7 and 8 in slot 2, one at 0 in slot 1, with rings of 5.
    position, start, slot, first = (
        jnp.asarray(column, jnp.int32) for column in ([7, 8, 0], [7, 7, 0], [2, 2, 1], [5, 5, 0])
    )
    rows = window_rows(TokenHistory(position, start, slot, first), 3, 5, 4)
    np.testing.assert_array_equal(rows, [[15, 11, 10, -1], [16, 15, 11, 10], [17, -1, -1, -1]])


def test_the_kernel_refuses_what_it_does_not_cover() -> None:
    history = TokenHistory(*[jnp.zeros(1, jnp.int32)] * 4)
    pools = (jnp.zeros((2, 6, 512)), jnp.zeros((1, 512)))
    call: Any = {"entries": None, "entry_index": None, "sink": jnp.zeros(64), "window": 4}
    for dtype, reason in (
        (jnp.float32, "q is float32; the tensor core takes bfloat16"),
        (jnp.bfloat16, "ring is unquantised; expected fp8_32"),
    ):
        q = jnp.zeros((1, 64, 512), dtype)
        with pytest.raises(NotImplementedError, match=reason):
            ops.sparse_attention(q, *pools, history, scale=1.0, implementation="interpret", **call)
