"""Goal: bytes and operations of a case are those that can be counted by hand.
Method: one case of each operation, worked out here.
"""

from pallas_kernels import roofline
from pallas_kernels.cases import Case, find
from pallas_kernels.scaled_array import NVFP4_16
from pallas_kernels.targets import H200


def test_a_dense_product() -> None:
    case = Case("scaled_matmul", "x", "quick", {"num_rows": 3, "n": 64, "k": 32, "form": None})
    cost = roofline.cost(case)
    assert cost == roofline.Cost(64 * 32 + 2 + 3 * (32 * 2 + 64 * 4), 2 * 3 * 64 * 32)


def test_experts_are_read_once_however_many_tokens_choose_them() -> None:
    sizes = {"num_experts": 4, "num_chosen": 2, "width": 64, "ffn": 32, "form": None}
    case = Case("grouped_matmul", "x", "quick", {"num_tokens": 9, "one_expert": True, **sizes})
    weights = 3 * 64 * 32
    expected = 2 * (weights // 2 + weights // 32) + 9 * 64 * 6
    assert roofline.cost(case) == roofline.Cost(expected, 2 * 9 * 2 * weights)
    all_used = Case("grouped_matmul", "x", "quick", {"num_tokens": 900, **sizes})
    assert roofline.cost(all_used).num_bytes == 4 * (weights // 2 + weights // 32) + 900 * 64 * 6


def test_attention_reads_each_gathered_row_once_for_all_heads() -> None:
    sizes = {"rows": ((9, 3), (70, 2)), "window": 128, "num_selected": 512}
    cost = roofline.cost(Case("sparse_attention", "x", "quick", sizes))
    assert cost.num_bytes == 5 * (128 * 528 + 512 * 288 + 64 * 512 * (2 + 4))
    assert cost.num_flops == 5 * 64 * 640 * 512 * 4


def test_keys_are_read_once_and_only_inside_candidates() -> None:
    sizes = {"visible": (1000, 64), "k": 4, "context": 1024, "num_blocks": 8}
    passed = 2 * (2 * 32 * 128 + 4 * (32 + 4))
    cost = roofline.cost(Case("index_topk", "x", "quick", sizes))
    assert cost == roofline.Cost(1064 * 68 + passed, 2 * 32 * 128 * 1064)
    inside = roofline.cost(Case("index_topk", "x", "quick", sizes | {"num_candidates": 10}))
    assert inside.num_flops == 2 * 32 * 128 * (80 + 64)


def test_streams_are_read_and_written_once() -> None:
    cost = roofline.cost(Case("hyper_mix", "x", "quick", {"num_tokens": 10, "width": 64}))
    small = 4 * (24 + 24 + 4)
    assert cost.num_bytes == 10 * (2 * 4 * 64 * 2 + 2 * 64 * 2 + small) + 4 * 24 * 256
    assert cost.num_flops == 10 * (2 * 24 * 256 + 2 * 256 * 6)


def test_appended_rows_are_read_and_written_once() -> None:
    sizes = {"num_rows": 3, "width": 128, "form": NVFP4_16, "num_blocks": 2, "length": 4}
    cost = roofline.cost(Case("cache_append", "x", "quick", sizes))
    assert cost.num_bytes == 3 * (2 * 128 + 64 + 8 + 8)


def test_logits_are_read_twice() -> None:
    sizes = {"vocab_size": 256, "settings": ((1.0, 0, 1.0),) * 3}
    assert roofline.cost(Case("sample_tokens", "x", "quick", sizes)).num_bytes == 3 * (2048 + 28)


def test_the_bound_is_the_slower_of_memory_and_arithmetic() -> None:
    memory = roofline.Cost(4_800_000, 1)
    assert abs(memory.bound_us(H200) - 1.0) < 1e-9
    arithmetic = roofline.Cost(1, 989_000_000)
    assert abs(arithmetic.bound_us(H200) - 1.0) < 1e-9
    assert all(roofline.cost(case).bound_us(H200) > 0 for case in find(tag="model"))
