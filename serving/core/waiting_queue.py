"""What waits for room, in the order in which it is to start: sequences, or requests in a router.

Those of one owner (`Request.cache_owner`, a tenant) are a line: by priority, a smaller number
first; among equals those that were preempted come before those that have not started yet, and then
who came first. With several lines owners take turns: a line's k-th stands where its owner would run
k more than it does, and who runs fewer comes first; of equals the one that was admitted first. So
urgency is of use against one's own only, as it is for memory (`running_columns.py`), and whoever
sends many requests at once stands back for one who sends a few.

Low priorities do not starve. While sequences of some priority wait, the starts of more urgent ones
of their owner are counted; at every `OUTRANKED_MAX`-th the first of that priority is *promoted*:
from then on it is more urgent than every priority, also once it runs. So the k-th in line of its
priority sees at most `k * OUTRANKED_MAX` more urgent ones of its owner start before it. No line
starves either: an owner without anything that runs is passed only by owners like it whose first
came earlier.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from serving.core.request import Request

OUTRANKED_MAX = 32
"""Starts of more urgent sequences after which one of a priority goes first."""

_Key = tuple[int, bool, int]


class Waiting(Protocol):
    """What may wait."""

    is_promoted: bool

    @property
    def request(self) -> Request:
        """What is asked for, and by whom."""
        ...

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
    """Sequences in the order in which they are to start.

    Args:
        num_running: how many have begun and not ended, by owner.
    """

    def __init__(self, num_running: Callable[[str], int]) -> None:
        self._num_running = num_running
        # By owner; empty ones are let go.
        self._lines: dict[str, list[_Key]] = {}
        self._sequences: dict[_Key, T] = {}
        self._key_of: dict[int, _Key] = {}
        self._num_outranked: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __iter__(self) -> Iterator[T]:
        """In order, by what runs at the first step; nothing may come or leave meanwhile."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return (self._sequences[key] for key in line)
        turns = [_turns(line, self._num_running(owner)) for owner, line in self._lines.items()]
        return (self._sequences[key] for *_, key in heapq.merge(*turns))

    def add(self, sequence: T) -> None:
        """Queue a sequence, a new one or one that was preempted."""
        key = (sequence.urgency, not sequence.num_preemptions, sequence.sequence_id)
        insort(self._lines.setdefault(sequence.request.cache_owner, []), key)
        self._sequences[key] = sequence
        self._key_of[sequence.sequence_id] = key

    def remove(self, sequence: T) -> None:
        """Take a sequence out, wherever it stands."""
        owner = sequence.request.cache_owner
        key = self._key_of.pop(sequence.sequence_id)
        del self._sequences[key]
        line = self._lines[owner]
        del line[bisect_left(line, key)]
        if not line:
            del self._lines[owner]

    def count_starts(self, started: Iterable[T]) -> None:
        """These have left the queue to run; promotes those that were outranked often enough."""
        begun = [(sequence.request.cache_owner, sequence.urgency) for sequence in started]
        firsts = self._firsts()
        self._num_outranked = {u: n for u, n in self._num_outranked.items() if u in firsts}
        for (owner, urgency), first in firsts.items():
            num_before = sum(other == owner and more < urgency for other, more in begun)
            count = self._num_outranked.get((owner, urgency), 0) + num_before
            if count >= OUTRANKED_MAX:
                count = 0
                self.remove(first)
                first.is_promoted = True
                self.add(first)
            self._num_outranked[owner, urgency] = count

    def _firsts(self) -> dict[tuple[str, int], T]:
        """The first in line of each owner and urgency."""
        firsts: dict[tuple[str, int], T] = {}
        for owner, line in self._lines.items():
            index = 0
            while index < len(line):
                key = line[index]
                firsts[owner, key[0]] = self._sequences[key]
                index = bisect_left(line, (key[0] + 1, False, -1))
        return firsts


def _turns(line: list[_Key], num_running: int) -> Iterator[tuple[int, int, _Key]]:
    """When each of a line is to start: how many of its owner run then, and when it was admitted."""
    return ((num_running + place, key[2], key) for place, key in enumerate(line))
