"""Who goes on to the engine next: tenants take turns by what they have been served.

The engine serves in the order of arrival, so it is given only what it can soon run; the rest waits
here. Each tenant has a *virtual time* that advances by the tokens it is granted; of the tenants
that wait, the one with the least goes next (start-time fair queueing: Goyal, Vin and Cheng, 1996).
A tenant that comes back after a pause starts at the present virtual time, so it has saved nothing
up, and no tenant waits for more than one grant of each other one. When the queue is full, the
newest waiter of the tenant with most waiters makes room for tenants that have fewer.

Among the calls of one tenant a smaller priority goes first, and equals in the order of their
arrival. Whoever has been passed by 32 others goes before all of them, so that none starves. *Why*
not across tenants: each would call its own calls the most urgent.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field

from serving.config import COUNT_MAX, EngineOptions
from serving.frontend.errors import ApiError, bad_request

PASSED_MAX = 32
"""How often a call may be passed by more urgent ones of its tenant."""


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    cost: float
    priority: int
    turn: asyncio.Future[None]
    num_passed: int = 0


@dataclass(slots=True)
class _Tenant:
    virtual_time: float = 0.0
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])

    def first(self) -> _Waiter:
        """Whose turn it is among those that wait, of whom there is one at least."""
        oldest = self.waiters[0]
        if oldest.num_passed >= PASSED_MAX:
            return oldest
        return min(self.waiters, key=lambda waiter: waiter.priority)

    def pass_on(self, waiter: _Waiter) -> None:
        """Takes a waiter out of the row."""
        index = self.waiters.index(waiter)
        del self.waiters[index]
        for passed in itertools.islice(self.waiters, index):
            passed.num_passed += 1


class FairQueue:
    """Lets calls through to the engine.

    Args:
        running_max: engine requests that may be there at one time.
        waiting_max: engine requests that may wait here.
        call_max: engine requests of one call that the engine can take when it has no others.
    """

    def __init__(self, running_max: int, waiting_max: int, call_max: int = COUNT_MAX) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._call_max = call_max
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_time = 0.0
        self.num_running = 0
        self.num_waiting = 0

    @classmethod
    def for_engine(cls, options: EngineOptions) -> "FairQueue":
        """As many may wait in the engine as can run in it, the others of `waiting_max` here."""
        num_rows = options.decode_rows[-1]
        num_ahead = min(num_rows, options.waiting_max)
        all_together = num_rows + options.waiting_max
        return cls(num_rows + num_ahead, options.waiting_max - num_ahead, all_together)

    async def enter(self, tenant: str, size: int, cost: float, priority: int = 0) -> None:
        """Waits for the turn of a call of `size` engine requests and `cost` tokens.

        Whoever has entered has to leave.

        Raises:
            ApiError: 429, too many wait already; 400, the call is too large for an idle engine.
        """
        if size > self._call_max:
            raise bad_request(
                f"the call asks for {size} answers, its prompts times n; expected at most "
                f"{self._call_max}, which is what this server can run and let wait at one time",
                "n",
            )
        state = self._tenants.setdefault(tenant, _Tenant())
        if not self.num_waiting and self._has_room(size):
            self._grant(state, size, cost)
            return
        while self.num_waiting + size > self._waiting_max:
            if not self._make_room(state):
                raise _full(self._waiting_max)
        waiter = _Waiter(size, cost, priority, asyncio.get_running_loop().create_future())
        state.waiters.append(waiter)
        self.num_waiting += size
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                self.leave(tenant, size, 0.0)  # Its turn had come in the meantime.
            elif waiter in state.waiters:
                state.waiters.remove(waiter)
                self.num_waiting -= size
                self._advance()
            raise

    def leave(self, tenant: str, size: int, correction: float) -> None:
        """Ends a call; `correction` is what it took beyond the cost it entered with."""
        self.num_running -= size
        state = self._tenants[tenant]
        state.virtual_time += correction
        self._advance()

    def _has_room(self, size: int) -> bool:
        # A call that is larger than everything goes alone.
        return not self.num_running or self.num_running + size <= self._running_max

    def _grant(self, state: _Tenant, size: int, cost: float) -> None:
        start = max(state.virtual_time, self._virtual_time)
        state.virtual_time = start + cost
        self._virtual_time = start
        self.num_running += size

    def _advance(self) -> None:
        while waiting := [state for state in self._tenants.values() if state.waiters]:
            state = min(waiting, key=lambda other: max(other.virtual_time, self._virtual_time))
            waiter = state.first()
            if not self._has_room(waiter.size):
                return
            state.pass_on(waiter)
            self.num_waiting -= waiter.size
            if not waiter.turn.done():
                self._grant(state, waiter.size, waiter.cost)
                waiter.turn.set_result(None)

    def _make_room(self, comer: _Tenant) -> bool:
        """Turns the newest waiter of the tenant with most away, if that has more than `comer`."""
        longest = max(self._tenants.values(), key=lambda state: len(state.waiters))
        if len(longest.waiters) <= len(comer.waiters) + 1:
            return False
        waiter = longest.waiters.pop()
        self.num_waiting -= waiter.size
        if not waiter.turn.done():
            waiter.turn.set_exception(_full(self._waiting_max))
        return True


def _full(limit: int) -> ApiError:
    detail = f"{limit} requests wait already; send it again later"
    return ApiError(429, detail, code="queue_full", retry_after_s=1)
