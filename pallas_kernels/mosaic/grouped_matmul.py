"""The routed experts' gated feed-forward, as two GPU kernels with the same body as dense products.

1. XLA sorts the (token, expert) pairs by expert and gives each expert whole tiles of rows, of which
   the last is padded; only the first product of the chosen experts' rows is ever computed.
2. `product` of w1 and w3 with the same rows; SwiGLU, clamp and route weight on the accumulators.
3. XLA quantises the hidden rows in one pass.
4. `product` of w2; XLA adds up each token's rows, in the order of its experts.

Weights stay packed in device memory and are read once for every tile of rows, which in a decode
step is once.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.product import check_weights, transposed_product
from pallas_kernels.mosaic.scaled_matmul import as_bfloat16
from pallas_kernels.scaled_array import Format, ScaledArray
from pallas_kernels.targets import Target
from pallas_kernels.tiles import product_tile


class Groups(NamedTuple):
    """Pairs (token, expert) in tiles of rows with one expert each. `M` rows, `P` pairs.

    Attributes:
        tile_expert: [M / tile rows] int32; -1 for tiles that are left over.
        token: [M] int32, token of each row; 0 for padding rows.
        route: [M] float32, weight of each row; 0 for padding rows.
        place: [P] int32, row of each pair; M for pairs that are switched off.
    """

    tile_expert: jax.Array
    token: jax.Array
    route: jax.Array
    place: jax.Array


def grouped_matmul(
    x: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
    w1: ScaledArray | jax.Array,
    w3: ScaledArray | jax.Array,
    w2: ScaledArray | jax.Array,
    *,
    limit: float,
    activation_format: Format | None,
    target: Target,
    interpret: Any,
) -> jax.Array:
    """See `pallas_kernels.ops.grouped_matmul`. Unquantised hidden rows are rounded to bfloat16.

    Raises:
        NotImplementedError: a weight is not packed or no multiple of the tiles, or `x` is float32
            and stays unquantised.
    """
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        check_weights(name, weight)
    assert isinstance(w1, ScaledArray) and isinstance(w3, ScaledArray)
    assert isinstance(w2, ScaledArray)
    if w1.format is not w3.format:
        raise NotImplementedError(f"w1 has format {w1.format.name} and w3 {w3.format.name}")
    num_experts, ffn, width = w1.shape
    num_tokens, num_chosen = expert_index.shape
    rows = as_bfloat16(x, activation_format)
    if not num_tokens:
        return jnp.zeros((0, width), jnp.float32)
    mean_rows = -(-num_tokens * num_chosen // num_experts)
    tile = product_tile(target, "grouped_matmul", mean_rows, ffn, width)
    groups = group_rows(expert_index, expert_weight, num_experts, tile.rows)

    def gated(gate: jax.Array, up: jax.Array, route: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(gate) * jnp.maximum(jnp.minimum(up, limit), -limit) * route

    product = functools.partial(transposed_product, tile=tile, interpret=interpret)
    hidden = product(rows[groups.token], (w1, w3), groups.tile_expert, groups.route, gated).T
    if activation_format is None:
        hidden = hidden.astype(jnp.bfloat16)
    hidden = as_bfloat16(hidden, activation_format)
    out = product(hidden, (w2,), groups.tile_expert, None, lambda product: product).T
    place = groups.place.reshape(num_tokens, num_chosen)
    parts = (
        # Rows that were never computed hold whatever lay there.
        jnp.where((at < out.shape[0])[:, None], out[jnp.minimum(at, out.shape[0] - 1)], 0.0)
        for at in place.T
    )
    return functools.reduce(operator.add, parts)


def group_rows(
    expert_index: jax.Array, expert_weight: jax.Array, num_experts: int, tile_rows: int
) -> Groups:
    """Sorts the pairs [T, K] by expert, in the order of their tokens, into tiles of `tile_rows`."""
    num_chosen = expert_index.shape[1]
    expert = jnp.where(expert_weight != 0, expert_index, num_experts).reshape(-1)
    num_pairs = expert.shape[0]
    # Every expert that is used wastes less than a tile.
    used_max = min(num_experts, num_pairs)
    num_tiles = (num_pairs + used_max * (tile_rows - 1)) // tile_rows
    num_rows = num_tiles * tile_rows
    order = jnp.argsort(expert, stable=True)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    tiles = -(-count // tile_rows)
    tile_end = jnp.cumsum(tiles[:num_experts])
    is_on = expert[order] < num_experts
    rank = jnp.arange(num_pairs) - (jnp.cumsum(count) - count)[expert[order]]
    first_row = (jnp.cumsum(tiles) - tiles)[expert[order]] * tile_rows
    row = jnp.where(is_on, first_row + rank, num_rows).astype(jnp.int32)
    tile = jnp.arange(num_tiles)
    owner = jnp.sum(tile[:, None] >= tile_end[None, :], axis=1, dtype=jnp.int32)
    return Groups(
        tile_expert=jnp.where(tile < tile_end[-1], owner, -1),
        token=jnp.zeros(num_rows, jnp.int32).at[row].set(order // num_chosen, mode="drop"),
        route=jnp.zeros(num_rows).at[row].set(expert_weight.reshape(-1)[order], mode="drop"),
        place=jnp.zeros(num_pairs, jnp.int32).at[order].set(row),
    )
