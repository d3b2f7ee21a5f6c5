"""Goal: the cache has the published sizes, and nothing of it is bigger than it says. Method: the
released configuration's byte counts, and the arrays of a small cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.cache import BLOCK_SIZE, CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import CacheFormat, Precision
from sharding.plan import check_logical_name

KVQ = Precision(jnp.bfloat16, CacheFormat.KVQ)
NOQ = Precision(jnp.bfloat16, CacheFormat.NOQ)


def test_bytes_of_the_released_model() -> None:
    layout = CacheLayout(ModelConfig.released(), KVQ, num_blocks=100, num_slots=3)
    assert layout.bytes_per_token == 890
    assert layout.bytes_per_block == 890 * BLOCK_SIZE
    assert layout.ring_length == 134
    # 40 rings of 134 entries of 528 bytes, three partial groups of 7 x 2 float32 vectors, classes.
    assert layout.bytes_per_slot == 40 * 134 * 528 + 3 * 7 * 2 * 512 * 4 + 9 * 4


def test_bytes_without_quantisation() -> None:
    layout = CacheLayout(ModelConfig.released(), NOQ, num_blocks=100, num_slots=3)
    assert layout.bytes_per_token == 3200


@pytest.mark.parametrize("precision", (KVQ, NOQ))
def test_zeros_are_what_abstract_says(precision: Precision) -> None:
    layout = CacheLayout(ModelConfig.tiny(), precision, num_blocks=3, num_slots=2)
    leaves, abstract = jax.tree.leaves(layout.zeros()), jax.tree.leaves(layout.abstract())
    assert [(a.shape, a.dtype) for a in leaves] == [(a.shape, a.dtype) for a in abstract]
    total = 3 * layout.bytes_per_block + 2 * layout.bytes_per_slot
    assert sum(leaf.nbytes for leaf in leaves) == total


def test_every_dimension_has_a_known_name() -> None:
    layout = CacheLayout(ModelConfig.tiny(), KVQ, num_blocks=3, num_slots=2)

    def check(names: tuple[str | None, ...], subtree: object) -> None:
        for leaf in jax.tree.leaves(subtree):
            assert len(names) == leaf.ndim
        for name in names:
            if name is not None:
                check_logical_name(name)

    def is_names(node: object) -> bool:
        return isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node)

    jax.tree.map(check, layout.logical_axes(), layout.abstract(), is_leaf=is_names)


@pytest.mark.parametrize("name", ("num_blocks", "num_slots"))
def test_the_reserved_number_must_leave_others(name: str) -> None:
    layout = CacheLayout(ModelConfig.tiny(), KVQ, num_blocks=3, num_slots=2)
    with pytest.raises(ValueError, match=f"{name} is 1; expected at least 2"):
        dataclasses.replace(layout, **{name: 1})


def test_a_group_may_not_cross_a_block() -> None:
    with pytest.raises(ValueError, match="block size 5 is not a multiple of compress ratio 2"):
        CacheLayout(ModelConfig.tiny(), KVQ, num_blocks=3, num_slots=2, block_size=5)
