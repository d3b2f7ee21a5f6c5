"""Latent attention over a window and selected entries, as a GPU kernel.

XLA first writes one list of rows for each token: its window, then its selected entries, -1 where
there is none. The kernel gathers what the list names, so decode and prefill are the same to it.

    grid (tokens); block: 64 heads of one token, 64 rows of the list in each step

    producer  threads 2      one TMA copy of codes and one of scales a row, some tiles ahead
    consumers threads 0, 1   each owns 256 of the 512 channels of values and output:
      1. widen codes of their channels to bfloat16 in shared memory, absent rows to zero
      2. S = q [64, 512] x rows^T, 32 rows each         (all channels, half the rows)
      3. one running maximum of both; P = exp2(S - maximum) to shared memory
      4. output [64, 256] = output * correction + P [64, 64] x rows [64, 256]

Bound: 528 bytes for each row of the window and 288 for each entry, read once for all 64 heads, and
4 * 64 * 512 operations a row. With 128 + 512 rows that is 215 kB and 84 MFLOP a token: the tensor
core is the longer one by a factor of two on an H200, if tokens fill the cores.

*Why one order*: rows are added up in the order of the list, 64 at a time, whoever else is in the
step, so a token gives the same bits alone and in company.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.history import TokenHistory
from pallas_kernels.mosaic.widen import (
    Layout,
    code_values,
    kernel_codes,
    kernel_scale,
    scale_values,
    tiled,
)
from pallas_kernels.scaled_array import FP8_32, NVFP4_16, Format, ScaledArray
from pallas_kernels.targets import Target
from pallas_kernels.tiles import AttentionTile, attention_tile

HEADS = 64
"""Heads of a block: what one tensor-core instruction takes."""
WIDTH = 512
HALF = WIDTH // 2
"""Channels that one consumer owns, and the most that one dimension of a copy may have."""
ROWS = 64
"""Rows of the list in a step."""
SHARE = ROWS // 2
"""Rows of a step that one consumer multiplies with the queries."""
CHANNELS = 32
"""Channels that are widened at a time, and columns of a tile in shared memory."""
_LOG2_E = math.log2(math.e)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


def sparse_attention(
    q: jax.Array,
    ring: ScaledArray | jax.Array,
    recent: ScaledArray | jax.Array,
    history: TokenHistory,
    entries: ScaledArray | jax.Array | None,
    entry_index: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
    target: Target,
    interpret: Any,
) -> jax.Array:
    """See `pallas_kernels.ops.sparse_attention`. Probabilities are rounded to bfloat16.

    Raises:
        NotImplementedError: there are not 64 heads of 512 channels in bfloat16, or the window is
            not FP8_32, or the entries are not NVFP4_16.
    """
    num_tokens, num_heads, width = q.shape
    if (num_heads, width) != (HEADS, WIDTH):
        raise NotImplementedError(
            f"q has {num_heads} heads of {width}; expected {HEADS} of {WIDTH}"
        )
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"q is {q.dtype}; the tensor core takes bfloat16")
    pools = [_pool("ring", ring, FP8_32), _pool("recent", recent, FP8_32)]
    if entries is not None:
        pools.append(_pool("entries", entries, NVFP4_16))
    if not num_tokens:
        return jnp.zeros(q.shape, jnp.float32)
    rows = window_rows(history, ring.shape[0], ring.shape[1], window)
    num_window_tiles = -(-window // ROWS)
    num_tiles = jnp.full(num_tokens, num_window_tiles, jnp.int32)
    if entry_index is not None:
        number = jnp.arange(1, entry_index.shape[1] + 1)
        last = jnp.max(jnp.where(entry_index >= 0, number, 0), axis=1)
        num_tiles += (last + ROWS - 1) // ROWS
        rows = jnp.concatenate([_pad_rows(rows), _pad_rows(entry_index)], axis=1)
    launch = _Launch(
        num_tokens, num_window_tiles, pools[0].codes.shape[0], scale, attention_tile(target)
    )
    arrays = [array for pool in pools for array in pool]
    args = (q, _pad_rows(rows), num_tiles.astype(jnp.int32), sink, *arrays)
    return _kernel(launch, len(pools), interpret)(*args)


def window_rows(history: TokenHistory, num_slots: int, ring_length: int, window: int) -> jax.Array:
    """[T, window] int32: rows of the rings, one slot after another, then of the step's tokens.

    Column d stands for the token d positions back; -1 where there is none.
    """
    num_tokens = history.position.shape[0]
    distance = jnp.arange(window)[None, :]
    at = history.position[:, None] - distance
    in_ring = history.slot[:, None] * ring_length + jnp.mod(at, ring_length)
    in_step = num_slots * ring_length + jnp.arange(num_tokens)[:, None] - distance
    row = jnp.where(at >= history.row_start[:, None], in_step, in_ring)
    return jnp.where(at >= history.first_visible[:, None], row, -1).astype(jnp.int32)


class _Pool(NamedTuple):
    """Rows that are gathered: codes [N, 2, 256], as two halves since a copy takes no more
    channels, and scales [N, 512 / group]."""

    codes: jax.Array
    scale: jax.Array


class _Launch(NamedTuple):
    num_tokens: int
    num_window_tiles: int
    num_ring_rows: int
    scale: float
    tile: AttentionTile


def _pool(name: str, array: ScaledArray | jax.Array, form: Format) -> _Pool:
    if not isinstance(array, ScaledArray) or array.format is not form:
        held = array.format.name if isinstance(array, ScaledArray) else "unquantised"
        raise NotImplementedError(f"{name} is {held}; expected {form.name}")
    scale = kernel_scale(array)
    return _Pool(kernel_codes(array).reshape(-1, 2, HALF), scale.reshape(-1, scale.shape[-1]))


def _pad_rows(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % ROWS)), constant_values=-1)


def _stage(form: Format, num_stages: int) -> list[Any]:
    """Shared memory and barriers for `num_stages` tiles of packed rows."""
    bits = {4: jnp.int4, 8: jnp.float8_e4m3fn}[form.bits]
    scale = jnp.uint8 if form.scale_dtype == jnp.float8_e8m0fnu else form.scale_dtype
    return [
        plgpu.SMEM((num_stages, ROWS, 2, HALF), bits),
        plgpu.SMEM((num_stages, ROWS, WIDTH // form.block[1]), scale),
        plgpu.Barrier(num_arrivals=2 * ROWS, num_barriers=num_stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    ]


def _kernel(launch: _Launch, num_pools: int, interpret: Any) -> Any:
    num_stages = launch.tile.stages

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(body, refs),
            [_stage(FP8_32, 1), _stage(NVFP4_16, num_stages)],
            [
                plgpu.SMEM((2, HEADS, HALF), jnp.bfloat16, transforms=tiled(16, CHANNELS)),
                plgpu.SMEM((2, ROWS, HALF), jnp.bfloat16, transforms=tiled(16, CHANNELS)),
                plgpu.SMEM((HEADS, ROWS), jnp.bfloat16, transforms=tiled(16, CHANNELS)),
                plgpu.SMEM((2, HALF // NVFP4_16.block[1], ROWS), jnp.bfloat16),
                plgpu.SMEM((2, HEADS), jnp.float32),
            ],
            [plgpu.Barrier(num_arrivals=2), *[plgpu.Barrier(num_arrivals=2)] * 4],
            collective_axes="thread",
        )

    def body(refs: Any, stages: Any, buffers: Any, barriers: Any) -> None:
        thread = lax.axis_index("thread")

        @pl.when(thread < 2)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            _consume(launch, refs, stages, buffers, barriers, interpret)

        @pl.when(thread == 2)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            _produce(launch, refs[1], refs[2], refs[4 : 4 + 2 * num_pools], stages)

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((launch.num_tokens, HEADS, WIDTH), jnp.float32),
        grid=(launch.num_tokens,),
        grid_names=("token",),
        num_threads=3,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _produce(launch: _Launch, row_gmem: Any, count_gmem: Any, pools: Any, stages: Any) -> None:
    """Copies the rows of each tile, as soon as both consumers have widened what lay there."""
    token = lax.axis_index("token")
    ring, recent, *entries = (pools[i : i + 2] for i in range(0, len(pools), 2))
    num_entry_tiles = count_gmem[token] - launch.num_window_tiles

    def copy(tile: Any, stage: Any, at: Any, sources: Any) -> None:
        codes_smem, scale_smem, full, _ = stage

        def one(i: jax.Array, source: jax.Array, pool: Any) -> None:
            codes_gmem, scale_gmem = pool
            plgpu.copy_gmem_to_smem(codes_gmem.at[source], codes_smem.at[at, i], full.at[at])
            plgpu.copy_gmem_to_smem(scale_gmem.at[source], scale_smem.at[at, i], full.at[at])

        @pl.loop(0, ROWS)
        def _(i: jax.Array) -> None:
            row = row_gmem[token, tile * ROWS + i]
            # An absent row copies row 0, which nobody will see.
            for pool, first, end in sources:
                here = (row < end) if first == 0 else (row >= first)
                pl.when(here)(functools.partial(one, i, lax.max(row, first) - first, pool))

    window, entry = stages
    split, end = launch.num_ring_rows, jnp.iinfo(jnp.int32).max

    @pl.loop(0, launch.num_window_tiles)
    def _(i: jax.Array) -> None:
        @pl.when(i >= 1)
        def _() -> None:
            plgpu.barrier_wait(window[3].at[0])

        copy(i, window, 0, [(ring, 0, split), (recent, split, end)])

    if entries:
        num_stages = launch.tile.stages

        @pl.loop(0, num_entry_tiles)
        def _(i: jax.Array) -> None:
            at = lax.rem(i, num_stages)

            @pl.when(i >= num_stages)
            def _() -> None:
                plgpu.barrier_wait(entry[3].at[at])

            copy(launch.num_window_tiles + i, entry, at, [(entries[0], 0, end)])


def _consume(
    launch: _Launch, refs: Any, stages: Any, buffers: Any, barriers: Any, interpret: Any
) -> None:
    """Attention of one token: this thread's half of the channels of its output."""
    token, half = lax.axis_index("token"), lax.axis_index("thread")
    q_gmem, row_gmem, count_gmem, sink_gmem = refs[:4]
    out_gmem = refs[-1]
    q_smem, _, _, _, exchange_smem = buffers
    q_ready, *synchronise = barriers
    plgpu.copy_gmem_to_smem(q_gmem.at[token, :, pl.ds(half * HALF, HALF)], q_smem.at[half], q_ready)
    plgpu.barrier_wait(q_ready)
    per_head = Layout.WGMMA.reduce(1)
    peak = plgpu.load(sink_gmem, layout=per_head, optimized=False) * _LOG2_E
    # The sink is the first term of the denominator, which the two sum up apart.
    total = jnp.where(half == 0, 1.0, 0.0) * jnp.exp2(peak - peak)
    out = plgpu.layout_cast(jnp.zeros((HEADS, HALF), jnp.float32), Layout.WGMMA)

    def tile(i: Any, stage: Any, at: Any, form: Format, carry: Any) -> Any:
        rows = row_gmem.at[token]
        plgpu.barrier_wait(stage[2].at[at])
        _widen(stage[0].at[at], stage[1].at[at], rows, i, form, buffers)
        plgpu.commit_smem()
        plgpu.barrier_arrive(stage[3].at[at])
        return _attend(rows, i, carry, launch.scale, buffers, synchronise, interpret)

    carry = lax.fori_loop(
        0,
        launch.num_window_tiles,
        lambda i, carry: tile(i, stages[0], 0, FP8_32, carry),
        (out, peak, total),
    )
    if len(refs) > 9:

        def step(i: jax.Array, carry: Any) -> Any:
            at = lax.rem(i, launch.tile.stages)
            return tile(launch.num_window_tiles + i, stages[1], at, NVFP4_16, carry)

        carry = lax.fori_loop(0, count_gmem[token] - launch.num_window_tiles, step, carry)
    out, _, total = carry
    exchange_smem[half] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive_and_wait(synchronise[1])
    total += plgpu.load(exchange_smem.at[1 - half], layout=per_head)
    out = out / lax.broadcast_in_dim(total, out.shape, [0])
    plgpu.store(out_gmem.at[token, :, pl.ds(half * HALF, HALF)], out, optimized=False)


def _widen(
    codes_smem: Any, scale_smem: Any, row_gmem: Any, tile: Any, form: Format, buffers: Any
) -> None:
    """This thread's channels of a tile of rows, in bfloat16; absent rows become zero."""
    half = lax.axis_index("thread")
    _, wide_smem, _, scale_t_smem, _ = buffers
    group = form.block[1]
    num_groups = HALF // group
    layout = Layout.WGMMA_UPCAST_2X
    # Turned over, so that the scales of a group of channels lie together.
    scales = plgpu.load(
        scale_smem.at[:, pl.ds(half * num_groups, num_groups)], layout=Layout.WGMMA, optimized=False
    )
    turned = scale_t_smem.at[half, pl.ds(0, num_groups)].transpose((1, 0))
    plgpu.store(turned, scale_values(scales), optimized=False)
    plgpu.commit_smem()
    present = plgpu.load(
        row_gmem.at[pl.ds(tile * ROWS, ROWS)], layout=layout.reduce(1), optimized=False
    )

    # A loop keeps the addresses of all the channels out of the registers.
    @pl.loop(0, HALF // CHANNELS)
    def _(i: jax.Array) -> None:
        channels = pl.ds(i * CHANNELS, CHANNELS)
        codes = plgpu.load(codes_smem.at[:, half, channels], layout=layout, optimized=False)
        values = code_values(codes)
        parts = []
        for g in range(CHANNELS // group):
            part = values[:, g * group : (g + 1) * group]
            scale = plgpu.load(
                scale_t_smem.at[half, i * (CHANNELS // group) + g],
                layout=layout.reduce(1),
                optimized=False,
            )
            part *= lax.broadcast_in_dim(scale, part.shape, [0])
            is_present = lax.broadcast_in_dim(present, part.shape, [0]) >= 0
            parts.append(jnp.where(is_present, part, 0))
        wide_smem[half, :, channels] = parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)


def _attend(
    row_gmem: Any,
    tile: Any,
    carry: Any,
    scale: float,
    buffers: Any,
    synchronise: Any,
    interpret: Any,
) -> Any:
    """Output, maximum and denominator after one more tile of rows."""
    half = lax.axis_index("thread")
    q_smem, wide_smem, p_smem, _, exchange_smem = buffers
    is_wide, has_peak, has_weights, is_done = synchronise
    out, peak, total = carry
    per_head = Layout.WGMMA.reduce(1)
    share = pl.ds(half * SHARE, SHARE)
    plgpu.barrier_arrive_and_wait(is_wide)

    def products(accumulator: Any) -> jax.Array:
        # A loop, too, keeps descriptors of every operand out of the registers.
        @pl.loop(0, 2)
        def _(part: jax.Array) -> None:
            rows = wide_smem.at[part, share].transpose((1, 0))
            plgpu.wgmma(accumulator, q_smem.at[part], rows)

        return accumulator[...]

    logits = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((HEADS, SHARE), jnp.float32)) * (
        scale * _LOG2_E
    )
    present = plgpu.load(
        row_gmem.at[pl.ds(tile * ROWS + half * SHARE, SHARE)],
        layout=Layout.WGMMA.reduce(0),
        optimized=False,
    )
    is_present = lax.broadcast_in_dim(present, logits.shape, [1]) >= 0
    logits = jnp.where(is_present, logits, -jnp.inf)
    mine = jnp.maximum(peak, jnp.max(logits, axis=1))
    exchange_smem[half] = mine
    plgpu.commit_smem()
    plgpu.barrier_arrive_and_wait(has_peak)
    new_peak = jnp.maximum(mine, plgpu.load(exchange_smem.at[1 - half], layout=per_head))
    correction = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
    total = total * correction + jnp.sum(weights, axis=1)
    p_smem[:, share] = weights.astype(jnp.bfloat16)
    out = out * lax.broadcast_in_dim(correction, out.shape, [0])
    plgpu.commit_smem()
    plgpu.barrier_arrive_and_wait(has_weights)
    out = _accumulate(out, p_smem, wide_smem.at[half], interpret)
    # Rows and weights are overwritten in the next step.
    plgpu.barrier_arrive_and_wait(is_done)
    return out, new_peak, total


def _accumulate(out: jax.Array, weights: Any, values: Any, interpret: Any) -> jax.Array:
    def add(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, values)

    if interpret is None:
        result: Any = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(out))
        return result

    # The interpreter cannot start from values, and the sum is the same.
    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, weights, values)
        return accumulator[...]

    return out + pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((HEADS, HALF), jnp.float32))
