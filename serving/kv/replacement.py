"""In what order payloads leave a full tier: S3-FIFO, by bytes.

Most prefixes are used once, so what comes in passes a small queue first and goes from its end
unless it was used there; then it moves to the main queue, whose end gets another round for each
use. Names of what has left are remembered for a while, and what comes back soon goes to the main
queue at once. Using a payload only counts, so a long prefix is touched cheaply.

Whoever adds or touches a prefix does so from its last block to its first, so that in either queue
its end comes up first: a block without those before it is of no use.

*Why not LRU*: on the public Mooncake traces it keeps less at most sizes (`scripts/bench_kv.py`,
part `hit_ratio`). With a ghost list (2Q) it keeps as much as this, but every use moves an entry.
The small queue is larger than the tenth of the paper: a conversation goes on after minutes.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from array import array
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_SMALL_SHARE = 0.3
"""Of the bytes held, what the small queue may have before its end has to go."""

_GHOSTS_PER_PAYLOAD = 2
_USES_MAX = 3
_IN_MAIN = 4
"""Added to the uses of a payload in the main queue."""

_GONE = -1
_LOW = 0xFFFF_FFFF


@dataclass(slots=True, eq=False)
class Entry:
    """A name in the order, with its size in bytes. `state` is for the order alone."""

    name: Hashable
    size: int
    state: int = 0


class S3Fifo[E: Entry]:
    """Entries in the order in which they are to leave; queues hold nothing else.

    Those that were removed stay in their queue until they come up or outnumber the others.
    """

    def __init__(self) -> None:
        self._small: deque[E] = deque()
        self._main: deque[E] = deque()
        self._small_bytes = 0
        self._num_entries = 0
        self._ghosts = _Ghosts()
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entry: E) -> None:
        """An entry that was not there."""
        self._num_entries += 1
        self.num_bytes += entry.size
        if self._ghosts.take(entry.name):
            entry.state = _IN_MAIN
            self._main.append(entry)
        else:
            entry.state = 0
            self._small_bytes += entry.size
            self._small.append(entry)
        if len(self._small) + len(self._main) > 2 * self._num_entries + 64:
            self._compact()

    def touch(self, entry: E) -> None:
        """The entry is used."""
        if entry.state & _USES_MAX < _USES_MAX:
            entry.state += 1

    def remove(self, entry: E) -> None:
        """The entry has left; its name is remembered for a while."""
        assert entry.state != _GONE, f"{entry.name} is removed twice"
        self._num_entries -= 1
        self.num_bytes -= entry.size
        if entry.state < _IN_MAIN:
            self._small_bytes -= entry.size
        entry.state = _GONE
        self._ghosts.add(entry.name, _GHOSTS_PER_PAYLOAD * self._num_entries)

    def victim(self, may_go: Callable[[E], bool]) -> E | None:
        """The next to leave, which stays until it is removed; None if none may go.

        Those that were used, or may not go, get another round.
        """
        # Each comes up at most once in the small queue and once for each use in the main one.
        num_turns = (_USES_MAX + 2) * (self._num_entries + 1)
        for _ in range(len(self._small) + len(self._main) + num_turns):
            is_small = self._small_bytes > _SMALL_SHARE * self.num_bytes or not self._main
            queue = self._small if is_small else self._main
            if not queue:
                return None
            entry = queue[0]
            if entry.state == _GONE:
                queue.popleft()
                continue
            uses = entry.state & _USES_MAX
            if not uses and may_go(entry):
                return entry
            queue.popleft()
            self._main.append(entry)
            if is_small:
                self._small_bytes -= entry.size
                entry.state = _IN_MAIN
            elif uses:
                entry.state -= 1
        return None

    def _compact(self) -> None:
        for queue in (self._small, self._main):
            kept = [entry for entry in queue if entry.state != _GONE]
            queue.clear()
            queue.extend(kept)


class _Ghosts:
    """The last names that have left, in little memory: 32 bits of each, and when it left.

    A name has a few places that it may take, and takes that of the oldest. More of them are lost
    the fewer there are, and of a prompt all blocks are wanted: hence two places for each name.
    """

    _WAYS = 8

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 16 * self._WAYS))
        self._now = 1
        self._size = 0

    def add(self, name: Hashable, size: int) -> None:
        """Remember a name, as one of the last `size`."""
        self._size = max(size, 64)
        self._now += 1
        if 2 * self._size > len(self._table):
            # What was remembered is lost; that happens as often as the number of payloads doubles.
            self._table = array("Q", bytes(8 * 4 * len(self._table)))
        first, mark = self._spot(name)
        table = self._table
        oldest = min(range(first, first + self._WAYS), key=lambda at: table[at] & _LOW)
        table[oldest] = mark << 32 | self._now & _LOW

    def take(self, name: Hashable) -> bool:
        """Whether a name is remembered; it is not any more."""
        first, mark = self._spot(name)
        for at, known in enumerate(self._table[first : first + self._WAYS], first):
            if known >> 32 == mark and (self._now - known) & _LOW < self._size:
                self._table[at] = 0
                return True
        return False

    def _spot(self, name: Hashable) -> tuple[int, int]:
        # Mixed, because whole numbers are their own hashes.
        mixed = (hash(name) * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
        num_sets = len(self._table) // self._WAYS
        return (mixed >> 32) % num_sets * self._WAYS, (mixed & _LOW) | 1
