"""Choice of the next token and acceptance of drafts: what they mean, in plain jax.numpy.

Three kinds of random numbers are used, and they must not meet: the draw of a token, the decision
whether a draft is accepted, and the draw of the draft itself. Each is a Threefry value of the
request's seed, the name of its stream and positions, so nothing depends on the batch.

*Why the stream of drafts also holds the anchor*: a position is drafted again after a rejection.
Were its number used twice, the second proposal would depend on the first, which may already have
decided how many tokens are verified, and the text would no longer follow the target exactly. A
position is accepted or drawn only once, so those two streams need the position alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Names of streams: numbers that no position takes, since positions fill 31 bits.
_ACCEPT_STREAM = np.uint32(1 << 31)
_DRAFT_STREAM = np.uint32((1 << 31) + 1)

_RESIDUAL_SHRINK = 1 - 5e-5
"""The draft counts as this much less likely, so that rounding cannot empty the residual."""

_CDF_ONE = 2.0**31
"""Probability 1 in the integer distribution that is drawn from. Integers sum to the same number
in any order, and a token of weight 0 cannot be drawn."""


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.ops.sample_tokens`."""

    def draw() -> jax.Array:
        weight = probabilities(logits, temperature, top_k, top_p)
        return draw_tokens(weight, random_bits(seed, position))

    # A batch of greedy requests skips the sort.
    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: _best(logits))


def propose_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    anchor: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ops.propose_tokens`."""

    def draw() -> tuple[jax.Array, jax.Array]:
        weight = probabilities(logits, temperature, top_k, top_p)
        token = draw_tokens(weight, draft_bits(seed, anchor, position))
        return token, jnp.take_along_axis(weight, token[:, None], axis=1)[:, 0]

    def best() -> tuple[jax.Array, jax.Array]:
        return _best(logits), jnp.ones(logits.shape[0], jnp.float32)

    return jax.lax.cond(jnp.any(temperature > 0), draw, best)


def probabilities(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """[M, V] float32: the distribution of each row after temperature, top_k and top_p.

    A row of temperature 0 has all of it on its best token. Rows do not depend on each other.
    """
    logits = logits.astype(jnp.float32)
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    # Below the largest logit nothing overflows, however small the temperature.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor
    is_filtered = (top_k > 0) | (top_p < 1)
    kept = jax.lax.cond(
        jnp.any(is_filtered),
        lambda: _kept(logits, divisor, top_k, top_p),
        lambda: jnp.ones(scaled.shape, bool),
    )
    weight = jnp.where(kept, jnp.exp(scaled), 0.0)
    drawn = weight / jnp.sum(weight, axis=-1, keepdims=True)
    certain = jax.nn.one_hot(_best(logits), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(temperature[:, None] > 0, drawn, certain)


def accept_tokens(
    logits: jax.Array,
    row: jax.Array,
    first: jax.Array,
    draft_tokens: jax.Array,
    draft_probability: jax.Array,
    num_drafts: jax.Array,
    draft_logits: jax.Array,
    slot: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    probabilities: Callable[..., jax.Array] = probabilities,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ops.accept_tokens`; `probabilities` is how those of rows are found."""
    num_tokens, drafts_max = logits.shape[0], draft_tokens.shape[1]
    number = jnp.arange(drafts_max, dtype=jnp.int32)[None, :]
    judge = jnp.minimum(first[:, None] + number, num_tokens - 1)
    is_draft = number < num_drafts[:, None]

    def ends_at(accepts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many drafts are accepted, and the token whose logits the next one comes from."""
        leading = jnp.cumprod((is_draft & accepts).astype(jnp.int32), axis=1)
        num_accepted = jnp.sum(leading, axis=1)
        return num_accepted, jnp.minimum(first + num_accepted, num_tokens - 1)

    def greedy() -> tuple[jax.Array, jax.Array]:
        best = _best(logits)
        num_accepted, last = ends_at(best[judge] == draft_tokens)
        return num_accepted, best[last]

    def sampled() -> tuple[jax.Array, jax.Array]:
        target = probabilities(logits, temperature[row], top_k[row], top_p[row])
        at = jnp.broadcast_to(position[:, None] + number, draft_tokens.shape).reshape(-1)
        stream = jnp.repeat(fold(seed, _ACCEPT_STREAM), drafts_max, axis=0)
        chance = uniform(stream, at).reshape(draft_tokens.shape)
        num_accepted, last = ends_at(chance * draft_probability < target[judge, draft_tokens])
        refused = jnp.minimum(num_accepted, drafts_max - 1)
        draft = probabilities(draft_logits[slot, refused], temperature, top_k, top_p)
        residual = jnp.maximum(target[last] - draft * _RESIDUAL_SHRINK, 0.0)
        is_refused = (num_accepted < num_drafts)[:, None]
        weight = jnp.where(is_refused, residual, target[last])
        return num_accepted, draw_tokens(weight, random_bits(seed, position + num_accepted))

    return jax.lax.cond(jnp.any(temperature > 0), sampled, greedy)


def draw_tokens(weight: jax.Array, bits: jax.Array) -> jax.Array:
    """[M] int32: a token of each row, in proportion to `weight` [M, V], by 32 random bits [M]."""
    share = weight / jnp.sum(weight, axis=-1, keepdims=True)
    up_to = jnp.cumsum(counts(share), axis=-1, dtype=jnp.uint32)
    target = high_product(bits, up_to[:, -1])
    return jnp.sum(up_to <= target[:, None], axis=-1, dtype=jnp.int32)


def counts(share: jax.Array) -> jax.Array:
    """uint32 weights of probabilities in the integer distribution."""
    return jnp.round(share * _CDF_ONE).astype(jnp.uint32)


def random_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[M] uint32 random numbers of (seed [M, 2] uint32, position [M] int32)."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position))

    return jax.vmap(one)(seed, position)


def draft_bits(seed: jax.Array, anchor: jax.Array, position: jax.Array) -> jax.Array:
    """[M] uint32 random numbers of the drafts at `position` after the known one at `anchor`."""
    return random_bits(fold(fold(seed, _DRAFT_STREAM), anchor), position)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[M] float32 in [0, 1): the upper 24 of `random_bits`, which a float32 holds exactly."""
    return (random_bits(seed, position) >> 8).astype(jnp.float32) * 2.0**-24


def fold(seed: jax.Array, number: jax.Array | np.uint32) -> jax.Array:
    """[M, 2] uint32: seeds of a stream that is named by a number, one for all or one each."""

    def one(seed: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, number))

    numbers = jnp.broadcast_to(jnp.asarray(number).astype(jnp.uint32), seed.shape[:1])
    return jax.vmap(one)(seed, numbers)


def _best(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _kept(logits: jax.Array, divisor: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask [M, V] of the tokens that the filters leave; of equal ones the lower ids stay."""
    vocab_size = logits.shape[-1]
    values = jnp.sort(logits, axis=-1, descending=True)
    in_top_k = jnp.arange(vocab_size)[None, :] < jnp.where(top_k > 0, top_k, vocab_size)[:, None]
    # top_p is a share of what top_k left over.
    scaled = (values - values[:, :1]) / divisor
    share = jax.nn.softmax(jnp.where(in_top_k, scaled, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(share, axis=-1) - share
    # Rounding may bring the sum to 1 before the last token; a top_p of 1 still cuts nothing off.
    in_top_p = (mass_before < top_p[:, None]) | (top_p >= 1)[:, None]
    # The best token always stays, even if rounding put its mass at top_p.
    num_kept = jnp.maximum(jnp.sum(in_top_k & in_top_p, axis=-1, keepdims=True), 1)
    cutoff = jnp.take_along_axis(values, num_kept - 1, axis=-1)
    above, equal = logits > cutoff, logits == cutoff
    room = num_kept - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))


def high_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32: a number below `b`, in proportion."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    low = a_high * b_low + ((a_low * b_low) >> 16)
    middle = a_low * b_high + (low & 0xFFFF)
    return a_high * b_high + (low >> 16) + (middle >> 16)
