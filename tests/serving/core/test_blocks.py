"""Goal: a pool never hands out the same block or slot twice, nor the one that belongs to padding.

Method: random allocation and release against a set; the order of reuse and every misuse by hand.
"""

import random

import pytest

from serving.core.blocks import BlockPool, StateSlotPool


def test_random_use_of_blocks_matches_a_set() -> None:
    source, pool = random.Random(4), BlockPool(20)
    held: list[list[int]] = []
    for _ in range(500):
        if held and source.random() < 0.5:
            pool.release(held.pop(source.randrange(len(held))))
        else:
            count = source.randint(0, pool.num_free)
            held.append(pool.allocate(count))
            assert len(held[-1]) == count
        flat = sorted(block for blocks in held for block in blocks)
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(1, 20))
        assert pool.num_free == pool.num_usable - len(flat) == 19 - len(flat)
        assert [int(block) for block in pool.num_holders.nonzero()[0]] == flat


def test_blocks_are_reused_longest_free_first_and_the_end_of_a_context_first() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [6, 5, 4, 3, 2, 1]


def test_misuse_of_blocks_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="no holder"):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="no holder"):
        pool.release([0])


def test_slots_are_handed_out_once_lowest_first() -> None:
    pool = StateSlotPool(4)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    assert (pool.num_free, pool.num_usable) == (0, 3)
    with pytest.raises(AssertionError, match="all 3 are owned"):
        pool.allocate()
    pool.release(2)
    with pytest.raises(AssertionError, match="slot 2 is released but has no owner"):
        pool.release(2)
    assert pool.allocate() == 2
    for slot in (0, 4):
        with pytest.raises(AssertionError, match="does not belong"):
            pool.release(slot)


@pytest.mark.parametrize("size", [1, 0, -1])
def test_a_pool_needs_one_beside_padding(size: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {size}; expected at least 2"):
        BlockPool(size)
    with pytest.raises(ValueError, match=f"num_slots is {size}; expected at least 2"):
        StateSlotPool(size)


def test_named_blocks_keep_their_content_until_nothing_else_is_free() -> None:
    forgotten: list[int] = []
    pool = BlockPool(7, forgotten.append)
    taken = pool.allocate(4)
    for block in taken[:3]:
        pool.name(block)
    pool.release(taken)
    assert (pool.num_free, pool.num_free_named) == (6, 3)
    assert pool.allocate(3) == [5, 6, taken[3]]
    assert forgotten == []
    pool.hold([taken[2]])
    assert (pool.num_free, pool.num_free_named, pool.num_held(taken)) == (2, 2, 2)
    # The end of what was released together goes before its beginning.
    assert pool.allocate(1) == [taken[1]]
    assert forgotten == [taken[1]]
    pool.release([taken[1]])
    assert pool.num_free_named == 1, "it holds something else now"
    pool.forget_names()
    assert (pool.num_free, pool.num_free_named) == (2, 0)
    assert forgotten == [taken[1]]
    pool.release([taken[2]])
    assert pool.num_free_named == 0


def test_a_block_in_use_is_held_by_several() -> None:
    pool = BlockPool(4, lambda block: None)
    blocks = pool.allocate(2)
    pool.name(blocks[0])
    pool.hold(blocks[:1])
    pool.release(blocks)
    assert pool.num_holders.tolist() == [0, 1, 0, 0]
    pool.release(blocks[:1])
    assert (pool.num_free, pool.num_free_named) == (3, 1)
    with pytest.raises(AssertionError, match="named but has no holder"):
        pool.name(blocks[1])


def test_content_of_an_owner_with_few_blocks_outlives_that_of_one_with_many() -> None:
    gone: list[int] = []
    pool = BlockPool(9, gone.append)
    small = pool.allocate(2)
    for block in small:
        pool.name(block, "small")
    pool.release(small)
    for _ in range(5):
        greedy = pool.allocate(3)
        for block in greedy:
            pool.name(block, "greedy")
        pool.release(greedy)
    assert not set(gone) & set(small) and len(gone) >= 9
    pool.hold(small)
    assert pool.num_held(small) == 2
