"""Which blocks a cache keeps: ours, and the policies that it is compared with.

A prompt's blocks are used from the last to the first, and all that were not there come in. Sizes
count blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from serving.kv.replacement import Entry, S3Fifo


class Policy(Protocol):
    """A cache of so many blocks."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was served; all of them are there then, if there is room."""
        ...


class Lru:
    """The least recently used block goes."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def use(self, blocks: Sequence[int]) -> None:
        """See `Policy`."""
        for block in reversed(blocks):
            _use_last(self._order, block)
        _shrink(self._order, self._blocks_max)


class LruWithGhosts:
    """LRU for what came again, behind a queue for what came once, with a list of what has left.

    Source: Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement
    algorithm", VLDB 1994.
    """

    _QUEUE_SHARE = 0.25

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def use(self, blocks: Sequence[int]) -> None:
        """See `Policy`."""
        for block in reversed(blocks):
            known = block in self._once or block in self._ghosts
            self._once.pop(block, None)
            self._ghosts.pop(block, None)
            if known or block in self._again:
                _use_last(self._again, block)
            else:
                self._once[block] = None
        while len(self._once) + len(self._again) > self._blocks_max:
            is_over = len(self._once) > self._QUEUE_SHARE * self._blocks_max
            queue = self._once if is_over or not self._again else self._again
            self._ghosts[queue.popitem(last=False)[0]] = None
        _shrink(self._ghosts, 2 * self._blocks_max)


class Served:
    """What the tiers use: `serving.kv.replacement`."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._entries: dict[int, Entry] = {}
        self._order: S3Fifo[Entry] = S3Fifo()

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def use(self, blocks: Sequence[int]) -> None:
        """See `Policy`."""
        for block in reversed(blocks):
            entry = self._entries.get(block)
            if entry is not None:
                self._order.touch(entry)
            else:
                entry = self._entries[block] = Entry(block, 1)
                self._order.add(entry)
        while len(self._order) > self._blocks_max:
            victim = self._order.victim(lambda _: True)
            assert victim is not None, "something may always go"
            self._order.remove(victim)
            self._entries.pop(cast("int", victim.name))


POLICIES = {"s3_fifo": Served, "lru_ghosts": LruWithGhosts, "lru": Lru}


def hit_ratio(prompts: Iterable[Sequence[int]], policy: Policy) -> float:
    """The share of blocks that are there when their prompt comes, from its first on."""
    num_hits = num_blocks = 0
    for blocks in prompts:
        for block in blocks:
            if block not in policy:
                break
            num_hits += 1
        num_blocks += len(blocks)
        policy.use(blocks)
    return num_hits / num_blocks


def _use_last(order: "OrderedDict[int, None]", block: int) -> None:
    order[block] = None
    order.move_to_end(block)


def _shrink(order: "OrderedDict[int, None]", size: int) -> None:
    while len(order) > size:
        order.popitem(last=False)
