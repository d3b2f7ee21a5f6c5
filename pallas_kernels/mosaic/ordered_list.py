"""The best few of a long sequence of scores, in shared memory and in the order of the sequence.

For kernels of one warpgroup. Scores are *ordered integers*: int32 that compare as the float32 they
stand for, equal floats (also the two zeros) being equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.widen import Layout

NOTHING = np.iinfo(np.int32).min
"""Below every score: the place of an absent one."""
COLUMNS = 128
"""Of a list, unless it says otherwise."""
_WORD = 32


@dataclass(frozen=True)
class List:
    """Scores and what they belong to, [64, C] int32, row by row; -1 where there is none.

    How many there are, and the k-th best so far, is kept in registers: a state (count, bar).
    """

    scores: Any
    numbers: Any
    words: Any

    @staticmethod
    def memory(columns: int = COLUMNS) -> list[Any]:
        """What a kernel allocates for a list of 64 times `columns`, at least those of a chunk."""
        shape = (64, columns)
        words = plgpu.SMEM((-(-columns // _WORD), 64), jnp.int32)
        return [plgpu.SMEM(shape, jnp.int32), plgpu.SMEM(shape, jnp.int32), words]

    def load(self) -> jax.Array:
        """The scores in registers."""
        return plgpu.load(self.scores, layout=Layout.WGMMA, optimized=False)

    def clear_from(self, count: jax.Array) -> None:
        """Makes everything from `count` on absent."""
        place = _places(self.scores.shape)
        plgpu.commit_smem()
        for ref, absent in ((self.scores, NOTHING), (self.numbers, -1)):
            value = plgpu.load(ref, layout=Layout.WGMMA, optimized=False)
            plgpu.store(ref, jnp.where(place < count, value, absent), optimized=False)
        plgpu.commit_smem()

    def put(self, place: jax.Array, score: jax.Array, number: jax.Array) -> None:
        """Writes one element."""
        columns = self.scores.shape[1]
        row, column = place // columns, lax.rem(place, columns)
        self.scores[row, column] = score
        self.numbers[row, column] = number


def ordered(scores: jax.Array) -> jax.Array:
    """int32 that compare as the float32 `scores` do."""
    bits = lax.bitcast_convert_type(scores + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def kth_best(scores: jax.Array, k: int | jax.Array) -> jax.Array:
    """The largest number that at least `k` of `scores` [64, N] reach; NOTHING if fewer exist."""

    def halve(i: jax.Array, bar: jax.Array) -> jax.Array:
        higher = bar + lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(how_many(scores >= higher) >= k, higher, bar)

    return lax.fori_loop(0, 32, halve, jnp.int32(NOTHING))


def append(
    to: List,
    state: tuple[jax.Array, jax.Array],
    scores_smem: Any,
    first: jax.Array,
    k: int,
    number: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Appends what of `scores_smem` [64, N], row by row, may be among the best `k`.

    Args:
        to: has room for 64 * N more.
        state: count and bar before.
        first: position of the first score.
        number: of a position, what is listed.

    Returns:
        Count and bar after.
    """
    count, bar = state
    scores = plgpu.load(scores_smem, layout=Layout.WGMMA, optimized=False)
    # Of equal ones the earlier are better, so one that only reaches the bar comes too late.
    own = lax.cond(
        how_many(scores > bar) > k, lambda: kth_best(scores, k), lambda: jnp.int32(NOTHING)
    )

    def one(place: jax.Array, count: jax.Array) -> jax.Array:
        score = scores_smem[place // scores.shape[1], lax.rem(place, scores.shape[1])]
        to.put(count, score, number(first + place))
        return count + 1

    after = _walk(to.words, (scores > bar) & (scores >= own), one, count)
    plgpu.commit_smem()
    bar = lax.cond(after > count, lambda: kth_best(to.load(), k), lambda: bar)
    room = scores.shape[0] * (to.scores.shape[1] - scores.shape[1])
    return lax.cond(after > room, lambda: keep_best(to, k), lambda: after), bar


def keep_best(of: List, k: int) -> jax.Array:
    """Leaves only the best `k`, the first ones of equal ones, and says how many there are."""
    scores, columns = of.load(), of.scores.shape[1]
    bar = kth_best(scores, k)
    equal_left = k - how_many(scores > bar)

    def one(place: jax.Array, state: tuple[jax.Array, jax.Array]) -> Any:
        kept, equal_left = state
        row, column = place // columns, lax.rem(place, columns)
        score, number = of.scores[row, column], of.numbers[row, column]
        is_equal = score == bar
        stays = jnp.logical_or(score > bar, equal_left > 0)

        @pl.when(stays)
        def _() -> None:
            of.put(kept, score, number)

        return kept + stays.astype(jnp.int32), equal_left - is_equal.astype(jnp.int32)

    is_in = (scores >= bar) & (scores > NOTHING)
    kept, _ = _walk(of.words, is_in, one, (jnp.int32(0), equal_left))
    of.clear_from(kept)
    return kept


def how_many(holds: jax.Array) -> jax.Array:
    """How many of [64, N] hold."""
    ones = jnp.where(holds, 1, 0)
    return jnp.sum(jnp.sum(ones, axis=1))


def _walk(words_smem: Any, is_in: jax.Array, one: Callable[..., Any], carry: Any) -> Any:
    """`carry = one(place, carry)` for every place of [64, N] that is in, in ascending order."""
    num_rows, columns = is_in.shape
    num_words = -(-columns // _WORD)
    column = plgpu.broadcasted_iota(jnp.int32, is_in.shape, 1, layout=Layout.WGMMA)
    # The first column is the highest bit, which counting leading zeros finds.
    bits = jnp.where(is_in, lax.shift_left(jnp.int32(1), 31 - (column & (_WORD - 1))), 0)
    for w in range(num_words):
        part = bits[:, w * _WORD : min((w + 1) * _WORD, columns)]
        words_smem[w] = jnp.sum(part, axis=1)
    plgpu.commit_smem()

    def word(index: jax.Array, carry: Any) -> Any:
        row, w = index // num_words, lax.rem(index, num_words)

        def next_bit(state: Any) -> Any:
            bits, carry = state
            at = lax.clz(bits)
            carry = one(row * columns + w * _WORD + at, carry)
            highest = lax.shift_right_logical(jnp.int32(NOTHING), at)
            return bits & ~highest, carry

        state = (words_smem[w, row], carry)
        return lax.while_loop(lambda state: state[0] != 0, next_bit, state)[1]

    return lax.fori_loop(0, num_rows * num_words, word, carry)


def _places(shape: tuple[int, int]) -> jax.Array:
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=Layout.WGMMA)
    return row * shape[1] + column
