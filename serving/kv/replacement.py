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

from collections import deque
from collections.abc import Callable, Hashable, Iterator

_SMALL_SHARE = 0.3
"""Of the bytes held, what the small queue may have before its end has to go."""

_GHOSTS_PER_PAYLOAD = 2
_USES_MAX = 3
_IN_MAIN = 4
"""Added to the uses of a payload in the main queue."""


class S3Fifo[N: Hashable]:
    """Names with sizes in bytes, in the order in which they are to leave.

    `uses` of a name and its queue are one small number, and queues hold nothing but names. Those
    that were removed stay in their queue until they come up or outnumber the others.
    """

    def __init__(self) -> None:
        self._small: deque[N] = deque()
        self._main: deque[N] = deque()
        self._state: dict[N, int] = {}
        self._sizes: dict[N, int] = {}
        self._small_bytes = 0
        self._num_bytes = 0
        self._ghosts: dict[N, None] = {}
        self._ghost_order: deque[N] = deque()

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[N]:
        return iter(self._state)

    @property
    def num_bytes(self) -> int:
        """Of all names."""
        return self._num_bytes

    def add(self, name: N, size: int) -> None:
        """A name that was not there."""
        assert name not in self._state, f"{name} is added twice"
        self._sizes[name] = size
        self._num_bytes += size
        if name in self._ghosts:
            del self._ghosts[name]
            self._state[name] = _IN_MAIN
            self._main.append(name)
        else:
            self._state[name] = 0
            self._small_bytes += size
            self._small.append(name)
        if len(self._small) + len(self._main) > 2 * len(self._state) + 64:
            self._compact()

    def touch(self, name: N) -> None:
        """The name is used."""
        state = self._state[name]
        if state & _USES_MAX < _USES_MAX:
            self._state[name] = state + 1

    def remove(self, name: N) -> None:
        """The name has left; it is remembered for a while."""
        state, size = self._state.pop(name), self._sizes.pop(name)
        self._num_bytes -= size
        if state < _IN_MAIN:
            self._small_bytes -= size
        self._ghosts[name] = None
        self._ghost_order.append(name)
        while len(self._ghost_order) > _GHOSTS_PER_PAYLOAD * len(self._state) + 64:
            self._ghosts.pop(self._ghost_order.popleft(), None)

    def victim(self, may_go: Callable[[N], bool]) -> N | None:
        """The next name to leave, which stays until it is removed; None if none may go.

        Names that were used, or may not go, get another round.
        """
        # Each name comes up at most once in the small queue and once for each use in the main one.
        for _ in range(len(self._small) + (_USES_MAX + 2) * (len(self._state) + 1)):
            is_small = self._small_bytes > _SMALL_SHARE * self._num_bytes or not self._main
            queue = self._small if is_small else self._main
            if not queue:
                return None
            name = queue[0]
            state = self._state.get(name)
            if state is None or (state < _IN_MAIN) != is_small:
                queue.popleft()
                continue
            uses = state & _USES_MAX
            if not uses and may_go(name):
                return name
            queue.popleft()
            self._main.append(name)
            if is_small:
                self._small_bytes -= self._sizes[name]
                self._state[name] = _IN_MAIN
            elif uses:
                self._state[name] = state - 1
        return None

    def _compact(self) -> None:
        """Drop what was removed, and all but the first place of what came back."""
        seen: set[N] = set()
        for is_small, queue in ((True, self._small), (False, self._main)):
            kept: list[N] = []
            for name in queue:
                state = self._state.get(name)
                if state is not None and (state < _IN_MAIN) == is_small and name not in seen:
                    seen.add(name)
                    kept.append(name)
            queue.clear()
            queue.extend(kept)
