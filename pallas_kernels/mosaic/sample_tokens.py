"""Choice of the next token: what the filters leave of each row is found by a GPU kernel.

    grid (rows); block: one row of logits, 2048 at a time by TMA
      largest logit and its place; sum of exp((l - largest) / temperature), rescaled as it grows
      if the row is filtered: what may still be among the best 1024 goes to a list in shared memory
    and from that list the bound of the row: the smallest logit that stays, the last place at which
    an equal one does, and the mass of all that stay

With its bound known, a row's tokens have weights that need nothing but their own logit. Integer
weights are summed over parts of 256 tokens, the part that the random number falls into is found,
and only that one is looked at again.

Bound: logits read once by the kernel, once for the sums of parts, and 256 of each row.

*Why the list and not a sort*: the tokens that filters leave are few. Rows of which more than 1024
stay (a flat distribution cut by top_p alone) are found out, and then the reference decides.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ordered_list import (
    NOTHING,
    List,
    append,
    how_many,
    keep_best,
    kth_best,
    ordered,
)
from pallas_kernels.mosaic.widen import Layout
from pallas_kernels.reference import sample_tokens as reference
from pallas_kernels.targets import Target

LISTED = 1024
"""Most tokens that the filters may leave of a row."""
COLUMNS, ROWS = 32, 64
_CHUNK = COLUMNS * ROWS
_STAGES = 2
PART = 8 * COLUMNS
"""Tokens whose weights are summed; a vocabulary is a multiple of it."""
_LEAST_SHARE = 1e-30
"""The best token stays even if none of the mass is asked for."""
_COLDEST = 1e-30
"""Below this temperature nothing but the largest logit has any weight."""
_LOWEST = float(np.finfo(np.float32).min)


class Bounds(NamedTuple):
    """What the filters leave of each row [M].

    Attributes:
        best: place of the largest logit, the lower of equal ones.
        largest: that logit.
        cutoff: smallest logit that stays.
        last: last place at which a logit equal to `cutoff` stays.
        mass: sum of exp((l - largest) / temperature) of those that stay.
        is_known: false if more than `LISTED` stay; then the three before mean nothing.
    """

    best: jax.Array
    largest: jax.Array
    cutoff: jax.Array
    last: jax.Array
    mass: jax.Array
    is_known: jax.Array

    def shares(self, logits: jax.Array, place: jax.Array, temperature: jax.Array) -> jax.Array:
        """Probabilities of `logits` [M, N] that stand at `place` [M, N] or [N]."""
        cutoff, last = self.cutoff[:, None], self.last[:, None]
        stays = (logits > cutoff) | ((logits == cutoff) & (place <= last))
        scaled = (logits - self.largest[:, None]) / _divisor(temperature)[:, None]
        return jnp.where(stays, jnp.exp(scaled), 0.0) / self.mass[:, None]


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    target: Target,
    interpret: Any,
) -> jax.Array:
    """See `pallas_kernels.ops.sample_tokens`.

    Raises:
        NotImplementedError: the vocabulary is no multiple of 256.
    """
    del target
    found = bounds(logits, temperature, top_k, top_p, interpret)
    return lax.cond(
        jnp.all(found.is_known),
        lambda: _draw(logits, temperature, found, reference.random_bits(seed, position)),
        lambda: reference.sample_tokens(logits, temperature, top_k, top_p, seed, position),
    )


def propose_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    anchor: jax.Array,
    position: jax.Array,
    *,
    target: Target,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ops.propose_tokens`, and `sample_tokens` for what is not covered."""
    del target
    found = bounds(logits, temperature, top_k, top_p, interpret)

    def known() -> tuple[jax.Array, jax.Array]:
        token = _draw(logits, temperature, found, reference.draft_bits(seed, anchor, position))[
            :, None
        ]
        chosen = jnp.take_along_axis(logits, token, axis=1).astype(jnp.float32)
        share = found.shares(chosen, token, temperature)[:, 0]
        return token[:, 0], jnp.where(temperature > 0, share, 1.0)

    return lax.cond(
        jnp.all(found.is_known),
        known,
        lambda: reference.propose_tokens(logits, temperature, top_k, top_p, seed, anchor, position),
    )


def accept_tokens(*args: jax.Array, target: Target, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ops.accept_tokens`, and `sample_tokens` for what is not covered."""
    del target

    def probabilities(
        logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
    ) -> jax.Array:
        found = bounds(logits, temperature, top_k, top_p, interpret)
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)

        def known() -> jax.Array:
            share = found.shares(logits.astype(jnp.float32), place, temperature)
            certain = (place == found.best[:, None]).astype(jnp.float32)
            return jnp.where(temperature[:, None] > 0, share, certain)

        return lax.cond(
            jnp.all(found.is_known),
            known,
            lambda: reference.probabilities(logits, temperature, top_k, top_p),
        )

    return reference.accept_tokens(*args, probabilities=probabilities)


def bounds(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, interpret: Any
) -> Bounds:
    """What the filters leave of each row of `logits` [M, V], float32 or bfloat16."""
    num_rows, vocab_size = logits.shape
    if vocab_size % PART:
        raise NotImplementedError(f"logits are {logits.shape}; expected a multiple of {PART}")
    if not num_rows:
        none, no_mass = jnp.zeros(0, jnp.int32), jnp.zeros(0)
        return Bounds(none, no_mass, no_mass, none, no_mass, jnp.zeros(0, bool))
    # A row that is not filtered asks for all tokens, and one of temperature 0 for none.
    is_drawn = temperature > 0
    wanted = jnp.where(is_drawn & (top_k > 0), jnp.minimum(top_k, vocab_size), 0)
    share = jnp.where(is_drawn & (top_p < 1), jnp.maximum(top_p, _LEAST_SHARE), 2.0)
    kernel = _kernel(num_rows, vocab_size, logits.dtype, interpret)
    best, last, is_known, cutoff, largest, mass = kernel(
        logits.reshape(num_rows, -1, COLUMNS),
        (1 / jnp.maximum(_divisor(temperature), _COLDEST)).astype(jnp.float32),
        wanted.astype(jnp.int32),
        share.astype(jnp.float32),
    )
    return Bounds(best, largest, _value(cutoff), last, mass, is_known > 0)


def _divisor(temperature: jax.Array) -> jax.Array:
    return jnp.where(temperature > 0, temperature, 1.0)


def _draw(logits: jax.Array, temperature: jax.Array, found: Bounds, bits: jax.Array) -> jax.Array:
    """[M] int32 tokens; those of the reference's integer distribution, summed part by part."""
    num_rows, vocab_size = logits.shape
    parts = logits.reshape(num_rows, vocab_size // PART, PART)
    place = jnp.arange(vocab_size, dtype=jnp.int32)
    counts = reference.counts(found.shares(logits.astype(jnp.float32), place, temperature))
    up_to = jnp.cumsum(
        jnp.sum(counts.reshape(parts.shape), axis=2, dtype=jnp.uint32), axis=1, dtype=jnp.uint32
    )
    aim = reference.high_product(bits, up_to[:, -1])
    part = jnp.sum(up_to <= aim[:, None], axis=1, dtype=jnp.int32)
    part = jnp.minimum(part, parts.shape[1] - 1)[:, None]
    before = jnp.where(part > 0, jnp.take_along_axis(up_to, jnp.maximum(part - 1, 0), axis=1), 0)
    inside = jnp.take_along_axis(parts, part[:, :, None], axis=1)[:, 0].astype(jnp.float32)
    place = part * PART + jnp.arange(PART, dtype=jnp.int32)
    within = jnp.cumsum(
        reference.counts(found.shares(inside, place, temperature)), axis=1, dtype=jnp.uint32
    )
    # Never past the last token with a weight, even if a weight were rounded otherwise here.
    aim = jnp.minimum(aim[:, None] - before, within[:, -1:] - 1)
    drawn = part[:, 0] * PART + jnp.sum(within <= aim, axis=1, dtype=jnp.int32)
    return jnp.where(temperature > 0, drawn, found.best)


def _kernel(num_rows: int, vocab_size: int, dtype: Any, interpret: Any) -> Any:
    num_lines = vocab_size // COLUMNS
    num_chunks = -(-num_lines // ROWS)

    def entry(*refs: Any) -> None:
        def scoped(logits_smem: Any, score_smem: Any, ready: Any, memory: tuple[Any, ...]) -> None:
            logits_gmem, inverse_gmem, wanted_gmem, share_gmem, *outs = refs
            row = lax.axis_index("row")
            inverse, wanted, share = inverse_gmem[row], wanted_gmem[row], share_gmem[row]
            best_of = List(*memory)
            best_of.clear_from(jnp.int32(0))

            def copy(chunk: jax.Array) -> None:
                at = lax.rem(chunk, _STAGES)
                lines = logits_gmem.at[row, pl.ds(chunk * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(lines, logits_smem.at[at], ready.at[at])

            def take(chunk: jax.Array, state: Any) -> Any:
                at = lax.rem(chunk, _STAGES)
                plgpu.barrier_wait(ready.at[at])
                logits = plgpu.load(logits_smem.at[at], layout=Layout.WGMMA, optimized=False)
                logits = logits.astype(jnp.float32)
                line, column = (_index(axis) for axis in range(2))
                logits = jnp.where(chunk * ROWS + line < num_lines, logits, -jnp.inf)
                plgpu.commit_smem()

                @pl.when(chunk + _STAGES < num_chunks)
                def _() -> None:
                    copy(chunk + _STAGES)

                best, largest, mass, *listed = state
                mass = _laid_out(mass)
                first = chunk * _CHUNK
                higher = jnp.max(jnp.max(logits, axis=1))
                place = jnp.where(logits == higher, line * COLUMNS + column, _CHUNK)
                best = jnp.where(higher > largest, first - jnp.max(jnp.max(-place, axis=1)), best)
                higher = jnp.maximum(largest, higher)
                shrink = jnp.exp(_lines((largest - higher) * inverse))
                mass = mass * shrink + jnp.sum(jnp.exp((logits - higher) * inverse), axis=1)

                def list_them() -> Any:
                    is_there = chunk * ROWS + line < num_lines
                    scores = jnp.where(is_there, ordered(logits), NOTHING)
                    plgpu.store(score_smem, scores, optimized=False)
                    plgpu.commit_smem()
                    return append(best_of, tuple(listed), score_smem, first, LISTED, lambda n: n)

                is_filtered = jnp.logical_or(wanted > 0, share < 1)
                listed = lax.cond(is_filtered, list_them, lambda: tuple(listed))
                return best, higher, _laid_out(mass), *listed

            for chunk in range(min(_STAGES, num_chunks)):
                copy(jnp.int32(chunk))
            start = (jnp.int32(0), jnp.float32(_LOWEST), _lines(jnp.float32(0)))
            start += (jnp.int32(0), jnp.int32(NOTHING))
            best, largest, mass, num_listed, _ = lax.fori_loop(0, num_chunks, take, start)
            mass = jnp.sum(mass)

            def bound() -> Any:
                @pl.when(num_listed > LISTED)
                def _() -> None:
                    keep_best(best_of, LISTED)

                return _bound(best_of, largest, inverse, wanted, share, mass, vocab_size)

            def no_bound() -> Any:
                return jnp.int32(vocab_size), jnp.int32(1), jnp.int32(NOTHING), mass

            last, is_known, cutoff, mass = lax.cond(num_listed > 0, bound, no_bound)
            made = (best, last, is_known, cutoff, largest, mass)
            for out_gmem, value in zip(outs, made, strict=True):
                out_gmem[row] = value

        pl.run_scoped(
            scoped,
            plgpu.SMEM((_STAGES, ROWS, COLUMNS), dtype),
            plgpu.SMEM((ROWS, COLUMNS), jnp.int32),
            plgpu.Barrier(num_barriers=_STAGES),
            List.memory(2 * COLUMNS),
        )

    integers = [jax.ShapeDtypeStruct((num_rows,), jnp.int32)] * 4
    floats = [jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * 2
    return plgpu.kernel(
        entry,
        out_type=integers + floats,
        grid=(num_rows,),
        grid_names=("row",),
        interpret=interpret,
    )


def _bound(
    best_of: List,
    largest: jax.Array,
    inverse: jax.Array,
    wanted: jax.Array,
    share: jax.Array,
    mass: jax.Array,
    vocab_size: int,
) -> Any:
    """Last place, whether the bound is known, cutoff as an ordered integer, and mass that stays."""
    scores = best_of.load()
    is_in = scores > NOTHING
    weight = jnp.where(is_in, jnp.exp((_value(scores) - largest) * inverse), 0.0)

    def split(bar: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """How many are above the bar, their mass, and the weight of one at the bar."""
        above = scores > bar
        at_bar = jnp.max(jnp.max(jnp.where(scores == bar, weight, 0.0), axis=1))
        return how_many(above), _sum(jnp.where(above, weight, 0.0)), at_bar

    num_above, above, each = split(kth_best(scores, wanted))
    mass_k = above + (wanted - num_above).astype(jnp.float32) * each
    goal = share * jnp.where(wanted > 0, mass_k, mass)

    def halve(i: jax.Array, bar: jax.Array) -> jax.Array:
        higher = bar + lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(_sum(jnp.where(scores >= higher, weight, 0.0)) >= goal, higher, bar)

    # The largest bar at which what reaches it has the mass; above it there is less.
    bar = lax.fori_loop(0, 32, halve, jnp.int32(NOTHING))
    num_above, above, each = split(bar)
    more = jnp.minimum((goal - above) / each, 1e6)
    whole = more.astype(jnp.int32)
    whole += (whole.astype(jnp.float32) < more).astype(jnp.int32)
    num_equal = how_many(scores == bar)
    by_share = num_above + jnp.minimum(jnp.maximum(whole, 1), num_equal)
    # No bar at all: everything that is listed stays.
    num_listed = how_many(is_in)
    has_bar = jnp.logical_and(bar > NOTHING, share < 1)
    by_share = jnp.where(has_bar, by_share, num_listed)
    num_kept = jnp.where(wanted > 0, jnp.minimum(wanted, by_share), by_share)
    num_kept = jnp.minimum(num_kept, num_listed)
    enough = jnp.where(wanted > 0, wanted <= LISTED, has_bar)
    is_known = jnp.logical_or(enough, num_listed == vocab_size)
    cutoff = kth_best(scores, num_kept)
    num_above, above, each = split(cutoff)
    room = num_kept - num_above
    numbers = plgpu.load(best_of.numbers, layout=Layout.WGMMA, optimized=False)

    def reach(i: jax.Array, place: jax.Array) -> jax.Array:
        higher = place + lax.shift_left(jnp.int32(1), 30 - i)
        return jnp.where(how_many((scores == cutoff) & (numbers < higher)) < room, higher, place)

    last = lax.fori_loop(0, 31, reach, jnp.int32(0))
    kept = above + room.astype(jnp.float32) * each
    return last, is_known.astype(jnp.int32), cutoff, kept


def _lines(value: jax.Array) -> jax.Array:
    """A number for each line of a chunk."""
    return _laid_out(lax.broadcast_in_dim(value, (ROWS,), ()))


def _laid_out(vector: jax.Array) -> jax.Array:
    return plgpu.layout_cast(vector, Layout.WGMMA.reduce(1))


def _index(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), axis, layout=Layout.WGMMA)


def _sum(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(values, axis=1))


def _value(score: jax.Array) -> jax.Array:
    """float32 of an ordered integer; minus infinity of none."""
    bits = score ^ ((score >> 31) & 0x7FFFFFFF)
    return jnp.where(score > NOTHING, lax.bitcast_convert_type(bits, jnp.float32), -jnp.inf)
