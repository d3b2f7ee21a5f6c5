"""Where prefixes lie in a simulated fleet: one store for all, and copies in workers' host memory.

A block of a run is its number in the trace and the group of its request (`workload`). Stores
answer how many blocks of a prompt they have, from the first on.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from serving.core.prefix_holders import PrefixHolders
from serving.sim.workload import Workload


class PrefixStore(Protocol):
    """Blocks that every worker can fetch."""

    def depth(self, group: int, blocks: Sequence[int]) -> int:
        """How many of the blocks are there, from the first on."""
        ...

    def write(self, group: int, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was computed."""
        ...


class EndlessStore:
    """Keeps everything, what was used before the run included: a byte per block and group."""

    def __init__(self, workload: Workload) -> None:
        self._is_present = [
            bytearray(workload.known_blocks(group).tobytes())
            for group in range(workload.num_groups)
        ]

    def depth(self, group: int, blocks: Sequence[int]) -> int:
        """How many of the blocks are there, from the first on."""
        is_present = self._is_present[group]
        # Prompts are written whole, so what is there comes first.
        return bisect_left(blocks, True, key=lambda block: not is_present[block])

    def write(self, group: int, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was computed."""
        is_present = self._is_present[group]
        for block in reversed(blocks):
            if is_present[block]:
                break  # And so are those before it.
            is_present[block] = 1


class _RecentBlocks:
    """At most so many blocks; the least recently used go first, ends of prompts before starts."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> list[int]:
        """Forgets all blocks, and says which they were."""
        gone = list(self._blocks)
        self._blocks.clear()
        return gone

    def depth(self, keys: Sequence[int]) -> int:
        """How many of the blocks are there, from the first on; they count as used."""
        blocks, depth = self._blocks, 0
        for key in keys:
            if key not in blocks:
                break
            depth += 1
        for key in reversed(keys[:depth]):
            blocks.move_to_end(key)
        return depth

    def add(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks are used now; gives those that came and those that had to go."""
        blocks, come = self._blocks, list[int]()
        for key in reversed(keys):
            if key not in blocks:
                come.append(key)
                blocks[key] = None
            blocks.move_to_end(key)
        excess = max(len(blocks) - self._blocks_max, 0)
        gone = [blocks.popitem(last=False)[0] for _ in range(excess)]
        return come, gone


class BoundedStore:
    """Keeps the most recently used blocks; empty at first.

    Raises:
        ValueError: not even one block.
    """

    def __init__(self, num_blocks: int, blocks_max: int) -> None:
        if blocks_max < 1:
            raise ValueError(f"blocks_max is {blocks_max}; expected at least 1")
        self._num_blocks = num_blocks
        self._recent = _RecentBlocks(blocks_max)

    def depth(self, group: int, blocks: Sequence[int]) -> int:
        """How many of the blocks are there, from the first on; they count as used."""
        first = group * self._num_blocks
        return self._recent.depth([first + block for block in blocks])

    def write(self, group: int, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was computed."""
        first = group * self._num_blocks
        self._recent.add([first + block for block in blocks])


class HostCopies:
    """What prefill workers keep in host memory, announced to `holders`."""

    def __init__(self, holders: PrefixHolders, blocks_max: int) -> None:
        self._holders = holders
        self._recent = [_RecentBlocks(blocks_max) for _ in range(holders.num_workers)]

    def depth(self, worker: int, keys: Sequence[int]) -> int:
        """How many blocks of a prompt the worker has, from the first on."""
        return self._recent[worker].depth(keys)

    def add(self, worker: int, keys: Sequence[int]) -> None:
        """The worker has computed or fetched these blocks."""
        come, gone = self._recent[worker].add(keys)
        self._holders.add(worker, come)
        self._holders.remove(worker, gone)

    def lose(self, worker: int) -> None:
        """The worker has died with all it had."""
        self._holders.remove(worker, self._recent[worker].clear())
