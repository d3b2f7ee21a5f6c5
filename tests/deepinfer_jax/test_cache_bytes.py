"""Goal: bytes read from one cache and written into another make the same blocks and states, and
nothing else changes. Method: caches filled with random bits, in both formats, with drafts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.cache_bytes import CacheTransfers, byte_sizes, description, sizes_up_to
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import CacheFormat, Precision

PER_CALL = 4


def layout_of(cache_format: CacheFormat, has_draft: bool = False, **changes: Any) -> CacheLayout:
    precision = Precision(jnp.float32, cache_format)
    layout = CacheLayout(ModelConfig.tiny(), precision, 7, 4, has_draft=has_draft)
    return dataclasses.replace(layout, **changes)


def filled(layout: CacheLayout, rng: np.random.Generator) -> KVCache:
    def bits(leaf: Any) -> jax.Array:
        size = leaf.dtype.itemsize * int(np.prod(leaf.shape))
        return jnp.array(np.frombuffer(rng.bytes(size), leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(bits, layout.abstract())


def raw(array: Any) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize(
    ("cache_format", "has_draft"), [(CacheFormat.KVQ, True), (CacheFormat.NOQ, False)]
)
def test_blocks_and_a_state_move_between_caches(
    cache_format: CacheFormat, has_draft: bool, rng: np.random.Generator
) -> None:
    layout = layout_of(cache_format, has_draft)
    source, target = filled(layout, rng), filled(layout, rng)
    before = jax.tree.map(np.asarray, target)
    transfers = CacheTransfers(source, PER_CALL)
    blocks, places = np.array([5, 2, 6, 0], np.int32), np.array([1, 4, 3, 0], np.int32)
    groups = [np.asarray(group) for group in transfers.read_blocks(source, blocks)]
    state = np.asarray(transfers.read_state(source, 3))
    assert [group.shape for group in groups] == [(PER_CALL, n) for n in transfers.sizes.groups]
    assert sum(transfers.sizes.groups) == layout.bytes_per_block
    for index, group in enumerate(groups):
        # The last one belongs to padding on either side.
        data = transfers.put(index, group[:3])
        assert data.shape == group.shape
        target = transfers.write_group(target, index, places[:3], data)
    target = transfers.write_states(target, np.array([2]), state[None])
    for old, new, origin in zip(before.sources, target.sources, source.sources, strict=True):
        for one, other, wanted in zip(
            jax.tree.leaves(old[:2]),
            jax.tree.leaves(new[:2]),
            jax.tree.leaves(origin[:2]),
            strict=True,
        ):
            for block in range(1, layout.num_blocks):
                moved = dict(zip(places.tolist(), blocks.tolist(), strict=True)).get(block)
                expected = one[block] if moved is None else wanted[moved]
                assert raw(other[block]) == raw(expected)
    expected = jax.tree.map(np.asarray, filled_state(source))
    assert [raw(leaf[2]) for leaf in jax.tree.leaves(filled_state(target))] == [
        raw(leaf[3]) for leaf in jax.tree.leaves(expected)
    ]
    for slot in (0, 1, 3):
        assert [raw(leaf[slot]) for leaf in jax.tree.leaves(filled_state(target))] == [
            raw(leaf[slot]) for leaf in jax.tree.leaves(filled_state(before))
        ]
    # What belongs to no prefix stays.
    assert raw(target.sampled) == raw(before.sampled)
    if has_draft:
        assert target.draft is not None and before.draft is not None
        assert raw(target.draft.logits) == raw(before.draft.logits)


def filled_state(cache: Any) -> list[Any]:
    """What a state consists of, from its definition rather than from the code under test."""
    draft = [] if cache.draft is None else list(cache.draft.rings)
    return [*cache.rings, *(source.partial for source in cache.sources), cache.classes, *draft]


def test_what_was_read_is_not_changed_by_later_writes(rng: np.random.Generator) -> None:
    cache = filled(layout_of(CacheFormat.KVQ), rng)
    transfers = CacheTransfers(cache, PER_CALL)
    blocks = np.array([1, 2, 3, 4], np.int32)
    expected = [np.array(group) for group in transfers.read_blocks(cache, blocks)]
    kept = transfers.read_blocks(cache, blocks)
    for group, size in enumerate(transfers.sizes.groups):
        zeros = transfers.put(0, np.zeros((PER_CALL, size), np.uint8))
        cache = transfers.write_group(cache, group, blocks, zeros)
    for one, other in zip(expected, kept, strict=True):
        assert np.array_equal(one, np.asarray(other)) and one.any()
    assert not any(np.asarray(g).any() for g in transfers.read_blocks(cache, blocks))


def test_blocks_travel_at_once_in_few_sizes(rng: np.random.Generator) -> None:
    assert sizes_up_to(16, 100) == (16, 24, 32, 48, 64, 96, 128)
    assert sizes_up_to(4, 0) == (4,) and sizes_up_to(4, 5) == (4, 6)
    cache = filled(layout_of(CacheFormat.KVQ), rng)
    transfers = CacheTransfers(cache, 2, 5)
    assert transfers.write_sizes == (2, 3, 4, 6)
    places = np.array([6, 1, 4, 2, 3], np.int32)
    for group, size in enumerate(transfers.sizes.groups):
        wanted = rng.integers(0, 256, (5, size), np.uint8)
        cache = transfers.write_group(cache, group, places, transfers.put(group, wanted))
        read = [transfers.read_blocks(cache, some)[group] for some in (places[:2], places[2:4])]
        np.testing.assert_array_equal(np.concatenate(read), wanted[:4])
    with pytest.raises(ValueError, match="7 blocks are to be written; expected at most 6"):
        transfers.put(0, np.zeros((7, 1), np.uint8))


def test_descriptions_tell_layouts_apart() -> None:
    layouts = [
        layout_of(CacheFormat.KVQ),
        layout_of(CacheFormat.NOQ),
        layout_of(CacheFormat.KVQ, has_draft=True),
        layout_of(CacheFormat.KVQ, block_size=256),
        layout_of(CacheFormat.KVQ, precision=Precision(jnp.bfloat16, CacheFormat.KVQ)),
        layout_of(CacheFormat.KVQ, config=ModelConfig.released()),
    ]
    assert len({description(layout) for layout in layouts}) == len(layouts)
    # How large the pools are does not matter.
    assert description(layout_of(CacheFormat.KVQ, num_blocks=9, num_slots=9)) == description(
        layouts[0]
    )


def test_sizes_of_the_released_model() -> None:
    precision = Precision(jnp.bfloat16, CacheFormat.KVQ)
    layout = CacheLayout(ModelConfig.released(), precision, 3, 2)
    sizes = byte_sizes(layout.abstract())
    assert sum(sizes.groups) == layout.bytes_per_block and len(sizes.groups) == 4
    # All of a slot but the token sampled last.
    assert sizes.state == layout.bytes_per_slot - 4
