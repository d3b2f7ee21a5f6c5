"""The forward pass in tiles of a fixed number of tokens, so that no value depends on company.

How a product is computed depends on its shape: compilers and libraries choose an order of summation
by the number of rows, and sums in different orders round differently. A token would then have
other logits in a step of 8 tokens than in one of 512, in a prompt than as a generated token.

With `Model.tile_tokens` a step is therefore a loop over tiles of that many tokens. A tile is a
step of its own, in the order of the tokens: what one leaves in the cache the next one reads, as
between two chunks of a prompt. The body of the loop is the same program in every compiled step,
however many tokens that has; its number of turns is known only when it runs, so that no compiler
can merge the body with what is around it. Within a tile, rows of a product are computed alike,
which tests check bit by bit.

The loop turns only as often as there are tokens, so a step that is not full costs less.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import model as whole
from deepinfer_jax.batch import StepBatch
from deepinfer_jax.cache import KVCache
from deepinfer_jax.layers.hyper_connections import Residual
from deepinfer_jax.model import Model, Weights


def forward(
    model: Model,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    image_features: jax.Array | None = None,
    engram_rows: jax.Array | None = None,
) -> tuple[Residual, KVCache]:
    """`model.forward`, tile by tile.

    Returns:
        what `logits` reads of the tokens: a residual of one stream, and the cache. Tokens of
        tiles without a real token have zeros.

    Raises:
        ValueError: the tokens of the step do not divide into tiles.
    """
    tile, total = model.tile_tokens, batch.token_ids.shape[0]
    if total % tile:
        raise ValueError(f"a step has {total} tokens; expected a multiple of the tile of {tile}")
    width, dtype = model.config.hidden_size, model.precision.compute_dtype

    def one(number: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        hidden, cache = carry
        start = number * tile
        features, rows = (
            None if a is None else jax.lax.dynamic_slice_in_dim(a, start, tile)
            for a in (image_features, engram_rows)
        )
        residual, cache = whole.forward(
            model,
            weights,
            cache,
            tile_of(batch, start, tile),
            image_features=features,
            engram_rows=rows,
        )
        some = residual.collapsed()
        return jax.lax.dynamic_update_slice_in_dim(hidden, some, start, 0), cache

    num_tiles = -(-jnp.sum(batch.num_tokens) // tile)
    hidden = jnp.zeros((total, width), dtype)
    hidden, cache = jax.lax.fori_loop(0, num_tiles, one, (hidden, cache))
    return Residual.start(hidden, 1), cache


def tile_of(batch: StepBatch, start: jax.Array | int, tile: int) -> StepBatch:
    """The tokens `start` to `start + tile - 1` of a step as a step with the same rows."""
    first = jnp.cumsum(batch.num_tokens) - batch.num_tokens
    begin = jnp.clip(start - first, 0, batch.num_tokens)
    end = jnp.clip(start + tile - first, 0, batch.num_tokens)
    return batch._replace(
        token_ids=jax.lax.dynamic_slice_in_dim(batch.token_ids, start, tile),
        row_index=jax.lax.dynamic_slice_in_dim(batch.row_index, start, tile),
        starts=batch.starts + begin,
        num_tokens=end - begin,
    )


def map_tiles(function: Callable[[Any], Any], arrays: Any, tile: int, num_used: jax.Array) -> Any:
    """`function` of every `tile` rows of `arrays`, a pytree of [N, ...].

    Args:
        function: takes and gives pytrees of [`tile`, ...], row by row.
        num_used: only the first so many rows matter; results of later tiles are zeros.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    padding = -total % tile

    def pad(a: jax.Array) -> jax.Array:
        return jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1)))

    padded = jax.tree.map(pad, arrays)

    def part(number: jax.Array | int) -> Any:
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, number * tile, tile), padded)

    def one(number: jax.Array, results: Any) -> Any:
        return jax.tree.map(
            lambda a, some: jax.lax.dynamic_update_slice_in_dim(a, some, number * tile, 0),
            results,
            function(part(number)),
        )

    shapes = jax.eval_shape(lambda: function(part(0)))
    results = jax.tree.map(lambda s: jnp.zeros((total + padding, *s.shape[1:]), s.dtype), shapes)
    results = jax.lax.fori_loop(0, -(-num_used // tile), one, results)
    return jax.tree.map(lambda a: a[:total], results)
