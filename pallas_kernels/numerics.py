"""How near a kernel must come to the reference, and a comparison that names a first difference."""

from typing import Any

import numpy as np

TOLERANCE = {
    # The very same bytes.
    "cache_append": 0.0,
    # Sums of exact products in another order.
    "scaled_matmul": 2e-5,
    # The hidden rows may round to another FP8 value, or without quantisation to bfloat16.
    "grouped_matmul": 1e-2,
    # A new stream may round to the other neighbour in bfloat16.
    "hyper_mix": 4e-3,
    # The very same entries.
    "index_topk": 0.0,
    # The very same tokens.
    "sample_tokens": 0.0,
    # Probabilities are rounded to bfloat16.
    "sparse_attention": 4e-3,
}
"""Per operation: largest difference allowed, as a share of the largest reference value."""


def error(actual: Any, expected: Any) -> float:
    """Largest difference as a share of the largest magnitude of `expected`.

    A NaN, or an infinity that is not expected, counts as infinitely wrong.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"result has shape {a.shape}; expected {b.shape}")
    if not a.size:
        return 0.0
    difference = _difference(a, b)
    if not np.all(np.isfinite(difference)):
        return float("inf")
    largest = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
    return float(np.max(difference) / max(largest, np.finfo(np.float32).tiny))


def check_close(op: str, actual: Any, expected: Any) -> None:
    """Compares a result of `op` with the reference.

    Raises:
        AssertionError: they differ too much; names the place, both values and the bound.
        ValueError: the shapes differ.
    """
    worst, bound = error(actual, expected), TOLERANCE[op]
    if worst <= bound:
        return
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    largest = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
    allowed = bound * max(largest, np.finfo(np.float32).tiny)
    wrong = ~(_difference(a, b) <= allowed)
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise AssertionError(
        f"{op}: {int(wrong.sum())} of {a.size} values differ; first at {first}: {a[first]} where "
        f"the reference has {b[first]}; error {worst:.3g}, allowed {bound:.3g}"
    )


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Absolute differences; equal infinities do not differ."""
    return np.abs(np.subtract(a, b, out=np.zeros_like(a), where=a != b))
