"""Goal: the cache has the published sizes, and nothing of it is bigger than it says. Method: the
released configuration's byte counts, and the arrays of a small cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import BLOCK_SIZE, CacheLayout, KVCache, copy_slots
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
    # 40 rings of 134 entries of 528 bytes, three partial groups of 7 x 2 float32 vectors, classes
    # and the token sampled last.
    assert layout.bytes_per_slot == 40 * 134 * 528 + 3 * 7 * 2 * 512 * 4 + 9 * 4 + 4


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


def _per_slot(cache: KVCache) -> list[np.ndarray]:
    """Every array that has one part per slot, those of waiting drafts left out."""
    assert cache.draft is not None
    partial = [source.partial for source in cache.sources]
    leaves = jax.tree.leaves((cache.rings, partial, cache.classes, cache.draft.rings))
    return [np.asarray(leaf).view(np.uint8) for leaf in leaves]


@pytest.mark.parametrize("precision", (KVQ, NOQ))
def test_copied_slots_hold_the_same_state(precision: Precision) -> None:
    layout = CacheLayout(ModelConfig.tiny(), precision, num_blocks=3, num_slots=6, has_draft=True)
    numbers = iter(range(1000))

    def numbered(leaf: jax.Array) -> jax.Array:
        # Different in every slot, and exact in every format.
        column = jnp.arange(leaf.shape[0]).reshape(-1, *(1,) * (leaf.ndim - 1))
        value = jnp.broadcast_to(2.0 ** ((column + next(numbers)) % 6), leaf.shape)
        return value.astype(leaf.dtype)

    before = jax.tree.map(numbered, layout.zeros())
    after = copy_slots(before, jnp.array([2, 4, 0, 0]), jnp.array([5, 1, 0, 0]))
    for old, new in zip(_per_slot(before), _per_slot(after), strict=True):
        np.testing.assert_array_equal(new, old[[0, 4, 2, 3, 4, 2]])
        assert (old[2] != old[5]).any()
    for name in ("tokens", "probability", "logits"):
        np.testing.assert_array_equal(getattr(after.draft, name), getattr(before.draft, name))
    for old, new in zip(before.sources, after.sources, strict=True):
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: (np.asarray(a) == np.asarray(b)).all(),
                (old.entries, old.index_keys),
                (new.entries, new.index_keys),
            )
        )
