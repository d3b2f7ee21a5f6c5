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

The engine preempts for urgent requests, but only for those it knows of. So when its share is full,
a call may *pass* beyond it, into a reserve, if the share holds less urgent requests of the same
tenant, at least as many as that tenant would then have beyond. *Why* of the same tenant: again, so
that being urgent is of use against one's own calls only; one that holds nothing waits for its turn.
*Why* not measured by those beyond: each could be passed by a still more urgent one, for ever. A
call that passes pays like any other, so its tenant's next turn is the later; it counts as having
passed the tenant's earlier waiters, so 32 of them at most; and it takes no place of the share, so
other tenants enter as if it were not there.

A call gives its places back one by one, as its requests end.
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
    turn: asyncio.Future["Place"]
    num_passed: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """What a call holds of the engine: `num_held` requests, in the share or beyond it."""

    tenant: str
    priority: int
    num_held: int
    is_beyond: bool


@dataclass(slots=True)
class _Tenant:
    name: str
    virtual_time: float = 0.0
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])
    places: set[Place] = field(default_factory=set[Place])

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

    def may_pass(self, waiter: _Waiter) -> bool:
        """Whether it holds enough that is less urgent than this and all it has beyond."""
        num_beyond = sum(place.num_held for place in self.places if place.is_beyond)
        num_less_urgent = sum(
            place.num_held
            for place in self.places
            if not place.is_beyond and place.priority > waiter.priority
        )
        return num_beyond + waiter.size <= num_less_urgent


class FairQueue:
    """Lets calls through to the engine.

    Args:
        running_max: engine requests that may be there at one time.
        waiting_max: engine requests that may wait here.
        call_max: engine requests that the engine can take in all, of one call or of several.
        urgent_max: engine requests that may be there beyond `running_max`, being urgent.
    """

    def __init__(
        self,
        running_max: int,
        waiting_max: int,
        call_max: int = COUNT_MAX,
        urgent_max: int = 0,
    ) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._call_max = call_max
        self._urgent_max = urgent_max
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_time = 0.0
        self.num_running = 0
        """Engine requests there, those beyond the share included."""
        self.num_beyond = 0
        self.num_waiting = 0

    @classmethod
    def for_engine(cls, options: EngineOptions) -> "FairQueue":
        """As many may wait in the engine as can run in it, the others of `waiting_max` here.

        The urgent may be as many as can run, but never more in all than the engine lets wait.
        """
        num_rows = options.decode_rows[-1]
        num_ahead = min(num_rows, options.waiting_max)
        num_here = options.waiting_max - num_ahead
        all_together = num_rows + options.waiting_max
        return cls(num_rows + num_ahead, num_here, all_together, min(num_rows, num_here))

    async def enter(self, tenant: str, size: int, cost: float, priority: int = 0) -> Place:
        """Waits for the turn of a call of `size` engine requests and `cost` tokens.

        Whoever has entered has to `leave` with what this returns.

        Raises:
            ApiError: 429, too many wait already; 400, the call is too large for an idle engine.
        """
        if size > self._call_max:
            raise bad_request(
                f"the call asks for {size} answers, its prompts times n; expected at most "
                f"{self._call_max}, which is what this server can run and let wait at one time",
                "n",
            )
        state = self._tenants.setdefault(tenant, _Tenant(tenant))
        waiter = _Waiter(size, cost, priority, asyncio.get_running_loop().create_future())
        state.waiters.append(waiter)
        self.num_waiting += size
        self._advance()
        while not waiter.turn.done() and self.num_waiting > self._waiting_max:
            if not self._make_room(state):
                self._remove(state, waiter)
                raise _full(self._waiting_max)
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            turn = waiter.turn
            if turn.done() and not turn.cancelled() and not turn.exception():
                self.leave(turn.result(), -cost)  # Its turn had come in the meantime.
            elif waiter in state.waiters:
                self._remove(state, waiter)
                self._advance()
            raise

    def give_back(self, place: Place) -> None:
        """One request of a call has ended; no effect if none is left."""
        self._free(place, min(place.num_held, 1))
        self._advance()

    def leave(self, place: Place, correction: float) -> None:
        """Ends a call; `correction` is what it took beyond the cost it entered with."""
        self._free(place, place.num_held)
        self._tenants[place.tenant].virtual_time += correction
        self._advance()

    def _free(self, place: Place, num: int) -> None:
        place.num_held -= num
        self.num_running -= num
        if place.is_beyond:
            self.num_beyond -= num
        if not place.num_held:
            self._tenants[place.tenant].places.discard(place)

    def _remove(self, state: _Tenant, waiter: _Waiter) -> None:
        state.waiters.remove(waiter)
        self.num_waiting -= waiter.size

    def _advance(self) -> None:
        """Lets in whoever can go: in turn into the share, then the urgent beyond it."""
        while waiting := [state for state in self._tenants.values() if state.waiters]:
            waiting.sort(key=lambda state: max(state.virtual_time, self._virtual_time))
            if self._has_room(waiting[0].first().size):
                self._let_in(waiting[0], is_beyond=False)
                continue
            urgent = next((state for state in waiting if self._may_pass(state)), None)
            if urgent is None:
                return
            self._let_in(urgent, is_beyond=True)

    def _has_room(self, size: int) -> bool:
        # A call that is larger than everything goes alone.
        num_in_share = self.num_running - self.num_beyond
        return not self.num_running or num_in_share + size <= self._running_max

    def _may_pass(self, state: _Tenant) -> bool:
        waiter = state.first()
        return (
            self.num_beyond + waiter.size <= self._urgent_max
            and self.num_running + waiter.size <= self._call_max
            and state.may_pass(waiter)
        )

    def _let_in(self, state: _Tenant, is_beyond: bool) -> None:
        waiter = state.first()
        state.pass_on(waiter)
        self.num_waiting -= waiter.size
        if waiter.turn.done():
            return
        start = max(state.virtual_time, self._virtual_time)
        state.virtual_time = start + waiter.cost
        if is_beyond:
            self.num_beyond += waiter.size
        else:
            # Not for one out of turn: the others' lag behind its tenant would be forgotten.
            self._virtual_time = start
        self.num_running += waiter.size
        place = Place(state.name, waiter.priority, waiter.size, is_beyond)
        state.places.add(place)
        waiter.turn.set_result(place)

    def _make_room(self, comer: _Tenant) -> bool:
        """Turns the newest waiter of the tenant with most away, if that has more than `comer`."""
        longest = max(self._tenants.values(), key=lambda state: len(state.waiters))
        if len(longest.waiters) <= len(comer.waiters):
            return False
        waiter = longest.waiters.pop()
        self.num_waiting -= waiter.size
        if not waiter.turn.done():
            waiter.turn.set_exception(_full(self._waiting_max))
        return True


def _full(limit: int) -> ApiError:
    detail = f"{limit} requests wait already; send it again later"
    return ApiError(429, detail, code="queue_full", retry_after_s=1)
