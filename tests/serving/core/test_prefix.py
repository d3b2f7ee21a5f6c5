"""Goal: keys name prefixes, and the index finds exactly what can be gone on from.

Method: chains that differ in one thing each; an index that is filled and emptied by hand.
"""

import numpy as np
import pytest

from serving.core.image_layout import whole_images_end
from serving.core.prefix import (
    PrefixIndex,
    PrefixKey,
    block_boundary,
    next_key,
    prefix_keys,
    root_key,
)
from serving.core.request import RequestImage


def image(start: int, num_tokens: int, digest: bytes = b"picture") -> RequestImage:
    return RequestImage(start, num_tokens, 1, 1, digest, np.zeros((1, 588), np.uint8))


def chain(tokens: list[int], root: PrefixKey = b"", images: tuple = ()) -> list[PrefixKey]:
    keys, key = [], root
    for start in range(0, len(tokens), 4):
        key = next_key(key, np.array(tokens[start : start + 4], np.int32), start, images)
        keys.append(key)
    return keys


# --- keys ---------------------------------------------------------------------


def test_equal_keys_mean_equal_prefixes() -> None:
    first = chain(list(range(12)))
    assert first == chain(list(range(12)))
    assert len(set(first)) == 3
    assert all(len(key) == 16 for key in first)
    for changed in range(12):
        tokens = list(range(12))
        tokens[changed] = 99
        same = [a == b for a, b in zip(first, chain(tokens), strict=True)]
        assert same == [block < changed // 4 for block in range(3)]


def test_keys_made_together_are_those_made_one_by_one() -> None:
    tokens = list(range(24))
    images = (image(5, 6), image(17, 2, b"another"))
    for some in ((), images):
        together = prefix_keys(b"root", np.array(tokens[:23]), 4, some)
        assert together == chain(tokens[:20], b"root", some)
    assert prefix_keys(b"root", np.array([1, 2, 3]), 4) == []


def test_keys_do_not_depend_on_how_tokens_are_stored() -> None:
    tokens = np.arange(8, dtype=np.int64)[::2]
    assert next_key(b"", tokens, 0) == next_key(b"", np.array([0, 2, 4, 6], np.int32), 0)


def test_roots_tell_fingerprints_and_salts_apart() -> None:
    roots = {
        root_key(*parts) for parts in [(b"", ""), (b"a", ""), (b"", "a"), (b"ab", ""), (b"a", "b")]
    }
    assert len(roots) == 5
    assert root_key(b"a", "b") == root_key(b"a", "b")


def test_an_image_counts_in_the_blocks_it_reaches_into() -> None:
    tokens = list(range(16))
    plain = chain(tokens)
    with_image = chain(tokens, images=(image(6, 4),))
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False]
    assert with_image == chain(tokens, images=(image(6, 4),))
    for other in (image(6, 4, b"another"), image(5, 4)):
        assert chain(tokens, images=(other,))[1] != with_image[1]
    # Blocks 1 and 2 hold it; that block 3 differs is the doing of the chain alone.
    assert next_key(b"k", np.arange(4), 12, (image(6, 4),)) == next_key(b"k", np.arange(4), 12)
    assert next_key(b"k", np.arange(4), 8, (image(6, 4),)) != next_key(b"k", np.arange(4), 8)


# --- index --------------------------------------------------------------------


def test_a_prefix_is_usable_up_to_the_longest_snapshot() -> None:
    index = PrefixIndex([5, 6])
    keys = chain(list(range(20)))
    assert (index.num_present(keys), index.num_usable(keys)) == (0, 0)
    for block, key in enumerate(keys[:4], 10):
        index.name(key, block)
    other = chain([*range(8), 50, 51, 52, 53])
    assert [index.num_present(some) for some in (keys, keys[:3], [], other)] == [4, 3, 0, 2]
    assert index.num_usable(keys) == 0
    slots = [index.reserve_slot(), index.reserve_slot()]
    assert slots == [5, 6]
    assert index.keep_snapshot(keys[1], 5)
    assert (index.num_usable(keys), index.num_usable(keys[:1])) == (2, 0)
    assert index.keep_snapshot(keys[2], 6)
    assert (index.num_usable(keys), index.num_usable(keys[:2])) == (3, 2)
    assert (index.snapshot(keys[2]), index.use_snapshot(keys[2])) == (6, 6)
    assert (index.block(keys[3]), index.block(keys[4])) == (13, None)
    assert index.num_used_snapshots == 2


def test_the_least_recently_used_snapshot_gives_way() -> None:
    index = PrefixIndex([5, 6])
    keys = chain(list(range(12)))
    for block, key in enumerate(keys, 1):
        index.name(key, block)
    for key in keys[:2]:
        slot = index.reserve_slot()
        assert slot is not None and index.keep_snapshot(key, slot)
    index.use_snapshot(keys[0])
    assert index.reserve_slot() == 6
    assert (index.snapshot(keys[0]), index.snapshot(keys[1])) == (5, None)
    assert index.reserve_slot() == 5
    assert index.reserve_slot() is None
    index.return_slot(6)
    assert index.reserve_slot() == 6


def test_a_snapshot_of_no_use_frees_its_slot() -> None:
    index = PrefixIndex([5, 6])
    keys = chain(list(range(8)))
    index.name(keys[0], 1)
    for key, is_kept in [(keys[0], True), (keys[0], False), (keys[1], False)]:
        slot = index.reserve_slot()
        assert slot is not None
        assert index.keep_snapshot(key, slot) is is_kept
    assert index.num_used_snapshots == 1
    assert index.reserve_slot() == 6


def test_forgetting_a_block_forgets_its_snapshot() -> None:
    index = PrefixIndex([5])
    keys = chain(list(range(8)))
    for block, key in enumerate(keys, 1):
        index.name(key, block)
    assert index.reserve_slot() == 5 and index.keep_snapshot(keys[1], 5)
    index.forget(2)
    assert index.num_present(keys) == 1
    assert index.reserve_slot() == 5
    index.name(keys[1], 3)
    assert (index.block(keys[1]), index.snapshot(keys[1])) == (3, None)


def test_only_snapshots_that_were_never_used_are_dropped() -> None:
    index = PrefixIndex([5, 6])
    keys = chain(list(range(12)))
    for block, key in enumerate(keys, 1):
        index.name(key, block)
    for key in keys[:2]:
        slot = index.reserve_slot()
        assert slot is not None and index.keep_snapshot(key, slot)
    index.use_snapshot(keys[1])
    for key in keys:
        index.drop_unused_snapshot(key)
    assert (index.snapshot(keys[0]), index.snapshot(keys[1])) == (None, 6)
    index.clear()
    assert (index.num_present(keys), index.num_used_snapshots) == (0, 0)
    assert {index.reserve_slot(), index.reserve_slot(), index.reserve_slot()} == {5, 6, None}


def test_a_snapshot_serves_equal_tails_and_later_ones() -> None:
    """Blocks of four; a sequence whose tail starts at 6 left the states at 8 and at 4."""
    index = PrefixIndex([5, 6, 7])
    keys = chain(list(range(8)))
    for block, key in enumerate(keys, 1):
        index.name(key, block)
    for key, tail_start in zip(keys, (None, 6), strict=True):
        slot = index.reserve_slot()
        assert slot is not None and index.keep_snapshot(key, slot, tail_start)
    usable = {start: index.num_usable(keys, start, start // 4) for start in (0, 3, 4, 6, 7, 8, 20)}
    assert usable == {0: 0, 3: 0, 4: 1, 6: 2, 7: 1, 8: 2, 20: 2}


def test_a_snapshot_gives_way_to_one_of_another_tail() -> None:
    index = PrefixIndex([5, 6])
    (key,) = chain(list(range(4)))
    index.name(key, 1)
    kept = []
    # None serves every later tail, and so does any other, which serves equal tails too.
    for tail_start in (None, None, 2, 2, None, 3, 3):
        slot = index.reserve_slot()
        assert slot is not None
        kept.append(index.keep_snapshot(key, slot, tail_start))
    assert kept == [True, False, True, False, False, True, False]
    assert (index.num_usable([key], 3), index.num_usable([key], 2)) == (1, 0)
    assert index.num_used_snapshots == 1
    assert index.reserve_slot() is not None, "what gave way is free"


def test_two_blocks_cannot_have_one_name() -> None:
    index = PrefixIndex([])
    index.name(b"key", 1)
    with pytest.raises(AssertionError, match="block 2 is named like another"):
        index.name(b"key", 2)


# --- boundaries ---------------------------------------------------------------


def test_boundaries_lie_between_blocks_and_in_no_image() -> None:
    assert [block_boundary(position, 4) for position in (0, 3, 4, 11, 12)] == [0, 0, 4, 8, 12]
    images = (image(3, 6), image(14, 3))

    def cut(position: int) -> int:
        return whole_images_end(images, position)

    # 8 lies in the first image, which begins in block 0; 16 in the second.
    assert [block_boundary(position, 4, cut) for position in (11, 12, 16, 17)] == [0, 12, 12, 12]
    assert block_boundary(20, 4, cut) == 20
