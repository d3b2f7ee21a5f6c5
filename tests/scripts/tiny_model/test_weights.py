"""Weights start, round and pack as they should.

Goal: training sees what the checkpoint will hold.
Method: rounding in training is compared with packing and unpacking; seeds are compared.
"""

import jax
import numpy as np

from scripts.tiny_model import weights
from tests.scripts.tiny_model import small_case


def test_rounding_equals_packing_and_unpacking() -> None:
    storage = weights.storage_of(small_case.config())
    rounded = weights.as_stored(small_case.parameters(), storage)
    unpacked = weights.unpacked(weights.packed(small_case.parameters(), storage))
    for one, other in zip(jax.tree.leaves(rounded), jax.tree.leaves(unpacked), strict=True):
        np.testing.assert_array_equal(one, other)
    changed = jax.tree.map(np.array_equal, rounded, small_case.parameters())
    assert not all(jax.tree.leaves(changed))


def test_the_seed_gives_the_weights() -> None:
    one, same, other = (weights.initial_parameters(small_case.config(), s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.embed, same.embed)
    assert not np.array_equal(one.embed, other.embed)
    text, draft = weights.split_draft(one)
    assert text.draft is None
    assert draft is not None
