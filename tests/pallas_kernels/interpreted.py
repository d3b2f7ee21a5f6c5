"""Kernels in the interpreter, with race detection, for the tests of each operation.

The interpreter fills memory that nothing wrote with NaN and refuses accesses outside an array, so a
result that is right everywhere was written everywhere and nowhere else.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import cases, numerics, ops

TIME_LIMIT = pytest.mark.timeout(180, method="thread")
"""A barrier that nobody arrives at hangs the interpreter, where no signal reaches the test."""


def quick(op: str) -> pytest.MarkDecorator:
    """Parametrises a test by the quick cases of `op`."""
    found = cases.find(op, "quick")
    return pytest.mark.parametrize("case", found, ids=[case.name for case in found])


def run(op: str, implementation: str, args: tuple[Any, ...], sizes: dict[str, Any]) -> Any:
    """The operation, compiled."""
    return _compiled(op, implementation, sizes)(*args)


def check_case(case: cases.Case) -> None:
    """The kernel gives what the reference gives, and in the first case of each operation, for the
    interpreter is slow, the same bits again."""
    args, sizes = case.arguments(jax.random.key(7))
    expected = run(case.op, "reference", args, sizes)
    kernel = _compiled(case.op, "interpret", sizes)
    actual = kernel(*args)
    for made, meant in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        numerics.check_close(case.op, made, meant)
    if case is not cases.find(case.op, "quick")[0]:
        return
    for again, made in zip(jax.tree.leaves(kernel(*args)), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(np.asarray(again), np.asarray(made))


def _compiled(op: str, implementation: str, sizes: dict[str, Any]) -> Any:
    return jax.jit(functools.partial(getattr(ops, op), implementation=implementation, **sizes))
