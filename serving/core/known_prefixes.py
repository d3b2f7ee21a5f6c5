"""Which prefixes were computed lately, for predicting how much of a prompt is left to compute.

As prefixes are stored, so they count here: one can be gone on from at the end of a prompt, and
where a later prompt has parted from it. It is a hint: what is not there after all is computed, and
all that suffers is the prediction.
"""

from collections import OrderedDict
from collections.abc import Sequence

from serving.core.prefix import PrefixKey


class KnownPrefixes:
    """The blocks of the last prompts, `keys_max` of them.

    Raises:
        ValueError: room for less than one.
    """

    def __init__(self, keys_max: int) -> None:
        if keys_max < 1:
            raise ValueError(f"keys_max is {keys_max}; expected at least 1")
        self._keys_max = keys_max
        # Whether each can be gone on from; those of the prompts used last come last.
        self._is_end: OrderedDict[PrefixKey, bool] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._is_end)

    def num_usable(self, keys: Sequence[PrefixKey]) -> int:
        """Blocks of the longest prefix of a chain that can be gone on from."""
        num_usable = 0
        for depth, key in enumerate(keys, 1):
            is_end = self._is_end.get(key)
            if is_end is None:
                break
            if is_end:
                num_usable = depth
        return num_usable

    def add(self, keys: Sequence[PrefixKey]) -> None:
        """A prompt with these blocks was computed."""
        num_known = next((n for n, key in enumerate(keys) if key not in self._is_end), len(keys))
        ends = {num_known, len(keys)}
        # From the end, because what goes first is to be the ends of prefixes.
        for depth in range(len(keys), 0, -1):
            key = keys[depth - 1]
            self._is_end[key] = depth in ends or self._is_end.get(key, False)
            self._is_end.move_to_end(key)
        while len(self._is_end) > self._keys_max:
            self._is_end.popitem(last=False)
