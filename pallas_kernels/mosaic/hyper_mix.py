"""Finish one sub-layer on four residual streams and start the next, as two GPU kernels.

    1. grid (64 channels, 64 tokens): one pass over the streams
         streams [4][64, 64] and the output by TMA --registers--> new streams --TMA--> memory
         new streams x 24 rows of `fn` on the tensor core; squares summed; the collapse on the way
       leaves sums over its channels for each token: [channel tiles, T, 24] and [channel tiles, T]
    2. grid (64 tokens): adds those up in order; norm, sigmoids and Sinkhorn on vectors of tokens

Bound: streams read and written once, 2 * 8 * D bytes a token, output and input 4 * D.

*Why two bfloat16 parts*: new streams are bfloat16, and `fn` is split into the nearest bfloat16 and
the nearest to what that leaves, so the tensor core sums products that hold 16 bits of `fn`.

*Why one order*: sums run over channels in tiles of 64, whatever the number of tokens.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mix import Mix
from pallas_kernels.mosaic.widen import Layout, tiled
from pallas_kernels.targets import Target

STREAMS = 4
ROWS = STREAMS * (2 + STREAMS)
"""Rows of `fn`: weights before, weights after, and the square between streams."""
TOKENS, CHANNELS = 64, 64
_PART = 32
"""Channels held in registers at a time."""
_NORM_EPS = 1e-20
_PER_TOKEN = Layout.WGMMA.reduce(1)


class _Sinkhorn(NamedTuple):
    iterations: int
    eps: float


def hyper_mix(
    streams: jax.Array,
    output: jax.Array | None,
    mix: Mix | None,
    pre: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    iterations: int,
    eps: float,
    target: Target,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, Mix]:
    """See `pallas_kernels.ops.hyper_mix`.

    Raises:
        NotImplementedError: there are not four streams in bfloat16, or their width is no multiple
            of 64.
    """
    del target
    num_tokens, num_streams, width = streams.shape
    if num_streams != STREAMS or width % CHANNELS:
        raise NotImplementedError(
            f"streams are {streams.shape}; expected {STREAMS} of a multiple of {CHANNELS} channels"
        )
    for name, array in (("streams", streams), ("output", output)):
        if array is not None and array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} is {array.dtype}; the tensor core takes bfloat16")
    if not num_tokens:
        nothing = Mix(pre, pre, jnp.zeros((0, STREAMS, STREAMS), jnp.float32))
        return streams, jnp.zeros((0, width), streams.dtype), nothing
    # Weights are vectors over tokens: 4 before, then 4 after and 16 between streams.
    weights = [pre]
    if mix is not None:
        weights += [mix.post, mix.comb.reshape(num_tokens, -1)]
    weight = jnp.pad(jnp.concatenate(weights, axis=1).T, ((0, 0), (0, -num_tokens % TOKENS)))
    args = [streams, weight, _two_parts(fn)]
    if output is not None:
        args.append(output)
    *made, sums, squares = _pass(streams.shape, output is not None, interpret)(*args)
    coefficients = _coefficients(sums.shape, STREAMS * width, _Sinkhorn(iterations, eps), interpret)
    columns = coefficients(sums, squares, scale, base)[:, :num_tokens].T
    following = Mix(
        columns[:, :STREAMS],
        columns[:, STREAMS : 2 * STREAMS],
        columns[:, 2 * STREAMS :].reshape(num_tokens, STREAMS, STREAMS),
    )
    new_streams = made[1] if output is not None else streams
    return new_streams, made[0], following


def _two_parts(fn: jax.Array) -> jax.Array:
    """[48, S * D] bfloat16 whose upper and lower halves sum to `fn` [24, S * D]."""
    # The barrier keeps XLA from computing the remainder as zero.
    high = lax.optimization_barrier(fn.astype(jnp.bfloat16))
    return jnp.concatenate([high, (fn - high.astype(jnp.float32)).astype(jnp.bfloat16)])


def _pass(shape: tuple[int, ...], has_output: bool, interpret: Any) -> Any:
    """Kernel 1: collapsed input, new streams if there is an output, sums and squares."""
    num_tokens, _, width = shape
    grid = (width // CHANNELS, -(-num_tokens // TOKENS))
    tile = (TOKENS, CHANNELS)

    def kernel(*refs: Any) -> None:
        if has_output:
            streams_gmem, weight_gmem, fn_gmem, output_gmem, *rest = refs
        else:
            (streams_gmem, weight_gmem, fn_gmem, *rest), output_gmem = refs, None
        *outs, sums_gmem, squares_gmem = rest[: 3 + has_output]
        stream_smem, other_smem, fn_smem, ready = rest[3 + has_output :]
        column, row = lax.axis_index("channels"), lax.axis_index("tokens")
        channels = pl.ds(column * CHANNELS, CHANNELS)
        tokens = pl.ds(row * TOKENS, TOKENS)
        for j in range(STREAMS):
            plgpu.copy_gmem_to_smem(streams_gmem.at[tokens, j, channels], stream_smem.at[j], ready)
            at = pl.ds(j * width + column * CHANNELS, CHANNELS)
            plgpu.copy_gmem_to_smem(fn_gmem.at[:, at], fn_smem.at[j], ready)
        if output_gmem is not None:
            plgpu.copy_gmem_to_smem(output_gmem.at[tokens, channels], other_smem, ready)
        plgpu.barrier_wait(ready)

        def weight(i: int) -> jax.Array:
            vector = plgpu.load(weight_gmem.at[i, tokens], layout=_PER_TOKEN, optimized=False)
            return lax.broadcast_in_dim(vector, (TOKENS, _PART), [0])

        squares = plgpu.layout_cast(jnp.zeros((TOKENS,), jnp.float32), _PER_TOKEN)
        for part in range(CHANNELS // _PART):
            here = pl.ds(part * _PART, _PART)

            def load(ref: Any) -> jax.Array:
                return plgpu.load(ref, layout=Layout.WGMMA).astype(jnp.float32)

            held = [load(stream_smem.at[j, :, here]) for j in range(STREAMS)]
            if output_gmem is not None:
                held = _expanded(held, load(other_smem.at[:, here]), weight)
                for j, stream in enumerate(held):
                    stream_smem[j, :, here] = stream
                held = [stream.astype(jnp.float32) for stream in held]
            collapsed = held[0] * weight(0)
            for j in range(1, STREAMS):
                collapsed += held[j] * weight(j)
            for stream in held:
                squares += jnp.sum(stream * stream, axis=1)
            other_smem[:, here] = collapsed.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(other_smem, outs[0].at[tokens, channels])
        if output_gmem is not None:
            for j in range(STREAMS):
                plgpu.copy_smem_to_gmem(stream_smem.at[j], outs[1].at[tokens, j, channels])

        def products(accumulator: Any) -> Any:
            for j in range(STREAMS):
                plgpu.wgmma(accumulator, stream_smem.at[j], fn_smem.at[j].transpose((1, 0)))
            return accumulator[...]

        both = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((TOKENS, 2 * ROWS), jnp.float32))
        sums = both[:, :ROWS] + both[:, ROWS:]
        plgpu.store(sums_gmem.at[column, tokens], sums, optimized=False)
        plgpu.store(squares_gmem.at[column, tokens], squares, optimized=False)
        plgpu.wait_smem_to_gmem(0)

    padded = grid[1] * TOKENS
    outs = [jax.ShapeDtypeStruct((num_tokens, width), jnp.bfloat16)]
    if has_output:
        outs.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    outs.append(jax.ShapeDtypeStruct((grid[0], padded, ROWS), jnp.float32))
    outs.append(jax.ShapeDtypeStruct((grid[0], padded), jnp.float32))
    return plgpu.kernel(
        kernel,
        out_type=outs,
        grid=grid,
        grid_names=("channels", "tokens"),
        scratch_types=[
            plgpu.SMEM((STREAMS, *tile), jnp.bfloat16, transforms=tiled(16, _PART)),
            plgpu.SMEM(tile, jnp.bfloat16, transforms=tiled(16, _PART)),
            plgpu.SMEM((STREAMS, 2 * ROWS, CHANNELS), jnp.bfloat16, transforms=tiled(16, _PART)),
            plgpu.Barrier(num_arrivals=2 * STREAMS + has_output),
        ],
        interpret=interpret,
    )


def _expanded(held: list[jax.Array], output: jax.Array, weight: Any) -> list[jax.Array]:
    """Streams after `output` was added: comb sums over its first index, the old streams."""
    made = []
    for k in range(STREAMS):
        new = output * weight(STREAMS + k)
        for j in range(STREAMS):
            new += held[j] * weight(2 * STREAMS + STREAMS * j + k)
        made.append(new.astype(jnp.bfloat16))
    return made


def _coefficients(
    shape: tuple[int, ...], num_channels: int, sinkhorn: _Sinkhorn, interpret: Any
) -> Any:
    """Kernel 2: [24, T] coefficients from the sums [channel tiles, T, 24] and squares."""
    num_tiles, num_tokens, _ = shape

    def kernel(
        sums_gmem: Any, squares_gmem: Any, scale_gmem: Any, base_gmem: Any, out_gmem: Any
    ) -> None:
        tokens = pl.ds(lax.axis_index("tokens") * TOKENS, TOKENS)

        def add(tile: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            columns = [sums_gmem.at[tile, tokens, i] for i in range(ROWS)]
            columns.append(squares_gmem.at[tile, tokens])
            more = (plgpu.load(c, layout=_PER_TOKEN, optimized=False) for c in columns)
            return tuple(total + one for total, one in zip(_laid_out(totals), more, strict=True))

        zero = jnp.zeros((TOKENS,), jnp.float32)
        *sums, squares = lax.fori_loop(0, num_tiles, add, _laid_out([zero] * (ROWS + 1)))
        inverse_norm = lax.rsqrt(squares * (1.0 / num_channels) + _NORM_EPS)

        def logit(i: int) -> jax.Array:
            return sums[i] * inverse_norm * scale_gmem[min(i // STREAMS, 2)] + base_gmem[i]

        def write(i: int, value: jax.Array) -> None:
            plgpu.store(out_gmem.at[i, tokens], value, optimized=False)

        for i in range(STREAMS):
            write(i, _sigmoid(logit(i)) + sinkhorn.eps)
            write(STREAMS + i, 2.0 * _sigmoid(logit(STREAMS + i)))
        square = [logit(2 * STREAMS + i) for i in range(STREAMS * STREAMS)]
        for i, value in enumerate(_balanced(square, sinkhorn)):
            write(2 * STREAMS + i, value)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((ROWS, num_tokens), jnp.float32),
        grid=(num_tokens // TOKENS,),
        grid_names=("tokens",),
        interpret=interpret,
    )


def _laid_out(vectors: Any) -> tuple[jax.Array, ...]:
    """Loop variables with a layout that is given: the compiler would search long for so many."""
    return tuple(plgpu.layout_cast(vector, _PER_TOKEN) for vector in vectors)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _balanced(square: list[jax.Array], sinkhorn: _Sinkhorn) -> Any:
    """Sinkhorn on a square of vectors, row by row; ends on columns."""
    for first in range(0, STREAMS * STREAMS, STREAMS):
        row = square[first : first + STREAMS]
        peak = functools.reduce(jnp.maximum, row)
        row = [jnp.exp(value - peak) for value in row]
        share = 1.0 / sum(row)
        square[first : first + STREAMS] = [value * share + sinkhorn.eps for value in row]

    def columns(square: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total = [sum(square[k::STREAMS]) + sinkhorn.eps for k in range(STREAMS)]
        return tuple(value / total[i % STREAMS] for i, value in enumerate(square))

    def both(_: Any, square: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        square = _laid_out(square)
        total = [
            sum(square[STREAMS * j : STREAMS * (j + 1)]) + sinkhorn.eps for j in range(STREAMS)
        ]
        return _laid_out(columns(tuple(v / total[i // STREAMS] for i, v in enumerate(square))))

    return lax.fori_loop(0, sinkhorn.iterations - 1, both, _laid_out(columns(tuple(square))))
