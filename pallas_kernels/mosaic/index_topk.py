"""Which entries each token attends to, as a GPU kernel that keeps no matrix of scores.

    grid (tokens); block: one token, which walks over *positions*: all visible entries, or those of
    its candidate blocks one after another

    tile   64 positions: keys by TMA --widen--> bfloat16 [64, 128] x queries^T [128, 32 heads],
           then sum_h w_h max(0, .) gives 64 scores, kept in shared memory as ordered integers
    chunk  64 tiles: what may still be among the best is appended to a list in shared memory

Scores become integers of the same order, so the k-th best of a set is found by halving: 32 counts
of a vector. A position is appended if it is above the k-th best of all before it and not below the
k-th best of its chunk. That is a few hundred of the 4096 of a chunk, soon fewer, and they are
appended one by one. When the list is full, and at the end, only its own k best stay.

Ties: positions come in ascending order and stay so in the list; of equal ones at the k-th place the
first stay. Candidate blocks are chosen the same way from the best scores of blocks of eight.

Bound: 68 bytes of every visible key, once for a token (rows of one sequence share them in the
cache), and 2 * 32 * 128 operations a key.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ordered_list import COLUMNS, NOTHING, List, append, keep_best, ordered
from pallas_kernels.mosaic.widen import (
    TILE_CHANNELS,
    Layout,
    code_layout,
    code_values,
    kernel_codes,
    tiled,
)
from pallas_kernels.scaled_array import MXFP4_32, ScaledArray, decode
from pallas_kernels.targets import Target

HEADS, WIDTH = 32, 128
TILE = 64
"""Positions that one tensor-core instruction takes."""
CHUNK_TILES = 64
BLOCK = 8
"""Entries in a candidate block."""
K_MAX, BLOCKS_MAX = 512, 2048
_STAGES = 4


class _Launch(NamedTuple):
    num_tokens: int
    copy_rows: int
    entries_per_block: int
    k: int
    num_blocks: int

    @property
    def wanted(self) -> tuple[int, ...]:
        """Lengths of the lists: entries, then candidate blocks if they are wanted."""
        return (self.k, self.num_blocks) if self.num_blocks else (self.k,)


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
    target: Target,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.ops.index_topk`; `candidates` are ascending, then -1.

    Raises:
        NotImplementedError: another number or width of heads than 32 of 128, other keys than
            MXFP4_32 in blocks of whole tiles, candidate blocks of another size than 8, more than
            512 entries or 2048 blocks wanted, or both made and given candidates.
    """
    del target
    _check(q, keys, candidates, k, candidate_block_size, num_candidate_blocks)
    assert isinstance(keys, ScaledArray)
    num_tokens = num_visible.shape[0]
    if not num_tokens:
        made = jnp.zeros((0, num_candidate_blocks), jnp.int32)
        return jnp.zeros((0, k), jnp.int32), made if num_candidate_blocks else None
    if candidates is None:
        limit, places = num_visible, jnp.zeros((num_tokens, 1), jnp.int32)
    else:
        # Positions are the entries of the candidate blocks in order; only the last can be partial.
        inside = jnp.clip(num_visible[:, None] - candidates * BLOCK, 0, BLOCK)
        limit = jnp.sum(jnp.where(candidates >= 0, inside, 0), axis=1)
        places = jnp.pad(candidates, ((0, 0), (0, -candidates.shape[1] % BLOCK)))
    launch = _Launch(
        num_tokens,
        TILE if candidates is None else BLOCK,
        keys.shape[1],
        k,
        num_candidate_blocks,
    )
    words = lax.bitcast_convert_type(keys.scale, jnp.uint8)
    outs = _kernel(launch, interpret)(
        decode(q, jnp.bfloat16),
        head_weight,
        kernel_codes(keys).reshape(-1, WIDTH),
        # The four exponents of a key as one number.
        lax.bitcast_convert_type(words, jnp.int32).reshape(-1),
        block_table[row],
        limit.astype(jnp.int32),
        jnp.maximum(places, 0),
    )
    chosen = [out.reshape(num_tokens, -1) for out in outs]
    made = chosen[1][:, :num_candidate_blocks] if num_candidate_blocks else None
    return chosen[0][:, :k], made


def _check(
    q: Any, keys: Any, candidates: Any, k: int, block_size: int, num_candidate_blocks: int
) -> None:
    if q.shape[1:] != (HEADS, WIDTH):
        raise NotImplementedError(f"q is {q.shape}; expected {HEADS} heads of {WIDTH}")
    if not isinstance(q, ScaledArray) and q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"q is {q.dtype} and not quantised; the tensor core takes bf16")
    if not isinstance(keys, ScaledArray) or keys.format is not MXFP4_32:
        raise NotImplementedError(f"keys are not {MXFP4_32.name}")
    if keys.shape[1] % TILE:
        raise NotImplementedError(
            f"a block has {keys.shape[1]} keys; expected whole tiles of {TILE}"
        )
    if (candidates is not None or num_candidate_blocks) and block_size != BLOCK:
        raise NotImplementedError(f"candidate blocks hold {block_size} entries; expected {BLOCK}")
    if candidates is not None and num_candidate_blocks:
        raise NotImplementedError("candidates are given and wanted")
    if k > K_MAX or num_candidate_blocks > BLOCKS_MAX:
        raise NotImplementedError(f"{k} entries and {num_candidate_blocks} blocks are wanted")


def _kernel(launch: _Launch, interpret: Any) -> Any:
    rows = [-(-want // COLUMNS) for want in launch.wanted]

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(_body, launch, refs[:7], refs[7:]),
            plgpu.SMEM((HEADS, WIDTH), jnp.bfloat16, transforms=tiled(16)),
            plgpu.SMEM((_STAGES, TILE, WIDTH), jnp.int4, transforms=tiled(4)),
            plgpu.SMEM((_STAGES, TILE), jnp.int32),
            plgpu.SMEM((TILE, WIDTH), jnp.bfloat16, transforms=tiled(16)),
            plgpu.SMEM((CHUNK_TILES, TILE), jnp.int32),
            plgpu.SMEM((CHUNK_TILES, TILE // BLOCK), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2 * TILE // launch.copy_rows, num_barriers=_STAGES),
            [List.memory() for _ in launch.wanted],
        )

    return plgpu.kernel(
        entry,
        out_type=[jax.ShapeDtypeStruct((launch.num_tokens, n, COLUMNS), jnp.int32) for n in rows],
        grid=(launch.num_tokens,),
        grid_names=("token",),
        interpret=interpret,
    )


def _body(
    launch: _Launch,
    refs: Any,
    outs: Any,
    q_smem: Any,
    codes_smem: Any,
    words_smem: Any,
    wide_smem: Any,
    score_smem: Any,
    block_smem: Any,
    q_ready: Any,
    ready: Any,
    memories: Any,
) -> None:
    q_gmem, weight_gmem, codes_gmem, words_gmem, table_gmem, limit_gmem, place_gmem = refs
    token = lax.axis_index("token")
    limit = limit_gmem[token]
    num_tiles = (limit + TILE - 1) // TILE
    plgpu.copy_gmem_to_smem(q_gmem.at[token], q_smem, q_ready)
    plgpu.barrier_wait(q_ready)
    weight = plgpu.load(weight_gmem.at[token], layout=Layout.WGMMA.reduce(0), optimized=False)
    is_restricted = launch.copy_rows == BLOCK

    def copy(tile: jax.Array) -> None:
        at = lax.rem(tile, _STAGES)
        for first in range(0, TILE, launch.copy_rows):
            position = tile * TILE + first
            entry = place_gmem[token, position // BLOCK] * BLOCK if is_restricted else position
            block = table_gmem[token, entry // launch.entries_per_block]
            source = block * launch.entries_per_block + lax.rem(entry, launch.entries_per_block)
            here = pl.ds(first, launch.copy_rows)
            there = pl.ds(source, launch.copy_rows)
            plgpu.copy_gmem_to_smem(codes_gmem.at[there], codes_smem.at[at, here], ready.at[at])
            plgpu.copy_gmem_to_smem(words_gmem.at[there], words_smem.at[at, here], ready.at[at])

    def score(tile: jax.Array) -> None:
        at = lax.rem(tile, _STAGES)
        plgpu.barrier_wait(ready.at[at])
        _widen(codes_smem.at[at], words_smem.at[at], wide_smem)
        plgpu.commit_smem()

        @pl.when(tile + _STAGES < num_tiles)
        def _() -> None:
            copy(tile + _STAGES)

        def products(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, wide_smem, q_smem.transpose((1, 0)))
            return accumulator[...]

        dots = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((TILE, HEADS), jnp.float32))
        dots = jnp.maximum(dots, 0.0) * lax.broadcast_in_dim(weight, dots.shape, [1])
        made = ordered(jnp.sum(dots, axis=1))
        position = plgpu.broadcasted_iota(jnp.int32, (TILE, HEADS), 0, layout=Layout.WGMMA)
        position = jnp.max(position, axis=1) + tile * TILE
        score_smem[lax.rem(tile, CHUNK_TILES)] = jnp.where(position < limit, made, NOTHING)

    lax.fori_loop(0, lax.min(num_tiles, _STAGES), lambda tile, _: copy(tile), None)
    lists = [List(*memory) for memory in memories]
    for one in lists:
        one.clear_from(jnp.int32(0))

    def number(position: jax.Array) -> jax.Array:
        if not is_restricted:
            return position
        return place_gmem[token, position // BLOCK] * BLOCK + lax.rem(position, BLOCK)

    def chunk(index: jax.Array, state: Any) -> Any:
        shape = (CHUNK_TILES, TILE)
        nothing = plgpu.layout_cast(jnp.full(shape, NOTHING, jnp.int32), Layout.WGMMA)
        plgpu.store(score_smem, nothing, optimized=False)
        plgpu.commit_smem()
        first = index * CHUNK_TILES
        last = lax.min(first + CHUNK_TILES, num_tiles)
        lax.fori_loop(first, last, lambda tile, _: score(tile), None)
        plgpu.commit_smem()
        state = list(state)
        state[0] = append(lists[0], state[0], score_smem, first * TILE, launch.k, number)
        if launch.num_blocks:
            first_block = first * (TILE // BLOCK)
            _block_scores(score_smem, block_smem, first_block, (limit - 1) // BLOCK)
            state[1] = append(
                lists[1], state[1], block_smem, first_block, launch.num_blocks, lambda block: block
            )
        return tuple(state)

    num_chunks = (num_tiles + CHUNK_TILES - 1) // CHUNK_TILES
    start = tuple((jnp.int32(0), jnp.int32(NOTHING)) for _ in lists)
    lax.fori_loop(0, num_chunks, chunk, start)
    for one, out_gmem, want in zip(lists, outs, launch.wanted, strict=True):
        keep_best(one, want)
        plgpu.copy_smem_to_gmem(one.numbers.at[pl.ds(0, out_gmem.shape[1])], out_gmem.at[token])
    plgpu.wait_smem_to_gmem(0)


def _widen(codes_smem: Any, words_smem: Any, wide_smem: Any) -> None:
    """bfloat16 [64, 128] values of a tile of keys; a word holds the exponents of a key's groups."""
    layout = code_layout(4)
    words = plgpu.load(words_smem, layout=layout.reduce(1), optimized=False)
    group = MXFP4_32.block[1]
    for first in range(0, WIDTH, TILE_CHANNELS):
        columns = pl.ds(first, TILE_CHANNELS)
        values = code_values(plgpu.load(codes_smem.at[:, columns], layout=layout))
        parts = []
        for g in range(TILE_CHANNELS // group):
            part = values[:, g * group : (g + 1) * group]
            exponent = (words >> (8 * (first // group + g))) & 255
            scale = lax.bitcast_convert_type(exponent << 23, jnp.float32).astype(jnp.bfloat16)
            parts.append(part * lax.broadcast_in_dim(scale, part.shape, [0]))
        wide_smem[:, columns] = jnp.concatenate(parts, axis=1)


def _block_scores(score_smem: Any, block_smem: Any, first: jax.Array, newest: jax.Array) -> None:
    """[64, 8] best scores of the blocks of a chunk; the newest one beats all, absent ones none."""
    scores = plgpu.load(score_smem, layout=Layout.WGMMA, optimized=False)
    shape = (CHUNK_TILES, TILE // BLOCK)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=Layout.WGMMA)
    best = plgpu.layout_cast(jnp.full(shape, NOTHING, jnp.int32), Layout.WGMMA)
    for b in range(TILE // BLOCK):
        one = jnp.max(scores[:, b * BLOCK : (b + 1) * BLOCK], axis=1)
        best = jnp.where(column == b, lax.broadcast_in_dim(one, shape, [0]), best)
    is_newest = first + row * (TILE // BLOCK) + column == newest
    best = jnp.where(is_newest, np.iinfo(np.int32).max, best)
    plgpu.store(block_smem, best, optimized=False)
    plgpu.commit_smem()
