"""Goal: cases build the calls that they name, and unknown ones are refused.
Method: the shapes of every case are worked out, and tiny ones go through the reference.
"""

import jax
import numpy as np
import pytest

from pallas_kernels import cases, ops
from tests.pallas_kernels.interpreted import run

FIRST_TOKENS_OF = ("odd_rows", "one_expert", "two_sequences")


def test_names_are_unique_and_every_op_has_both_kinds() -> None:
    names = [(case.op, case.name, case.tag) for case in cases.CASES]
    assert len(set(names)) == len(names)
    for op in {case.op for case in cases.CASES}:
        assert callable(getattr(ops, op))
        for tag in ("quick", "model"):
            assert cases.find(op, tag)


@pytest.mark.parametrize("case", cases.find(tag="model"), ids=lambda c: f"{c.op}-{c.name}")
def test_model_cases_pass_the_door_without_being_built(case: cases.Case) -> None:
    args, sizes = case.abstract()
    call = getattr(ops, case.op)
    made = jax.eval_shape(lambda *a: call(*a, implementation="reference", **sizes), *args)
    assert jax.tree.leaves(made)


@pytest.mark.parametrize("op", ["scaled_matmul", "grouped_matmul", "sparse_attention"])
def test_the_first_tokens_alone_give_the_same(op: str) -> None:
    case = next(c for c in cases.find(op, "quick") if c.name in FIRST_TOKENS_OF)
    args, sizes = case.arguments(jax.random.key(3))
    whole, part = (run(op, "reference", some, sizes) for some in (args, case.first_tokens(args, 2)))
    assert part.shape[0] == 2
    np.testing.assert_allclose(whole[:2], part, rtol=1e-5, atol=1e-5)


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no case of op 'mix' and tag None; known operations"):
        cases.find("mix")
