"""What a storage node holds, and what has changed since anybody's last question.

Every change has a number. Whoever asks names the last one that it has heard of and is told what is
held, or is gone, since then; a page at a time.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_SPARE = 1024
"""Changes that are remembered beside those that tell what is held, before old ones go."""


@dataclass(frozen=True, slots=True)
class Changes[T]:
    """Changes up to number `upto`; `is_anew`: what was heard before does not count."""

    upto: int
    has_more: bool
    is_anew: bool
    held: list[tuple[str, T]]
    gone: list[str]


class ChangeLog[T]:
    """Items under names. Not for several threads at one time."""

    def __init__(self, spare: int = _SPARE) -> None:
        self._spare = spare
        self._numbers = itertools.count(1)
        self._held: dict[str, tuple[int, T]] = {}
        self._log: list[tuple[int, str]] = []
        # Changes up to this number are forgotten.
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    def get(self, name: str) -> T | None:
        """The item that is held under a name; None if there is none."""
        found = self._held.get(name)
        return None if found is None else found[1]

    def items(self) -> Iterator[T]:
        """All that is held."""
        return (item for _, item in self._held.values())

    def add(self, name: str, item: T) -> None:
        """Hold an item, in place of another of that name."""
        number = next(self._numbers)
        self._held[name] = (number, item)
        self._note(number, name)

    def remove(self, name: str) -> bool:
        """Hold it no longer; whether it was."""
        if self._held.pop(name, None) is None:
            return False
        self._note(next(self._numbers), name)
        return True

    def since(self, number: int, limit: int) -> Changes[T]:
        """At most `limit` of the changes after `number`."""
        is_anew = number <= self._forgotten
        if is_anew:
            number = 0
        held: list[tuple[str, T]] = []
        gone: list[str] = []
        at = bisect.bisect_right(self._log, number, key=lambda change: change[0])
        while at < len(self._log) and len(held) + len(gone) < limit:
            number, name = self._log[at]
            at += 1
            found = self._held.get(name)
            if found is None:
                gone.append(name)
            elif found[0] == number:
                held.append((name, found[1]))
        return Changes(number, at < len(self._log), is_anew, held, gone)

    def _note(self, number: int, name: str) -> None:
        self._log.append((number, name))
        if len(self._log) <= 2 * len(self._held) + self._spare:
            return
        # All that is held gets a number after those that are forgotten: who has heard of any of
        # them begins anew, once.
        self._forgotten = number
        self._held = {held: (next(self._numbers), item) for held, (_, item) in self._held.items()}
        self._log = [(number, held) for held, (number, _) in self._held.items()]
