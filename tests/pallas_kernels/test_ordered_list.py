"""Goal: ordered integers compare as floats do, and a list keeps the first of the best scores in
their order, also when it has to be cleared in between.
Method: plain arithmetic for the integers; a kernel in the interpreter that appends two pages of
scores with many equal ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ordered_list import COLUMNS, NOTHING, List, append, keep_best, ordered
from pallas_kernels.selection import INTERPRET
from tests.pallas_kernels.interpreted import TIME_LIMIT

PAGE = (64, 8)


def test_ordered_integers_compare_as_the_floats() -> None:
    values = np.array([-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, np.inf], np.float32)
    made = np.asarray(ordered(jnp.asarray(values)))
    assert made[3] == made[4], "the two zeros are equal"
    assert np.all(np.diff(made.astype(np.int64))[[0, 1, 2, 4, 5, 6]] > 0)
    assert made[0] > NOTHING


def best_of_pages(pages: np.ndarray, k: int, columns: int) -> np.ndarray:
    """Numbers that a list of `k` holds after both pages [2, 64, 8]."""

    def kernel(pages_gmem: Any, out_gmem: Any, page_smem: Any, ready: Any, *memory: Any) -> None:
        best = List(*memory)
        best.clear_from(jnp.int32(0))
        state = (jnp.int32(0), jnp.int32(NOTHING))
        for page in range(2):
            plgpu.copy_gmem_to_smem(pages_gmem.at[page], page_smem, ready)
            plgpu.barrier_wait(ready)
            first = jnp.int32(page * PAGE[0] * PAGE[1])
            state = append(best, state, page_smem, first, k, lambda position: position)
        keep_best(best, k)
        plgpu.copy_smem_to_gmem(best.numbers, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    made = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, columns), jnp.int32),
        scratch_types=[plgpu.SMEM(PAGE, jnp.int32), plgpu.Barrier(), *List.memory(columns)],
        interpret=INTERPRET,
    )(jnp.asarray(pages))
    return np.asarray(made).reshape(-1)


@TIME_LIMIT
# The narrow one counts as full after the first page already.
@pytest.mark.parametrize("columns", [COLUMNS, PAGE[1]])
def test_the_first_of_the_best_stay(columns: int, rng: np.random.Generator) -> None:
    k = 12
    pages = np.full((2, *PAGE), NOTHING, np.int32)
    present = rng.random(pages.shape) < 0.06
    pages[present] = rng.integers(0, 6, int(present.sum()))
    made = best_of_pages(pages, k, columns)
    flat = pages.reshape(-1).astype(np.int64)
    order = np.argsort(-flat, kind="stable")[:k]
    np.testing.assert_array_equal(made[:k], np.sort(order))
    assert np.all(made[k:] == -1)
