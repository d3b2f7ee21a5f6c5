"""The two kinds of KV memory and who holds them: blocks that grow, slots of fixed size.

A pool hands out numbers, never memory: the arrays they point into live on the device. Number 0 of
either kind is never handed out, because padding rows of a step write there.
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from serving.core.shared_lru import SharedLru

BLOCK_SIZE = 128
"""Tokens in a block, on the device, on the wire and on disk."""


class BlockPool:
    """Blocks 1 to `num_blocks - 1`, each with the number of its holders.

    A block without a holder is free. If it is *named*, because its content can serve others, it
    keeps the content until it is allocated anew, which happens only when there is no nameless
    free block, and to the least recently used one of the owner with most of them first; those that
    somebody is about to need go last. Nameless ones are reused in the order in which they became
    free.

    Holders are counts in one array rather than an object per block: a pool has tens of thousands
    of them and a step touches hundreds.

    Args:
        forget: called with a named block that is about to be reused.
        may_go: whether a named block is one that nobody is about to need.

    Raises:
        ValueError: fewer than two blocks, so that none is left beside the padding block.
    """

    def __init__(
        self,
        num_blocks: int,
        forget: Callable[[int], None] | None = None,
        may_go: Callable[[int], bool] = lambda block: True,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; expected at least 2 (block 0 is padding)"
            )
        self.num_blocks = num_blocks
        self._forget = forget
        self._may_go = may_go
        self._num_holders = np.zeros(num_blocks, np.int32)
        self._is_named = np.zeros(num_blocks, bool)
        self._free: deque[int] = deque(range(1, num_blocks))
        self._free_named = SharedLru()
        self._owners: dict[int, str] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the padding block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without a holder, named ones included."""
        return len(self._free) + len(self._free_named)

    @property
    def num_free_named(self) -> int:
        """Blocks without a holder whose content can still serve others."""
        return len(self._free_named)

    @property
    def num_holders(self) -> np.ndarray:
        """[num_blocks] int32 copy: holders of each block."""
        return self._num_holders.copy()

    def num_held(self, blocks: list[int]) -> int:
        """How many of these blocks have a holder."""
        return int(np.count_nonzero(self._num_holders[blocks]))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block = self._free_named.pop_first(self._may_go)
            if block is None:
                block = self._free_named.pop()
            self._is_named[block] = False
            del self._owners[block]
            assert self._forget is not None, f"block {block} is named, but nobody remembers it"
            self._forget(block)
            taken.append(block)
        self._num_holders[taken] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; those that are free must be named."""
        for block in blocks:
            if self._num_holders[block] == 0:
                self._free_named.remove(block)
            self._num_holders[block] += 1

    def name(self, block: int, owner: str = "") -> None:
        """Keep the content of a held block after its last holder let it go, for `owner`."""
        assert self._num_holders[block] > 0, f"block {block} is named but has no holder"
        self._is_named[block] = True
        self._owners[block] = owner

    def forget_names(self) -> None:
        """No content is worth keeping any more."""
        self._is_named[:] = False
        self._owners.clear()
        self._free.extend(self._free_named)
        self._free_named.clear()

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold on each block; those without a holder left become free.

        The last block becomes free first and is therefore reused first: the beginning of a
        context is worth more than its end, because more other contexts may begin with it. Who
        holds a named block holds those before it, so what is reused is always the end of a prefix.
        """
        for block in reversed(list(blocks)):
            assert self._num_holders[block] > 0, f"block {block} is released but has no holder"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if self._is_named[block]:
                    self._free_named.add(block, self._owners[block])
                else:
                    self._free.append(block)


class StateSlotPool:
    """Slots 1 to `num_slots - 1`: window rings and compressor state of one sequence each.

    A slot needs no clearing between owners: the model masks what lies before position 0.

    Raises:
        ValueError: fewer than two slots, so that none is left beside the padding slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; expected at least 2 (slot 0 is padding)")
        self.num_slots = num_slots
        self._is_free = np.ones(num_slots, bool)
        self._is_free[0] = False
        # Lowest numbers first, so that lightly loaded engines touch few rows.
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        """Slots that sequences can own: all but the padding slot."""
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free slot. The caller has checked `num_free`."""
        assert self._free, f"a slot is wanted but all {self.num_usable} are owned"
        slot = self._free.pop()
        self._is_free[slot] = False
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert 0 < slot < self.num_slots, f"slot {slot} does not belong to the pool"
        assert not self._is_free[slot], f"slot {slot} is released but has no owner"
        self._is_free[slot] = True
        self._free.append(slot)
