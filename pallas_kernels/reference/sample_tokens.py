"""Choice of the next token: what it means, in plain jax.numpy."""

import jax
import jax.numpy as jnp


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.ops.sample_tokens`."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        drawn = _draw(logits, temperature, top_k, top_p, seed, position)
        return jnp.where(temperature > 0, drawn, greedy)

    # A batch of greedy requests skips the sort.
    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _draw(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    vocab_size = logits.shape[-1]
    # Below the largest logit nothing overflows, however small the temperature.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    values, order = jax.lax.top_k(scaled, vocab_size)
    rank = jnp.arange(vocab_size)[None, :]
    in_top_k = rank < jnp.where(top_k > 0, top_k, vocab_size)[:, None]
    # top_p is a share of what top_k left over.
    probability = jax.nn.softmax(jnp.where(in_top_k, values, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    kept = in_top_k & (mass_before < top_p[:, None])
    # The best token always stays, even if rounding put its mass at top_p.
    kept = kept | (rank == 0)
    mass = jnp.cumsum(jnp.where(kept, probability, 0.0), axis=-1)
    target = uniform(seed, position) * mass[:, -1]
    chosen = jnp.sum(mass <= target[:, None], axis=-1)
    last_kept = jnp.sum(kept, axis=-1) - 1
    chosen = jnp.minimum(chosen, last_kept)
    return jnp.take_along_axis(order, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[M] float32 in [0, 1): one Threefry draw per (seed [M, 2] uint32, position [M] int32)."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seed, position)
