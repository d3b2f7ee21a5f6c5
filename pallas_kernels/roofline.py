"""The least that a case costs on a target, on paper: bytes that must move, operations, time.

Bytes count every operand and result once, packed as it lies in memory; operations count multiply
and add as two and run at the bfloat16 rate, since that is what the kernels widen to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.cases import Case
from pallas_kernels.targets import Target


@dataclass(frozen=True)
class Cost:
    """Bytes moved and operations done by one call."""

    num_bytes: int
    num_flops: int

    def bound_us(self, target: Target) -> float:
        """Microseconds below which the target cannot finish."""
        memory = self.num_bytes / target.bytes_per_s
        arithmetic = self.num_flops / target.bf16_flops_per_s
        return 1e6 * max(memory, arithmetic)


def cost(case: Case) -> Cost:
    """The cost of a case."""
    return _COSTS[case.op](**case.sizes)


def _packed_bytes(num_values: int, bits: int, scale_values: int) -> int:
    return num_values * bits // 8 + num_values // scale_values


def _scaled_matmul(num_rows: int, n: int, k: int, form: Any) -> Cost:
    del form
    weights = _packed_bytes(n * k, 8, 32 * 32)
    return Cost(weights + num_rows * (2 * k + 4 * n), 2 * num_rows * n * k)


def _grouped_matmul(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    width: int,
    ffn: int,
    form: Any,
    one_expert: bool = False,
    num_padding: int = 0,
) -> Cost:
    """Counts the experts that tokens which choose at random are expected to use."""
    del form
    tokens = num_tokens - num_padding
    unused = (1 - num_chosen / num_experts) ** tokens
    used = min(tokens, 1) * num_chosen if one_expert else num_experts * (1 - unused)
    weights = 3 * width * ffn
    rows = tokens * num_chosen
    num_bytes = round(used * _packed_bytes(weights, 4, 32)) + tokens * width * (2 + 4)
    return Cost(num_bytes, 2 * rows * weights)


def _sparse_attention(
    rows: tuple[tuple[int, int], ...],
    window: int,
    num_selected: int,
    num_blocks: int = 0,
    entries_per_block: int = 0,
    absent_tokens: int = 0,
) -> Cost:
    """Counts what a token gathers; neighbours of a sequence share most of a window in the cache."""
    del num_blocks, entries_per_block, absent_tokens
    heads, width = 64, 512
    tokens = sum(n for _, n in rows)
    gathered = _packed_bytes(window * width, 8, 32) + _packed_bytes(num_selected * width, 4, 16)
    passed = heads * width * (2 + 4)
    num_flops = 4 * heads * width * (window + num_selected) * tokens
    return Cost(tokens * (gathered + passed), num_flops)


def _index_topk(
    visible: tuple[int, ...],
    k: int,
    context: int,
    num_blocks: int,
    entries_per_block: int = 64,
    num_candidates: int = 0,
    num_candidate_blocks: int = 0,
) -> Cost:
    """Counts the keys of every token apart, as in a decode step of one row each."""
    del context, num_blocks, entries_per_block
    heads, width = 32, 128
    scored = sum(min(n, 8 * num_candidates) if num_candidates else n for n in visible)
    passed = 2 * heads * width + 4 * (heads + k + num_candidates + num_candidate_blocks)
    num_bytes = _packed_bytes(scored * width, 4, 32) + len(visible) * passed
    return Cost(num_bytes, 2 * heads * width * scored)


def _hyper_mix(num_tokens: int, width: int, has_output: bool = True) -> Cost:
    rows, num_streams = 24, 4
    passed = 2 * num_streams * width * (1 + has_output) + 2 * width * (1 + has_output)
    num_bytes = num_tokens * (passed + 4 * (rows * (1 + has_output) + num_streams))
    num_bytes += 4 * rows * num_streams * width
    project = 2 * rows * num_streams * width
    mix = 2 * num_streams * width * (1 + has_output * (num_streams + 1))
    return Cost(num_bytes, num_tokens * (project + mix))


def _cache_append(num_rows: int, width: int, form: Any, num_blocks: int, length: int) -> Cost:
    """Counts values as bfloat16, and the largest value of each block and a division for all."""
    del num_blocks, length
    written = _packed_bytes(num_rows * width, form.bits, form.block[1])
    return Cost(2 * num_rows * width + written + 8 * num_rows, 2 * num_rows * width)


def _sample_tokens(
    vocab_size: int, settings: tuple[tuple[float, int, float], ...], spread: float = 0.0
) -> Cost:
    """Counts float32 logits twice, and as operations a difference, a product and a sum of each."""
    del spread
    logits = len(settings) * vocab_size
    return Cost(2 * 4 * logits + len(settings) * 4 * 7, 3 * logits)


_COSTS: dict[str, Callable[..., Cost]] = {
    "scaled_matmul": _scaled_matmul,
    "grouped_matmul": _grouped_matmul,
    "sparse_attention": _sparse_attention,
    "index_topk": _index_topk,
    "hyper_mix": _hyper_mix,
    "cache_append": _cache_append,
    "sample_tokens": _sample_tokens,
}
