"""The door: every operation of the package, its meaning and its checks.

An operation is one noun in several places, always spelled the same: a function here, its meaning in
`reference/` and, for some, a GPU kernel in `mosaic/`. Callers see only this module, and choose by
`implementation` (`selection.py`) where there is one. Shapes are written with `T` tokens, `R` rows
(sequences), `H` heads, `D` channels, `E` experts, `K` selected entries, `B` blocks a table, `V`
vocabulary. A wrong call raises `ValueError` naming the argument, what it is and what was
expected, before anything is computed.
"""

import jax

from pallas_kernels.checks import (
    expect,
    expect_both,
    expect_distinct,
    expect_entries,
    expect_integers,
    expect_range,
    expect_rows,
    expect_sampling,
    expect_streams,
    format_name,
)
from pallas_kernels.history import TokenHistory
from pallas_kernels.mix import Mix
from pallas_kernels.mosaic import cache_append as _cache_append_sm90
from pallas_kernels.mosaic import grouped_matmul as _grouped_matmul_sm90
from pallas_kernels.mosaic import hyper_mix as _hyper_mix_sm90
from pallas_kernels.mosaic import index_topk as _index_topk_sm90
from pallas_kernels.mosaic import sample_tokens as _sample_tokens_sm90
from pallas_kernels.mosaic import scaled_matmul as _scaled_matmul_sm90
from pallas_kernels.mosaic import sparse_attention as _sparse_attention_sm90
from pallas_kernels.reference import cache_append as _cache_append
from pallas_kernels.reference import grouped_matmul as _grouped_matmul
from pallas_kernels.reference import hyper_mix as _hyper_mix
from pallas_kernels.reference import index_topk as _index_topk
from pallas_kernels.reference import sample_tokens as _sample_tokens
from pallas_kernels.reference import scaled_matmul as _scaled_matmul
from pallas_kernels.reference import sparse_attention as _sparse_attention
from pallas_kernels.scaled_array import Format, ScaledArray
from pallas_kernels.selection import Implementation, run

Packed = ScaledArray | jax.Array
"""A quantised array or, where nothing is quantised, a plain one of the same shape."""


def scaled_matmul(
    x: jax.Array,
    weight: Packed,
    *,
    activation_format: Format | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`x [..., K]` times the transpose of `weight [N, K]`, float32 `[..., N]`.

    Accumulates in float32. `activation_format` quantises and widens `x` first; None leaves it.
    """
    expect(weight.ndim == 2, "weight", weight.shape, "[N, K]")
    expect(x.shape[-1] == weight.shape[1], "x", x.shape, f"[..., {weight.shape[1]}]")
    return run(
        "scaled_matmul",
        implementation,
        {"sm90": _scaled_matmul_sm90.scaled_matmul},
        _scaled_matmul.scaled_matmul,
        x,
        weight,
        activation_format=activation_format,
    )


def grouped_matmul(
    x: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    activation_format: Format | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Weighted sum of the chosen experts' gated feed-forward outputs, float32 [T, D].

    Expert e computes `w2[e] @ (g * silu(min(w1[e] x, limit)) * clip(w3[e] x, -limit, limit))`
    with its route weight g applied before the last product.

    Args:
        x: [T, D].
        expert_index: [T, K] int32, experts of each token, no expert twice.
        expert_weight: [T, K] float32; a weight of 0 switches the pair off (padding tokens).
        w1, w3: [E, F, D].  w2: [E, D, F].
        limit: clamp of gate (from above) and up branch (both sides).
        activation_format: quantises the inputs of both products; None leaves them.
    """
    expect(w1.ndim == 3, "w1", w1.shape, "[E, F, D]")
    num_experts, ffn, width = w1.shape
    expect(x.ndim == 2 and x.shape[1] == width, "x", x.shape, f"[T, {width}]")
    expect(w3.shape == w1.shape, "w3", w3.shape, str(w1.shape))
    expect(w2.shape == (num_experts, width, ffn), "w2", w2.shape, f"{(num_experts, width, ffn)}")
    expect(
        expert_index.shape == expert_weight.shape and expert_index.shape[0] == x.shape[0],
        "expert_index",
        expert_index.shape,
        f"[{x.shape[0]}, K] like expert_weight {expert_weight.shape}",
    )
    expect_integers(expert_index=expert_index)
    expect_range("expert_index", expert_index, 0, num_experts)
    return run(
        "grouped_matmul",
        implementation,
        {"sm90": _grouped_matmul_sm90.grouped_matmul},
        _grouped_matmul.grouped_matmul,
        x,
        expert_index,
        expert_weight,
        w1,
        w3,
        w2,
        limit=limit,
        activation_format=activation_format,
    )


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
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, Mix]:
    """Finish one sub-layer and start the next, for S residual streams.

    Adds the previous sub-layer's `output` [T, D] to `streams` [T, S, D] with its `mix` (both None:
    nothing is pending), then gives the new streams, the next sub-layer's input [T, D] collapsed
    with `pre` [T, S], and the next sub-layer's own `Mix` of the new streams.

    Args:
        fn: [S * (2 + S), S * D] float32.  scale: [3].  base: [S * (2 + S)].
        iterations: Sinkhorn rounds, the first included.  eps: added in pre and in Sinkhorn.
    """
    expect_streams(streams, output, pre)
    _, num_streams, width = streams.shape
    rows = num_streams * (2 + num_streams)
    expect(fn.shape == (rows, num_streams * width), "fn", fn.shape, f"[{rows}, S * D]")
    expect(base.shape == (rows,), "base", base.shape, f"[{rows}]")
    expect(scale.shape == (3,), "scale", scale.shape, "[3]")
    expect_both("mix", mix, "output", output)
    return run(
        "hyper_mix",
        implementation,
        {"sm90": _hyper_mix_sm90.hyper_mix},
        _hyper_mix.hyper_mix,
        streams,
        output,
        mix,
        pre,
        fn,
        scale,
        base,
        iterations=iterations,
        eps=eps,
    )


def hyper_finish(streams: jax.Array, output: jax.Array, mix: Mix) -> jax.Array:
    """Only the first half of `hyper_mix`: streams [T, S, D] after `output` [T, D] was added."""
    expect_streams(streams, output, mix.post)
    return _hyper_mix.expand(streams, output, mix)


def hyper_collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """Only the middle of `hyper_mix`: streams [T, S, D] summed with weights `pre` [T, S]."""
    expect_streams(streams, None, pre)
    return _hyper_mix.collapse(streams, pre)


def cache_append(
    pool: Packed,
    values: jax.Array,
    outer: jax.Array,
    inner: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> Packed:
    """Write `values` [T, ...] to `pool[outer, inner]`, in the format of the pool.

    Args:
        pool: [P, L, ...] blocks or rings; donate it to have it written in place.
        outer: [T] int32 block or slot; negative or past the end means the row is not written.
        inner: [T] int32 place inside it. No place may be written twice in one call.
    """
    expect(values.shape[1:] == pool.shape[2:], "values", values.shape, f"[T, {pool.shape[2:]}]")
    expect(outer.shape == inner.shape == values.shape[:1], "outer", outer.shape, "[T] like inner")
    expect_integers(outer=outer, inner=inner)
    expect_range("inner", inner, 0, pool.shape[1])
    is_written = (outer >= 0) & (outer < pool.shape[0])
    expect_distinct("place (outer, inner)", outer, inner, where=is_written)
    return run(
        "cache_append",
        implementation,
        {"sm90": _cache_append_sm90.cache_append},
        _cache_append.cache_append,
        pool,
        values,
        outer,
        inner,
    )


def sparse_attention(
    q: jax.Array,
    ring: Packed,
    recent: Packed,
    history: TokenHistory,
    entries: Packed | None,
    entry_index: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Attention of all heads over one latent per entry, key and value at once, float32 [T, H, D].

    A token sees the last `window` tokens of its sequence, itself included, and the selected
    compressed entries, under one softmax whose denominator also holds `exp(sink)`. An entry that
    is absent contributes nothing; a token without any entry gives zero.

    Args:
        q: [T, H, D].
        ring: [num_slots, ring_length, D] window entries before this step.
        recent: [T, D] window entries of this step's tokens, in the format of the ring.
        history: where each token stands in its sequence.
        entries: [num_blocks, entries_per_block, D] compressed entries, or None.
        entry_index: [T, K] int32 flat index `block * entries_per_block + offset`; -1 is absent.
        sink: [H] float32.
        window: number of window tokens, at most `ring_length + 1`.
        scale: multiplies the dot products, not the sink.
    """
    expect(q.ndim == 3, "q", q.shape, "[T, H, D]")
    _, num_heads, width = q.shape
    # The token itself never comes from the ring.
    reaches = ring.ndim == 3 and ring.shape[1] >= window - 1
    expect(
        reaches and ring.shape[-1] == width,
        "ring",
        ring.shape,
        f"[S, L, {width}], L at least {window - 1}",
    )
    expect(
        format_name(recent) == format_name(ring),
        "recent",
        format_name(recent),
        f"{format_name(ring)}",
    )
    expect(recent.shape == (q.shape[0], width), "recent", recent.shape, f"[T, {width}]")
    expect(sink.shape == (num_heads,), "sink", sink.shape, f"[{num_heads}]")
    expect_both("entry_index", entry_index, "entries", entries)
    if entries is not None and entry_index is not None:
        expect_entries(entries, entry_index, q.shape[0], width)
    expect_range("history.slot", history.slot, 0, ring.shape[0])
    return run(
        "sparse_attention",
        implementation,
        {"sm90": _sparse_attention_sm90.sparse_attention},
        _sparse_attention.sparse_attention,
        q,
        ring,
        recent,
        history,
        entries,
        entry_index,
        sink,
        window=window,
        scale=scale,
    )


def index_topk(
    q: Packed,
    head_weight: jax.Array,
    keys: Packed,
    block_table: jax.Array,
    row: jax.Array,
    num_visible: jax.Array,
    candidates: jax.Array | None = None,
    *,
    k: int,
    candidate_block_size: int = 1,
    num_candidate_blocks: int = 0,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """The best `k` entries of each token by `sum_h w_h * max(0, q_h . key)`, ascending, then -1.

    Equal scores: the lower index wins. Entries at or past `num_visible` do not exist.

    Args:
        q: [T, H, D].  head_weight: [T, H] float32.
        keys: [num_blocks, entries_per_block, D].
        block_table: [R, B] int32.  row: [T] int32, row of each token.
        num_visible: [T] int32, entries that the token may see.
        candidates: [T, C] int32 candidate blocks to stay inside, ascending, then -1, or None.
        candidate_block_size: entries in a candidate block.
        num_candidate_blocks: if not 0, also return that many candidate blocks per token: those
            of the best scores, the block of the newest visible entry always among them. The
            token's own selection is not restricted to them.

    Returns:
        [T, k] int32 entry numbers within the sequence, and [T, num_candidate_blocks] int32
        ascending, then -1 (None if not asked for).
    """
    expect(keys.ndim == 3, "keys", keys.shape, "[num_blocks, entries_per_block, D]")
    expect(q.ndim == 3 and q.shape[-1] == keys.shape[-1], "q", q.shape, f"[T, H, {keys.shape[-1]}]")
    expect(block_table.ndim == 2, "block_table", block_table.shape, "[R, B]")
    expect(head_weight.shape == q.shape[:2], "head_weight", head_weight.shape, f"{q.shape[:2]}")
    expect(row.shape == num_visible.shape == q.shape[:1], "row", row.shape, "[T] like num_visible")
    expect_integers(block_table=block_table, row=row, num_visible=num_visible)
    expect_range("block_table", block_table, 0, keys.shape[0])
    expect_range("row", row, 0, block_table.shape[0])
    expect(k > 0, "k", k, "at least 1")
    expect(candidate_block_size > 0, "candidate_block_size", candidate_block_size, "at least 1")
    if candidates is not None:
        fits = candidates.ndim == 2 and candidates.shape[0] == q.shape[0]
        expect(fits, "candidates", candidates.shape, f"[{q.shape[0]}, C]")
    return run(
        "index_topk",
        implementation,
        {"sm90": _index_topk_sm90.index_topk},
        _index_topk.index_topk,
        q,
        head_weight,
        keys,
        block_table,
        row,
        num_visible,
        candidates,
        k=k,
        candidate_block_size=candidate_block_size,
        num_candidate_blocks=num_candidate_blocks,
    )


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """One token per row of `logits` [M, V], [M] int32.

    Temperature 0 takes the largest logit (the lower id on a tie). Otherwise the `top_k` best (0:
    all) are kept, of these the smallest set whose mass reaches `top_p`, and one is drawn with a
    random number that depends on `seed` [M, 2] uint32 (high, low) and `position` [M] alone.
    """
    expect_sampling(logits, temperature, top_k, top_p, seed, position=position)
    return run(
        "sample_tokens",
        implementation,
        {"sm90": _sample_tokens_sm90.sample_tokens},
        _sample_tokens.sample_tokens,
        logits,
        temperature,
        top_k,
        top_p,
        seed,
        position,
    )


def propose_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    anchor: jax.Array,
    position: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Draft tokens: `sample_tokens` with random numbers of their own.

    These depend on `seed`, on `anchor` [M], the position of the last known token, and on
    `position` [M], the one that is drafted.

    Returns:
        [M] int32 tokens and [M] float32, with which probability each was drawn (1 at
        temperature 0).
    """
    expect_sampling(logits, temperature, top_k, top_p, seed, anchor=anchor, position=position)
    return run(
        "propose_tokens",
        implementation,
        {"sm90": _sample_tokens_sm90.propose_tokens},
        _sample_tokens.propose_tokens,
        logits,
        temperature,
        top_k,
        top_p,
        seed,
        anchor,
        position,
    )


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
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Which drafts of each row (sequence) are accepted, and the token that follows them.

    Exact rejection sampling: whatever the drafts, tokens follow the distribution of `logits` after
    temperature, top_k and top_p. From the first on, a draft drawn with probability p that the
    target gives probability q is accepted with probability min(1, q / p). At the first refusal
    the next token is drawn from the positive part of target minus draft; after the last draft,
    as `sample_tokens` would. At temperature 0 drafts are accepted while they are the best token.

    Args:
        logits: [T, V] target logits after each verified token, rows one after another.
        row: [T] int32, row of each token; padding names any row.
        first: [R] int32, index of each row's first token; its drafts are the tokens after it.
        draft_tokens: [R, N] int32.  draft_probability: [R, N] float32, from `propose_tokens`.
        num_drafts: [R] int32, 0 to N, drafts that are verified; the others do not matter.
        draft_logits: [num_slots, N, V], those that the drafts were drawn from.
        slot: [R] int32, place of each row in `draft_logits`.
        temperature, top_k, top_p: [R].  seed: [R, 2] uint32 (high, low).
        position: [R] int32, the position of each row's first draft.

    Returns:
        [R] int32 number of accepted drafts and [R] int32 next token. A row without tokens of its
        own gets 0 and an arbitrary token.
    """
    expect(logits.ndim == 2, "logits", logits.shape, "[T, V]")
    num_tokens, vocab_size = logits.shape
    num_rows, drafts_max = draft_tokens.shape
    expect(row.shape == (num_tokens,), "row", row.shape, f"[{num_tokens}]")
    expect(
        draft_probability.shape == draft_tokens.shape,
        "draft_probability",
        draft_probability.shape,
        f"[{num_rows}, {drafts_max}]",
    )
    fits = draft_logits.ndim == 3 and draft_logits.shape[1:] == (drafts_max, vocab_size)
    expect(fits, "draft_logits", draft_logits.shape, f"[S, {drafts_max}, {vocab_size}]")
    columns = {"first": first, "num_drafts": num_drafts, "slot": slot, "position": position}
    expect_rows(num_rows, temperature, top_k, top_p, seed, **columns)
    operands = (logits, row, first, draft_tokens, draft_probability, num_drafts, draft_logits)
    operands += (slot, temperature, top_k, top_p, seed, position)
    return run(
        "accept_tokens",
        implementation,
        {"sm90": _sample_tokens_sm90.accept_tokens},
        _sample_tokens.accept_tokens,
        *operands,
    )
