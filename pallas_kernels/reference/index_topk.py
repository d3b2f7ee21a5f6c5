"""Which cache entries each token attends to: what it means, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import ScaledArray, decode

_HIGHEST = jax.lax.Precision.HIGHEST
_SCORES_MAX = 1 << 24
"""Largest number of (token, entry, head) products held at once, to bound memory."""


def index_topk(
    q: ScaledArray | jax.Array,
    head_weight: jax.Array,
    keys: ScaledArray | jax.Array,
    block_table: jax.Array,
    row: jax.Array,
    num_visible: jax.Array,
    candidates: jax.Array | None,
    *,
    k: int,
    candidate_block_size: int,
    num_candidate_blocks: int,
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.ops.index_topk`."""
    num_entries = block_table.shape[1] * keys.shape[1]
    queries = decode(q)
    num_tokens, num_heads, _ = queries.shape

    def one_token(args: tuple[jax.Array, ...]) -> jax.Array:
        query, weight, table = args
        own = jax.tree.map(lambda a: a[table].reshape(-1, a.shape[-1]), keys)
        dots = jnp.einsum("hd,nd->hn", query, decode(own), precision=_HIGHEST)
        return jnp.einsum("hn,h->n", jnp.maximum(dots, 0.0), weight, precision=_HIGHEST)

    batch_size = max(1, min(num_tokens, _SCORES_MAX // (num_entries * num_heads)))
    args = (queries, head_weight, block_table[row])
    if batch_size == num_tokens:
        scores = jax.vmap(lambda *a: one_token(a))(*args)
    else:
        scores = jax.lax.map(one_token, args, batch_size=batch_size)
    visible = jnp.arange(num_entries)[None, :] < num_visible[:, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    made = None
    if num_candidate_blocks:
        made = best_blocks(scores, num_visible, candidate_block_size, num_candidate_blocks)
    if candidates is not None:
        scores = jnp.where(
            in_blocks(candidates, num_entries, candidate_block_size), scores, -jnp.inf
        )
    return best_entries(scores, k), made


def best_entries(scores: jax.Array, k: int) -> jax.Array:
    """[T, k] int32: the entries of the best `k` scores [T, N] above minus infinity, ascending,
    then -1. Equal scores: the lower index wins.
    """
    num_tokens, num_entries = scores.shape
    values, index = jax.lax.top_k(scores, min(k, num_entries))
    # Absent entries sort behind every real one, then become -1.
    index = jnp.sort(jnp.where(values > -jnp.inf, index, num_entries), axis=-1)
    index = jnp.where(index < num_entries, index, -1).astype(jnp.int32)
    missing = k - index.shape[1]
    if missing > 0:
        index = jnp.concatenate([index, jnp.full((num_tokens, missing), -1, jnp.int32)], axis=1)
    return index


def best_blocks(
    scores: jax.Array, num_visible: jax.Array, block_size: int, num_blocks: int
) -> jax.Array:
    """[T, num_blocks] int32: candidate blocks by their best score, ascending, then -1.

    The block of the newest visible entry is always among them.
    """
    num_tokens, num_entries = scores.shape
    padding = -num_entries % block_size
    scores = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    best = jnp.max(
        scores.reshape(num_tokens, (num_entries + padding) // block_size, block_size), axis=-1
    )
    newest = (num_visible - 1) // block_size
    is_newest = jnp.arange(best.shape[1])[None, :] == newest[:, None]
    forced = is_newest & (num_visible > 0)[:, None]
    return best_entries(jnp.where(forced, jnp.inf, best), num_blocks)


def in_blocks(blocks: jax.Array, num_entries: int, block_size: int) -> jax.Array:
    """Mask [T, num_entries] of the entries that lie in `blocks` [T, C] (-1 names none)."""
    num_blocks = -(-num_entries // block_size)
    where = jnp.where(blocks < 0, num_blocks, blocks)
    mask = jnp.zeros((blocks.shape[0], num_blocks), bool)
    mask = mask.at[jnp.arange(blocks.shape[0])[:, None], where].set(True, mode="drop")
    return jnp.repeat(mask, block_size, axis=1)[:, :num_entries]
