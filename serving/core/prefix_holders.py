"""Which workers hold which blocks, for choosing a worker by the prefix it already has.

One entry per block, with one bit per worker, so that a chain of keys is walked once for all workers
together and the walk stops where the last of them stops. It is a hint: a wrong entry costs a fetch,
never a wrong token, because whoever serves a block looks for itself.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np


class PrefixHolders:
    """The blocks of `num_workers` workers, as they announce them.

    Keys are `PrefixKey`s, or anything else that names a whole prefix.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; expected at least 1")
        self.num_workers = num_workers
        self._all = (1 << num_workers) - 1
        # Made once: masks of more than 30 workers are objects of their own.
        self._bits = [1 << worker for worker in range(num_workers)]
        self._masks: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Distinct blocks that some worker holds."""
        return len(self._masks)

    def add(self, worker: int, keys: Iterable[Hashable]) -> None:
        """`worker` now holds these blocks; those that it held already stay."""
        bit, masks = self._bits[worker], self._masks
        for key in keys:
            known = masks.get(key)
            masks[key] = bit if known is None else known | bit

    def remove(self, worker: int, keys: Iterable[Hashable]) -> None:
        """`worker` no longer holds these blocks; those that it never held are passed over."""
        bit, masks = self._bits[worker], self._masks
        for key in keys:
            rest = masks.get(key, 0) & ~bit
            if rest:
                masks[key] = rest
            else:
                masks.pop(key, None)

    def remove_worker(self, worker: int) -> None:
        """`worker` is gone with all it held. Looks at every block."""
        bit = self._bits[worker]
        self.remove(worker, [key for key, mask in self._masks.items() if mask & bit])

    def depths(self, keys: Sequence[Hashable]) -> np.ndarray:
        """[num_workers] int64: how many blocks of a chain each worker holds, from the first on."""
        depths = np.zeros(self.num_workers, np.int64)
        holding, get = self._all, self._masks.get
        for depth, key in enumerate(keys):
            still = holding & get(key, 0)
            if still != holding:
                if depth:
                    _write(depths, holding ^ still, depth)
                holding = still
                if not holding:
                    return depths
        _write(depths, holding, len(keys))
        return depths


def _write(depths: np.ndarray, mask: int, depth: int) -> None:
    """Sets the depth of the workers whose bits are set."""
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest
