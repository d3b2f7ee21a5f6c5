"""Named shapes of every operation that has a kernel, for tests, reports and benchmarks alike.

Tags: `quick` cases are tiny and odd (padding, one row, nothing at all) and run in the interpreter;
`model` cases have the sizes of DeepSeek-V4.1-Flash and are compiled for GPUs, and run on one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.history import TokenHistory
from pallas_kernels.mix import Mix
from pallas_kernels.scaled_array import (
    FP4_ROW32,
    FP8_32,
    FP8_BLOCK32,
    MXFP4_32,
    NVFP4_16,
    Format,
    encode,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the operation."""


@dataclass(frozen=True)
class Case:
    """One named call of one operation.

    Attributes:
        op: name of the function in `ops`.
        name: unique for the operation.
        tag: `quick` or `model`.
        sizes: what the builder of the operation takes.
    """

    op: str
    name: str
    tag: str
    sizes: dict[str, Any] = field(default_factory=dict)

    def arguments(self, key: jax.Array) -> Arguments:
        """Random arrays of this case."""
        sizes: dict[str, Any] = {}

        def arrays(key: jax.Array) -> tuple[Any, ...]:
            args, static = _BUILDERS[self.op](key, **self.sizes)
            sizes.update(static)
            return args

        return jax.jit(arrays)(key), sizes

    def abstract(self) -> Arguments:
        """Shapes and types of the arrays, nothing allocated."""
        sizes: dict[str, Any] = {}

        def arrays(key: jax.Array) -> tuple[Any, ...]:
            args, static = self.arguments(key)
            sizes.update(static)
            return args

        return jax.eval_shape(arrays, jax.random.key(0)), sizes

    def first_tokens(self, args: tuple[Any, ...], num_tokens: int) -> tuple[Any, ...]:
        """The same call for the first tokens alone, which no later one takes part in."""
        places = _TOKEN_ARGUMENTS[self.op]
        first = [jax.tree.map(lambda a: a[:num_tokens], arg) for arg in args]
        return tuple(first[i] if i in places else arg for i, arg in enumerate(args))


def find(op: str | None = None, tag: str | None = None) -> list[Case]:
    """The cases of an operation and a tag; None stands for all.

    Raises:
        ValueError: there is no such case.
    """
    found = [c for c in CASES if op in (None, c.op) and tag in (None, c.tag)]
    if not found:
        known = ", ".join(sorted({case.op for case in CASES}))
        raise ValueError(f"no case of op {op!r} and tag {tag!r}; known operations: {known}")
    return found


def _scaled_matmul(key: jax.Array, num_rows: int, n: int, k: int, form: Format | None) -> Arguments:
    keys = jax.random.split(key)
    weight = encode(jax.random.normal(keys[0], (n, k)) * k**-0.5, FP8_BLOCK32)
    x = jax.random.normal(keys[1], (num_rows, k)).astype(jnp.bfloat16)
    return (x, weight), {"activation_format": form}


def _grouped_matmul(
    key: jax.Array,
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    width: int,
    ffn: int,
    form: Format | None,
    one_expert: bool = False,
    num_padding: int = 0,
) -> Arguments:
    """`one_expert`: all tokens choose the same ones. The last `num_padding` tokens choose none."""
    keys = jax.random.split(key, 6)
    w1, w3 = (
        encode(jax.random.normal(keys[i], (num_experts, ffn, width)) * width**-0.5, FP4_ROW32)
        for i in range(2)
    )
    w2 = encode(jax.random.normal(keys[2], (num_experts, width, ffn)) * ffn**-0.5, FP4_ROW32)
    affinity = jax.random.normal(keys[3], (1 if one_expert else num_tokens, num_experts))
    _, expert = jax.lax.top_k(affinity, num_chosen)
    expert = jnp.broadcast_to(expert, (num_tokens, num_chosen)).astype(jnp.int32)
    weight = jax.random.uniform(keys[4], expert.shape, minval=0.1)
    is_real = jnp.arange(num_tokens)[:, None] < num_tokens - num_padding
    x = jax.random.normal(keys[5], (num_tokens, width)).astype(jnp.bfloat16)
    args = (x, expert, jnp.where(is_real, weight, 0.0), w1, w3, w2)
    return args, {"limit": 1.5, "activation_format": form}


def _sparse_attention(
    key: jax.Array,
    rows: tuple[tuple[int, int], ...],
    window: int,
    num_selected: int,
    num_blocks: int = 3,
    entries_per_block: int = 64,
    absent_tokens: int = 1,
) -> Arguments:
    """`rows`: first position and number of tokens of each sequence. A fifth of the selected
    entries is absent; the first `absent_tokens` select none."""
    keys = jax.random.split(key, 6)
    heads, width, ring_length = 64, 512, window + 6
    position = jnp.concatenate([jnp.arange(0)] + [first + jnp.arange(n) for first, n in rows])
    lengths = jnp.asarray([n for _, n in rows], jnp.int32)
    num_tokens = position.shape[0]

    def spread(column: list[int]) -> jax.Array:
        return jnp.repeat(jnp.asarray(column, jnp.int32), lengths, total_repeat_length=num_tokens)

    history = TokenHistory(
        position.astype(jnp.int32),
        spread([first for first, _ in rows]),
        spread([slot + 1 for slot in range(len(rows))]),
        jnp.zeros(num_tokens, jnp.int32),
    )
    q = (3 * jax.random.normal(keys[0], (num_tokens, heads, width))).astype(jnp.bfloat16)
    ring = encode(jax.random.normal(keys[1], (len(rows) + 1, ring_length, width)), FP8_32)
    recent = encode(jax.random.normal(keys[2], (num_tokens, width)), FP8_32)
    sink = jax.random.normal(keys[3], (heads,))
    entries = index = None
    if num_selected:
        shape = (num_blocks, entries_per_block, width)
        entries = encode(jax.random.normal(keys[4], shape), NVFP4_16)
        index = jax.random.randint(
            keys[5], (num_tokens, num_selected), -shape[0] * shape[1] // 4, shape[0] * shape[1]
        )
        index = jnp.maximum(index, -1).at[:absent_tokens].set(-1)
    args = (q, ring, recent, history, entries, index, sink)
    return args, {"window": window, "scale": width**-0.5}


def _index_topk(
    key: jax.Array,
    visible: tuple[int, ...],
    k: int,
    context: int,
    num_blocks: int,
    entries_per_block: int = 64,
    num_candidates: int = 0,
    num_candidate_blocks: int = 0,
) -> Arguments:
    """`visible`: entries that each token sees, of its own row. Scores are exact in float32 in any
    order of summation, and many are equal, so the choice is the same for every implementation."""
    keys = jax.random.split(key, 6)
    num_tokens, heads, width = len(visible), 32, 128
    q = encode(jnp.round(jax.random.normal(keys[0], (num_tokens, heads, width))), MXFP4_32)
    shape = (num_blocks, entries_per_block, width)
    stored = encode(jnp.round(jax.random.normal(keys[1], shape)), MXFP4_32)
    weight = jax.random.randint(keys[2], (num_tokens, heads), -4, 12) / 64
    table = jax.random.randint(
        keys[3], (num_tokens, -(-context // entries_per_block)), 0, num_blocks
    )
    args: tuple[Any, ...] = (q, weight, stored, table.astype(jnp.int32))
    args += (jnp.arange(num_tokens, dtype=jnp.int32), jnp.asarray(visible, jnp.int32))
    sizes = {"k": k, "candidate_block_size": 8, "num_candidate_blocks": num_candidate_blocks}
    if num_candidates:
        order = jnp.argsort(jax.random.uniform(keys[4], (num_tokens, -(-context // 8))), axis=1)
        inside = order[:, :num_candidates]
        inside = jnp.where(inside * 8 < args[5][:, None], inside, context)
        inside = jnp.sort(inside, axis=1).astype(jnp.int32)
        args += (jnp.where(inside < context, inside, -1),)
    return args, sizes


def _cache_append(
    key: jax.Array, num_rows: int, width: int, form: Format, num_blocks: int, length: int
) -> Arguments:
    """Every place differs, and the first and the last are written. Of three rows one has nowhere
    to go: block -1, or one past the end."""
    keys = jax.random.split(key, 4)
    pool = encode(jax.random.normal(keys[0], (num_blocks, length, width)), form)
    size = 10.0 ** jax.random.randint(keys[1], (num_rows, 1), -6, 5)
    values = (size * jax.random.normal(keys[2], (num_rows, width))).astype(jnp.bfloat16)
    places = num_blocks * length
    place = jax.random.permutation(keys[3], places - 2)[: max(num_rows - 2, 0)] + 1
    place = jnp.concatenate([jnp.asarray([0, places - 1]), place])[:num_rows]
    number = jnp.arange(num_rows)
    nowhere = jnp.where(number % 2, -1, num_blocks)
    outer = jnp.where(number % 3 == 2, nowhere, place // length)
    return (pool, values, outer.astype(jnp.int32), (place % length).astype(jnp.int32)), {}


def _sample_tokens(
    key: jax.Array,
    vocab_size: int,
    settings: tuple[tuple[float, int, float], ...],
    spread: float = 4.0,
) -> Arguments:
    """`settings`: temperature, top_k and top_p of each row. Logits are whole numbers, so
    many are equal."""
    keys = jax.random.split(key, 2)
    num_rows = len(settings)
    logits = jnp.round(spread * jax.random.normal(keys[0], (num_rows, vocab_size)))
    columns = [jnp.asarray([s[i] for s in settings]) for i in range(3)]
    seed = jax.random.bits(keys[1], (num_rows, 2), jnp.uint32)
    position = jnp.arange(num_rows, dtype=jnp.int32)
    asked = (columns[0], columns[1].astype(jnp.int32), columns[2])
    return (logits, *asked, seed, position), {}


def _hyper_mix(key: jax.Array, num_tokens: int, width: int, has_output: bool = True) -> Arguments:
    keys = jax.random.split(key, 8)
    rows, num_streams = 24, 4
    streams = jax.random.normal(keys[0], (num_tokens, num_streams, width)).astype(jnp.bfloat16)
    pre = jax.random.uniform(keys[1], (num_tokens, num_streams))
    fn = jax.random.normal(keys[2], (rows, num_streams * width)) * (num_streams * width) ** -0.5
    output = mix = None
    if has_output:
        output = jax.random.normal(keys[3], (num_tokens, width)).astype(jnp.bfloat16)
        post = jax.random.uniform(keys[4], (num_tokens, num_streams))
        comb = jax.random.uniform(keys[5], (num_tokens, num_streams, num_streams))
        mix = Mix(pre, post, comb / num_streams)
    scale, base = jax.random.normal(keys[6], (3,)), jax.random.normal(keys[7], (rows,))
    return (streams, output, mix, pre, fn, scale, base), {"iterations": 20, "eps": 1e-6}


_BUILDERS: dict[str, Callable[..., Arguments]] = {
    "scaled_matmul": _scaled_matmul,
    "grouped_matmul": _grouped_matmul,
    "sparse_attention": _sparse_attention,
    "index_topk": _index_topk,
    "hyper_mix": _hyper_mix,
    "cache_append": _cache_append,
    "sample_tokens": _sample_tokens,
}


_TOKEN_ARGUMENTS = {
    "scaled_matmul": (0,),
    "grouped_matmul": (0, 1, 2),
    "sparse_attention": (0, 2, 3, 5),
    "index_topk": (0, 1, 4, 5, 6),
    "hyper_mix": (0, 1, 2, 3),
    # The pool that comes back shows every row.
    "cache_append": (),
    "sample_tokens": (0, 1, 2, 3, 4, 5),
}
"""Which positional arguments have a row for each token, if the result has one, too."""


def _dense(
    name: str, tag: str, num_rows: int, n: int, k: int, form: Format | None = FP8_32
) -> Case:
    sizes = {"num_rows": num_rows, "n": n, "k": k, "form": form}
    return Case("scaled_matmul", name, tag, sizes)


def _experts(
    name: str, tag: str, num_tokens: int, sizes: tuple[int, int, int, int], **more: Any
) -> Case:
    names = ("num_experts", "num_chosen", "width", "ffn")
    given = {"num_tokens": num_tokens, "form": FP8_32, **dict(zip(names, sizes, strict=True))}
    return Case("grouped_matmul", name, tag, given | more)


def _attention(
    name: str, tag: str, rows: list[tuple[int, int]], window: int, num_selected: int, **more: Any
) -> Case:
    sizes = {"rows": tuple(rows), "window": window, "num_selected": num_selected}
    return Case("sparse_attention", name, tag, sizes | more)


def _index(
    name: str, tag: str, visible: list[int], k: int, context: int, num_blocks: int, **more: Any
) -> Case:
    sizes = {"visible": tuple(visible), "k": k, "context": context, "num_blocks": num_blocks}
    return Case("index_topk", name, tag, sizes | more)


def _rows(name: str, tag: str, num_rows: int, form: Format, pool: tuple[int, int, int]) -> Case:
    names = ("num_blocks", "length", "width")
    sizes = {"num_rows": num_rows, "form": form, **dict(zip(names, pool, strict=True))}
    return Case("cache_append", name, tag, sizes)


def _draws(
    name: str, tag: str, vocab_size: int, rows: list[tuple[float, int, float]], **more: Any
) -> Case:
    sizes = {"vocab_size": vocab_size, "settings": tuple(rows)}
    return Case("sample_tokens", name, tag, sizes | more)


_POOL = {"num_blocks": 8192, "entries_per_block": 64}
_TINY, _REAL = (5, 2, 128, 64), (384, 6, 5120, 2304)

CASES: tuple[Case, ...] = (
    _dense("one_row", "quick", 1, 64, 64),
    _dense("odd_rows", "quick", 13, 128, 192),
    _dense("no_rows", "quick", 0, 64, 64),
    _dense("unquantised", "quick", 9, 64, 128, None),
    _dense("decode_wq_b", "model", 64, 32768, 1280),
    _dense("decode_wkv", "model", 64, 512, 5120),
    _dense("decode_wo_b", "model", 64, 5120, 8192),
    _dense("prefill_wq_a", "model", 4096, 1280, 5120),
    _experts("few_rows", "quick", 6, _TINY, num_padding=1),
    _experts("one_expert", "quick", 11, _TINY, one_expert=True),
    _experts("one_token", "quick", 1, _TINY, form=None),
    _experts("no_tokens", "quick", 0, _TINY),
    _experts("only_padding", "quick", 2, _TINY, num_padding=2),
    _experts("decode", "model", 64, _REAL),
    _experts("prefill", "model", 4096, _REAL),
    _attention("two_sequences", "quick", [(0, 1), (9, 1)], 5, 7),
    _attention("window_of_two_tiles", "quick", [(70, 1)], 66, 0),
    _attention("entries_of_three_tiles", "quick", [(3, 1)], 3, 150, absent_tokens=0),
    _attention("no_tokens", "quick", [], 5, 7),
    Case("hyper_mix", "odd_tokens", "quick", {"num_tokens": 5, "width": 128}),
    Case("hyper_mix", "two_tiles", "quick", {"num_tokens": 65, "width": 64}),
    Case("hyper_mix", "first", "quick", {"num_tokens": 1, "width": 64, "has_output": False}),
    Case("hyper_mix", "no_tokens", "quick", {"num_tokens": 0, "width": 64}),
    Case("hyper_mix", "decode", "model", {"num_tokens": 64, "width": 5120}),
    Case("hyper_mix", "prefill", "model", {"num_tokens": 4096, "width": 5120}),
    _rows("window", "quick", 9, FP8_32, (3, 7, 256)),
    _rows("one_row", "quick", 1, FP8_32, (1, 1, 512)),
    _rows("main_entries", "quick", 8, NVFP4_16, (2, 8, 512)),
    _rows("index_keys", "quick", 21, MXFP4_32, (4, 8, 128)),
    _rows("no_rows", "quick", 0, NVFP4_16, (2, 4, 512)),
    # A pool of any size is written in place; a small one is quickly copied to be written again.
    _rows("decode_window", "model", 64, FP8_32, (64, 134, 512)),
    _rows("decode_entries", "model", 64, NVFP4_16, (64, 64, 512)),
    _rows("prefill_entries", "model", 4096, NVFP4_16, (64, 128, 512)),
    _rows("prefill_index_keys", "model", 4096, MXFP4_32, (64, 128, 128)),
    _draws("two_chunks", "quick", 2304, [(1.0, 0, 0.9)], spread=8.0),
    _draws(
        "each_filter",
        "quick",
        256,
        [(0.0, 5, 0.5), (1.0, 0, 1.0), (0.7, 5, 1.0), (2.0, 0, 0.3), (1.3, 9, 0.6)],
    ),
    _draws("more_than_listed", "quick", 256, [(9.0, 0, 0.95)], spread=0.25),
    _draws("no_rows", "quick", 256, []),
    _draws("decode", "model", 129280, [(1.0, 0, 0.95)] * 64),
    _index("two_rows", "quick", [0, 100], 5, 128, 4, num_candidate_blocks=3),
    _index("inside_candidates", "quick", [77], 6, 128, 3, num_candidates=9),
    _index("ties_over_two_chunks", "quick", [4100], 5, 4160, 3, num_candidate_blocks=2),
    _index("fewer_than_wanted", "quick", [3], 8, 64, 2),
    _index("no_tokens", "quick", [], 5, 64, 2, num_candidate_blocks=3),
    _index(
        "decode_full",
        "model",
        [65536] * 32,
        512,
        65536,
        8192,
        entries_per_block=128,
        num_candidate_blocks=2048,
    ),
    _index("decode_ratio_2", "model", [32768] * 32, 512, 32768, 8192),
    _index(
        "decode_reindex",
        "model",
        [65536] * 32,
        512,
        65536,
        8192,
        entries_per_block=128,
        num_candidates=2048,
    ),
    _attention("decode", "model", [(32768, 2)] * 32, 128, 512, **_POOL),
    _attention("decode_window", "model", [(32768, 2)] * 32, 128, 0),
    _attention("prefill", "model", [(32768, 1024)], 128, 512, **_POOL),
)
