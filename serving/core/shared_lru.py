"""A least-recently-used order that several owners share, none at the expense of the others.

Whatever has to go is taken from the owner who has most, its least recently used thing first. So an
owner keeps what it has as long as that is no more than an equal share, however much the others
bring in, and may have more while nobody else needs the room.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator


class SharedLru:
    """Numbers in the order of their use, by owner."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        self._by_owner: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def add(self, number: int, owner: str) -> None:
        """Add a number that is not there, as the one used last."""
        self._owners[number] = owner
        self._by_owner.setdefault(owner, OrderedDict())[number] = None

    def remove(self, number: int) -> None:
        """Take a number out."""
        owner = self._owners.pop(number)
        numbers = self._by_owner[owner]
        del numbers[number]
        if not numbers:
            del self._by_owner[owner]

    def use(self, number: int) -> None:
        """The number is used now."""
        self._by_owner[self._owners[number]].move_to_end(number)

    def pop(self) -> int:
        """Take out what has to go first; there must be something."""
        numbers = max(self._by_owner.values(), key=len)
        number = next(iter(numbers))
        self.remove(number)
        return number

    def pop_first(self, may_go: Callable[[int], bool]) -> int | None:
        """Take out the first thing in that order that may go; None if nothing may."""
        for numbers in sorted(self._by_owner.values(), key=len, reverse=True):
            number = next(filter(may_go, numbers), None)
            if number is not None:
                self.remove(number)
                return number
        return None

    def clear(self) -> None:
        """Take everything out."""
        self._owners.clear()
        self._by_owner.clear()
