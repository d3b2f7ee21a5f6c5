"""What waits for room, in the order in which it is to start: sequences, or requests in a router.

The order is by priority, a smaller number first; among equals those that were preempted come before
those that have not started yet, and then who came first.

Low priorities do not starve. While sequences of some priority wait, the starts of more urgent ones
are counted; at every `OUTRANKED_MAX`-th the first of that priority is *promoted*: from then on it
is more urgent than every priority, also once it runs. So the k-th in line of its priority sees at
most `k * OUTRANKED_MAX` more urgent ones start before it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Protocol

OUTRANKED_MAX = 32
"""Starts of more urgent sequences after which one of a priority goes first."""

_Key = tuple[int, bool, int]


class Waiting(Protocol):
    """What may wait."""

    is_promoted: bool

    @property
    def sequence_id(self) -> int:
        """Its number, in the order of admission."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it was begun before."""
        ...

    @property
    def urgency(self) -> int:
        """Its priority, or less than any once it is promoted."""
        ...


class WaitingQueue[T: Waiting]:
    """Sequences by urgency, resumed before new, then by the order of admission."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._sequences: dict[_Key, T] = {}
        self._key_of: dict[int, _Key] = {}
        self._num_outranked: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return (self._sequences[key] for key in self._keys)

    def add(self, sequence: T) -> None:
        """Queue a sequence, a new one or one that was preempted."""
        key = (sequence.urgency, not sequence.num_preemptions, sequence.sequence_id)
        insort(self._keys, key)
        self._sequences[key] = sequence
        self._key_of[sequence.sequence_id] = key

    def remove(self, sequence: T) -> None:
        """Take a sequence out, wherever it stands."""
        key = self._key_of.pop(sequence.sequence_id)
        del self._sequences[key]
        del self._keys[bisect_left(self._keys, key)]

    def count_starts(self, started: Iterable[T]) -> None:
        """These have left the queue to run; promotes those that were outranked often enough."""
        firsts = self._firsts()
        self._num_outranked = {u: n for u, n in self._num_outranked.items() if u in firsts}
        for urgency, first in firsts.items():
            num_before = sum(sequence.urgency < urgency for sequence in started)
            count = self._num_outranked.get(urgency, 0) + num_before
            if count >= OUTRANKED_MAX:
                count = 0
                self.remove(first)
                first.is_promoted = True
                self.add(first)
            self._num_outranked[urgency] = count

    def _firsts(self) -> dict[int, T]:
        """The first in line of each urgency."""
        firsts: dict[int, T] = {}
        index = 0
        while index < len(self._keys):
            key = self._keys[index]
            firsts[key[0]] = self._sequences[key]
            index = bisect_left(self._keys, (key[0] + 1, False, -1))
        return firsts
