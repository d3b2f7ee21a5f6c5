"""Rows times the transpose of packed weights: the body that dense and expert products share.

The block of weights is the left operand of the tensor core and the rows are its right one, so
the result is transposed, [N, rows]:

    grid (N / 64, row tiles), rows fastest: neighbours read the same weights from the cache
    block: 64 rows of weights by `rows` activations; per step K_TILE channels of both come by TMA

           weights [64, K_TILE] packed --widen in registers--> bfloat16 [64, K_TILE] in shared
           memory --wgmma--> accumulators [64, rows] += weights x activations

*Why transposed*: an instruction multiplies 64 rows of its left operand. A decode step has far fewer
rows for an expert than that, but weights enough.

Bound: bytes of the packed weights, read once per row tile, plus `2 * rows` operations for each
weight. Widening costs about eight instructions a weight, which a tile of many rows hides and one
of few rows does not.

*Why one order*: channels are added up in steps of 16 from first to last, whatever the tile, so
a row gives the same bits alone and in company.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.widen import (
    SCALE_CHANNELS,
    TILE_CHANNELS,
    Layout,
    code_layout,
    code_values,
    kernel_codes,
    kernel_scale,
    scale_values,
    tiled,
)
from pallas_kernels.scaled_array import FP4_ROW32, FP8_BLOCK32, ScaledArray
from pallas_kernels.tiles import ProductTile

WEIGHT_ROWS = 64
"""Rows of weights in a block: what one tensor-core instruction takes."""

Epilogue = Callable[..., jax.Array]
"""Called with the float32 accumulators [64, rows] of every weight, then with [rows] `route`
broadcast alike if there is one; gives what is stored."""


def check_weights(name: str, weight: Any) -> None:
    """What the kernel covers: a packed [E, N, K] or [N, K] whose tiles divide it.

    Raises:
        NotImplementedError: with what was received.
    """
    if not isinstance(weight, ScaledArray):
        raise NotImplementedError(f"{name} is not quantised")
    if weight.format not in (FP8_BLOCK32, FP4_ROW32):
        raise NotImplementedError(f"{name} has format {weight.format.name}")
    n, k = weight.shape[-2:]
    if n % WEIGHT_ROWS or k % TILE_CHANNELS:
        raise NotImplementedError(
            f"{name} is {weight.shape}; N must be a multiple of {WEIGHT_ROWS} and K of "
            f"{TILE_CHANNELS}"
        )


def transposed_product(
    x: jax.Array,
    weights: tuple[ScaledArray, ...],
    tile_expert: jax.Array,
    route: jax.Array | None,
    epilogue: Epilogue,
    *,
    tile: ProductTile,
    interpret: Any,
) -> jax.Array:
    """`epilogue` of the products of each weight with `x`, transposed: float32 [N, M].

    Args:
        x: [M, K] bfloat16, M a multiple of `tile.rows`.
        weights: one or two of [E, N, K] and one format, multiplied with the same rows.
        tile_expert: [M / tile.rows] int32, expert of each tile of rows; -1 leaves the tile's
            columns of the result unwritten.
        route: [M] float32 for the epilogue, or None.
    """
    num_rows, k = x.shape
    n = weights[0].shape[1]
    # Twice as much would not leave room for a second block on the core.
    k_tile = 128 if k % 128 == 0 else TILE_CHANNELS
    form = weights[0].format
    num_weights = len(weights)
    spec = {"form": form, "k_tile": k_tile, "num_steps": k // k_tile, "tile": tile}

    def product_kernel(x_gmem: Any, expert_gmem: Any, *refs: Any) -> None:
        codes, scales = refs[:num_weights], refs[num_weights : 2 * num_weights]
        rest = refs[2 * num_weights :]
        route_gmem = rest[0] if route is not None else None
        out_gmem, wide_smem = rest[-2:]
        row_tile = lax.axis_index("rows")
        rows = pl.ds(row_tile * tile.rows, tile.rows)
        columns = pl.ds(lax.axis_index("columns") * WEIGHT_ROWS, WEIGHT_ROWS)
        expert = expert_gmem[row_tile]

        @pl.when(expert >= 0)
        def _() -> None:
            def multiply(*accumulators: Any) -> tuple[jax.Array, ...]:
                step = _step(accumulators, scales, wide_smem, expert, spec)
                _pipeline(step, num_weights, spec)(x_gmem, *(c.at[expert] for c in codes))
                return tuple(accumulator[...] for accumulator in accumulators)

            accumulator = plgpu.WGMMAAccumulatorRef((WEIGHT_ROWS, tile.rows), jnp.float32)
            products = pl.run_scoped(multiply, *[accumulator] * num_weights)
            if route_gmem is not None:
                weight = plgpu.load(
                    route_gmem.at[rows], layout=Layout.WGMMA.reduce(0), optimized=False
                )
                products += (lax.broadcast_in_dim(weight, products[0].shape, [1]),)
            plgpu.store(out_gmem.at[columns, rows], epilogue(*products), optimized=False)

    kernel = plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct((n, num_rows), jnp.float32),
        grid=(n // WEIGHT_ROWS, num_rows // tile.rows),
        grid_names=("columns", "rows"),
        scratch_types=[
            plgpu.SMEM((num_weights, WEIGHT_ROWS, k_tile), jnp.bfloat16, transforms=tiled(16))
        ],
        interpret=interpret,
    )
    codes = [kernel_codes(weight) for weight in weights]
    scales = [kernel_scale(weight) for weight in weights]
    return kernel(x, tile_expert, *codes, *scales, *([] if route is None else [route]))


def _pipeline(step: Callable[..., None], num_weights: int, spec: dict[str, Any]) -> Any:
    """TMA of activations and weights, some steps ahead of `step`."""
    k_tile, rows = spec["k_tile"], spec["tile"].rows
    row_tile, column = lax.axis_index("rows"), lax.axis_index("columns")
    x_spec = plgpu.BlockSpec((rows, k_tile), lambda k: (row_tile, k), transforms=tiled(16))
    w_spec = plgpu.BlockSpec(
        (WEIGHT_ROWS, k_tile), lambda k: (column, k), transforms=tiled(spec["form"].bits)
    )
    return plgpu.emit_pipeline(
        step,
        grid=(spec["num_steps"],),
        in_specs=[x_spec, *[w_spec] * num_weights],
        max_concurrent_steps=min(spec["tile"].stages, spec["num_steps"]),
    )


def _step(
    accumulators: tuple[Any, ...],
    scales: tuple[Any, ...],
    wide_smem: Any,
    expert: jax.Array,
    spec: dict[str, Any],
) -> Callable[..., None]:
    """One step along K: widen the tile of each weight, then multiply."""
    first_row = lax.axis_index("columns") * WEIGHT_ROWS

    def step(index: tuple[jax.Array], x_smem: Any, *codes: Any) -> None:
        first_group = index[0] * (spec["k_tile"] // SCALE_CHANNELS)
        for w, codes_smem in enumerate(codes):
            for at in range(0, spec["k_tile"], TILE_CHANNELS):
                group = first_group + at // SCALE_CHANNELS
                columns = pl.ds(at, TILE_CHANNELS)
                wide_smem[w, :, columns] = _widened(
                    codes_smem.at[:, columns],
                    scales[w].at[expert],
                    first_row,
                    group,
                    spec["form"].bits,
                )
        plgpu.commit_smem()
        for w, accumulator in enumerate(accumulators):
            plgpu.wgmma(accumulator, wide_smem.at[w], x_smem.transpose((1, 0)))
        # The tile is overwritten in the next step.
        plgpu.wgmma_wait(0)

    return step


def _widened(
    codes_smem: Any, scale_gmem: Any, first_row: jax.Array, group: jax.Array, bits: int
) -> jax.Array:
    """[64, 64] bfloat16 values of a tile of codes, which holds two groups of channels."""
    layout = code_layout(bits)
    values = code_values(plgpu.load(codes_smem, layout=layout))
    halves = []
    for half in range(TILE_CHANNELS // SCALE_CHANNELS):
        part = values[:, half * SCALE_CHANNELS : (half + 1) * SCALE_CHANNELS]
        if bits == 4:
            scale = plgpu.load(
                scale_gmem.at[pl.ds(first_row, WEIGHT_ROWS), group + half],
                layout=layout.reduce(1),
                optimized=False,
            )
            scale = lax.broadcast_in_dim(scale_values(scale), part.shape, [0])
        else:
            scale = _block_scale(scale_gmem, first_row // SCALE_CHANNELS, group + half, layout)
        halves.append(part * scale)
    return jnp.concatenate(halves, axis=1)


def _block_scale(scale_gmem: Any, block: jax.Array, group: jax.Array, layout: Any) -> jax.Array:
    """[64, 32] bfloat16: one power of two for the upper 32 rows, one for the lower."""
    shape = (WEIGHT_ROWS, SCALE_CHANNELS)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    upper = scale_gmem[block, group].astype(jnp.int32)
    lower = scale_gmem[block + 1, group].astype(jnp.int32)
    exponent = jnp.where(row < SCALE_CHANNELS, upper, lower)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32).astype(jnp.bfloat16)
