"""Goal: the door refuses every wrong call by name, and keeps its promises of shapes and types.
Method: one good call of each operation as shapes alone, nothing computed; each wrong call changes
one argument of it and must be named, with what came and what was expected.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ops
from pallas_kernels.history import TokenHistory
from pallas_kernels.mix import Mix
from pallas_kernels.scaled_array import FP8_32, MXFP4_32, ScaledArray, encode

T, H, D = 3, 2, 32


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def fp8(*shape: int) -> Any:
    return jax.eval_shape(lambda: encode(jnp.zeros(shape), FP8_32))


def mxfp4(*shape: int) -> Any:
    return jax.eval_shape(lambda: encode(jnp.zeros(shape), MXFP4_32))


HISTORY = TokenHistory(i32(T), i32(T), i32(T), i32(T))
MIX = Mix(f32(T, 4), f32(T, 4), f32(T, 4, 4))
GOOD: dict[str, dict[str, Any]] = {
    "scaled_matmul": {"x": f32(T, D), "weight": f32(5, D)},
    "grouped_matmul": {
        "x": f32(T, D),
        "expert_index": i32(T, 2),
        "expert_weight": f32(T, 2),
        "w1": f32(4, 8, D),
        "w3": f32(4, 8, D),
        "w2": f32(4, D, 8),
        "limit": 2.0,
    },
    "hyper_mix": {
        "streams": f32(T, 4, D),
        "output": f32(T, D),
        "mix": MIX,
        "pre": f32(T, 4),
        "fn": f32(24, 4 * D),
        "scale": f32(3),
        "base": f32(24),
        "iterations": 2,
        "eps": 1e-6,
    },
    "hyper_finish": {"streams": f32(T, 4, D), "output": f32(T, D), "mix": MIX},
    "hyper_collapse": {"streams": f32(T, 4, D), "pre": f32(T, 4)},
    "cache_append": {"pool": f32(6, 4, D), "values": f32(T, D), "outer": i32(T), "inner": i32(T)},
    "sparse_attention": {
        "q": f32(T, H, D),
        "ring": f32(5, 8, D),
        "recent": f32(T, D),
        "history": HISTORY,
        "entries": f32(6, 4, D),
        "entry_index": i32(T, 7),
        "sink": f32(H),
        "window": 8,
        "scale": 0.5,
    },
    "index_topk": {
        "q": f32(T, H, D),
        "head_weight": f32(T, H),
        "keys": f32(6, 4, D),
        "block_table": i32(2, 3),
        "row": i32(T),
        "num_visible": i32(T),
        "k": 5,
    },
    "sample_tokens": {
        "logits": f32(T, 9),
        "temperature": f32(T),
        "top_k": i32(T),
        "top_p": f32(T),
        "seed": jax.ShapeDtypeStruct((T, 2), jnp.uint32),
        "position": i32(T),
    },
}


def call(name: str, **changes: Any) -> Any:
    """Shapes that the operation returns for its good call with some arguments changed."""
    arguments = GOOD[name] | changes
    arrays = {k: v for k, v in arguments.items() if not isinstance(v, int | float)}
    sizes = {k: v for k, v in arguments.items() if k not in arrays}
    function: Callable[..., Any] = getattr(ops, name)
    return jax.eval_shape(lambda arrays: function(**arrays, **sizes), arrays)


def test_results_are_float32_whatever_comes_in() -> None:
    narrow = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    assert call("scaled_matmul", x=narrow) == f32(T, 5)
    assert call("grouped_matmul", x=narrow) == f32(T, D)
    q = jax.ShapeDtypeStruct((T, H, D), jnp.bfloat16)
    assert call("sparse_attention", q=q) == f32(T, H, D)


def test_streams_keep_their_type() -> None:
    narrow = jax.ShapeDtypeStruct((T, 4, D), jnp.bfloat16)
    streams, read, mix = call("hyper_mix", streams=narrow)
    assert streams == narrow
    assert read == jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    assert mix == MIX
    assert call("hyper_finish", streams=narrow) == narrow
    assert call("hyper_collapse", streams=narrow) == jax.ShapeDtypeStruct((T, D), jnp.bfloat16)


def test_selections_and_tokens_are_int32() -> None:
    assert call("index_topk") == (i32(T, 5), None)
    with_candidates = call("index_topk", num_candidate_blocks=2, candidate_block_size=3)
    assert with_candidates == (i32(T, 5), i32(T, 2))
    assert call("sample_tokens", logits=jax.ShapeDtypeStruct((T, 9), jnp.bfloat16)) == i32(T)


def test_packed_arrays_stand_for_plain_ones() -> None:
    assert call("scaled_matmul", weight=fp8(5, D), activation_format=None) == f32(T, 5)
    packed = {"w1": fp8(4, 32, D), "w3": fp8(4, 32, D), "w2": fp8(4, D, 32)}
    assert call("grouped_matmul", **packed) == f32(T, D)
    written = call("cache_append", pool=fp8(6, 4, D))
    assert isinstance(written, ScaledArray)
    assert written == fp8(6, 4, D)
    out = call("sparse_attention", ring=fp8(5, 8, D), recent=fp8(T, D), entries=mxfp4(6, 4, D))
    assert out == f32(T, H, D)
    assert call("index_topk", q=mxfp4(T, H, D), keys=mxfp4(6, 4, D))[0] == i32(T, 5)


def test_a_window_may_be_one_longer_than_its_ring() -> None:
    """The token itself never comes from the ring."""
    assert call("sparse_attention", window=9) == f32(T, H, D)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("scaled_matmul", {"weight": f32(D)}, "weight is (32,); expected [N, K]"),
    ("scaled_matmul", {"x": f32(T, 31)}, "x is (3, 31); expected [..., 32]"),
    ("grouped_matmul", {"w1": f32(8, D)}, "w1 is (8, 32); expected [E, F, D]"),
    ("grouped_matmul", {"x": f32(T, 16)}, "x is (3, 16); expected [T, 32]"),
    ("grouped_matmul", {"x": f32(D)}, "x is (32,); expected [T, 32]"),
    ("grouped_matmul", {"w3": f32(4, 9, D)}, "w3 is (4, 9, 32); expected (4, 8, 32)"),
    ("grouped_matmul", {"w2": f32(4, 8, D)}, "w2 is (4, 8, 32); expected (4, 32, 8)"),
    (
        "grouped_matmul",
        {"expert_weight": f32(T, 3)},
        "expert_index is (3, 2); expected [3, K] like expert_weight (3, 3)",
    ),
    (
        "grouped_matmul",
        {"expert_index": i32(2, 2), "expert_weight": f32(2, 2)},
        "expert_index is (2, 2); expected [3, K]",
    ),
    ("hyper_mix", {"streams": f32(T, D)}, "streams is (3, 32); expected [T, S, D]"),
    ("hyper_mix", {"pre": f32(T, 3)}, "weights of the streams is (3, 3); expected [3, 4]"),
    ("hyper_mix", {"output": f32(2, D)}, "output is (2, 32); expected [3, 32]"),
    ("hyper_mix", {"fn": f32(24, D)}, "fn is (24, 32); expected [24, S * D]"),
    ("hyper_mix", {"base": f32(4)}, "base is (4,); expected [24]"),
    ("hyper_mix", {"scale": f32(4)}, "scale is (4,); expected [3]"),
    ("hyper_mix", {"mix": None}, "mix is None; expected None exactly when output is"),
    ("hyper_mix", {"output": None}, "mix is given; expected None exactly when output is"),
    ("hyper_finish", {"output": f32(T, 16)}, "output is (3, 16); expected [3, 32]"),
    ("hyper_finish", {"mix": MIX._replace(post=f32(T, 2))}, "(3, 2); expected [3, 4]"),
    ("hyper_collapse", {"pre": f32(2, 4)}, "weights of the streams is (2, 4); expected [3, 4]"),
    ("cache_append", {"values": f32(T, 16)}, "values is (3, 16); expected [T, (32,)]"),
    ("cache_append", {"outer": i32(2)}, "outer is (2,); expected [T] like inner"),
    ("cache_append", {"inner": i32(2), "outer": i32(2)}, "outer is (2,); expected [T] like inner"),
    ("sparse_attention", {"q": f32(T, D)}, "q is (3, 32); expected [T, H, D]"),
    ("sparse_attention", {"ring": f32(5, 8, 16)}, "ring is (5, 8, 16); expected [S, L, 32]"),
    ("sparse_attention", {"window": 10}, "ring is (5, 8, 32); expected [S, L, 32], L at least 9"),
    ("sparse_attention", {"recent": f32(2, D)}, "recent is (2, 32); expected [T, 32]"),
    ("sparse_attention", {"ring": fp8(5, 8, D)}, "recent is unquantised; expected fp8_32"),
    ("sparse_attention", {"recent": mxfp4(T, D)}, "recent is mxfp4_32; expected unquantised"),
    ("sparse_attention", {"sink": f32(3)}, "sink is (3,); expected [2]"),
    ("sparse_attention", {"entries": None}, "entry_index is given; expected None exactly when"),
    ("sparse_attention", {"entry_index": None}, "entry_index is None; expected None exactly when"),
    ("sparse_attention", {"entries": f32(6, 4, 16)}, "entries is (6, 4, 16); expected [num_blocks"),
    ("sparse_attention", {"entry_index": i32(2, 7)}, "entry_index is (2, 7); expected [3, K]"),
    ("index_topk", {"keys": f32(6, D)}, "keys is (6, 32); expected [num_blocks"),
    ("index_topk", {"q": f32(T, H, 16)}, "q is (3, 2, 16); expected [T, H, 32]"),
    ("index_topk", {"q": f32(T, D)}, "q is (3, 32); expected [T, H, 32]"),
    ("index_topk", {"head_weight": f32(T, 3)}, "head_weight is (3, 3); expected (3, 2)"),
    ("index_topk", {"block_table": i32(3)}, "block_table is (3,); expected [R, B]"),
    ("index_topk", {"row": i32(2)}, "row is (2,); expected [T] like num_visible"),
    ("index_topk", {"num_visible": i32(2)}, "row is (3,); expected [T] like num_visible"),
    ("index_topk", {"k": 0}, "k is 0; expected at least 1"),
    ("index_topk", {"candidate_block_size": 0}, "candidate_block_size is 0; expected at least 1"),
    ("index_topk", {"candidates": i32(2, 4)}, "candidates is (2, 4); expected [3, C]"),
    ("sample_tokens", {"logits": f32(9)}, "logits is (9,); expected [M, V]"),
    ("sample_tokens", {"seed": i32(T)}, "seed is (3,); expected [3, 2]"),
    ("sample_tokens", {"temperature": f32(2)}, "temperature is (2,); expected [3]"),
    ("sample_tokens", {"top_k": i32(T, 1)}, "top_k is (3, 1); expected [3]"),
    ("sample_tokens", {"top_p": f32()}, "top_p is (); expected [3]"),
    ("sample_tokens", {"position": i32(4)}, "position is (4,); expected [3]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_a_wrong_call_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(name, **changes)
