"""Goal: under overload each tenant gets its share by tokens, whatever the others ask for; nobody
is kept waiting for ever, and a greedy tenant cannot fill the queue for the others. Urgent calls
reach the engine past a tenant's own, within bounds; ended requests leave room at once.

Method: calls entered in a known order, the order in which they are let through; and calls in any
order that `hypothesis` thinks of, with bounds checked at each step.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import EngineOptions
from serving.frontend.errors import ApiError
from serving.frontend.fair_queue import PASSED_MAX, FairQueue, Place


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 5))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Calls:
    """Enters calls and notes the tenants in the order of their turns."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.turns: list[str] = []
        self.priorities: list[int] = []
        self.places: defaultdict[str, deque[Place]] = defaultdict(deque)
        self.tasks: list[asyncio.Task[None]] = []

    async def enter(
        self, tenant: str, cost: float = 10.0, size: int = 1, priority: int = 0
    ) -> None:
        async def wait() -> None:
            self.places[tenant].append(await self.queue.enter(tenant, size, cost, priority))
            self.turns.append(tenant)
            self.priorities.append(priority)

        self.tasks.append(asyncio.create_task(wait()))
        await settle()

    async def leave(self, tenant: str, correction: float = 0.0) -> None:
        """The call of the tenant that has been there longest ends."""
        self.queue.leave(self.places[tenant].popleft(), correction)
        await settle()

    async def give_back(self, tenant: str) -> None:
        """One request of that call ends."""
        self.queue.give_back(self.places[tenant][0])
        await settle()


def test_tenants_take_turns_by_what_they_were_served() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 100))
        for _ in range(6):
            await calls.enter("greedy")
        await calls.enter("small")
        await calls.enter("small")
        for _ in range(7):
            await calls.leave(calls.turns[-1])
        assert calls.turns == ["greedy", "small", "greedy", "small", *["greedy"] * 4]

    run(test())


def test_shares_go_by_tokens_and_are_corrected() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 100))
        for _ in range(4):
            await calls.enter("long", cost=30)
        for _ in range(8):
            await calls.enter("short", cost=10)
        for _ in range(8):
            await calls.leave(calls.turns[-1])
        assert calls.turns.count("short") in (5, 6, 7), calls.turns
        calls = Calls(FairQueue(1, 100))
        for _ in range(3):
            await calls.enter("a", cost=1000)
        for _ in range(3):
            await calls.enter("b", cost=10)
        await calls.leave("a", correction=-995)
        await calls.leave("b")
        assert calls.turns == ["a", "b", "a"], "a took 5 tokens only"

    run(test())


def test_sizes_and_room() -> None:
    async def test() -> None:
        queue = FairQueue(2, 100)
        calls = Calls(queue)
        await calls.enter("a", size=5)
        assert calls.turns == ["a"], "a call larger than everything goes alone"
        await calls.enter("b")
        assert (queue.num_running, queue.num_waiting) == (5, 1)
        await calls.leave("a")
        assert calls.turns == ["a", "b"] and (queue.num_running, queue.num_waiting) == (1, 0)

    run(test())


def test_a_call_that_an_idle_engine_could_not_take_is_no_matter_of_waiting() -> None:
    async def test() -> None:
        calls = Calls(FairQueue.for_engine(EngineOptions(decode_rows=(2, 4), waiting_max=6)))
        await calls.enter("a", size=10)
        assert calls.turns == ["a"]
        await calls.enter("a", size=11)
        with pytest.raises(ApiError, match=r"asks for 11 answers.* at most 10") as caught:
            await calls.tasks[1]
        assert caught.value.status == 400 and caught.value.param == "n"
        # What fits in but finds no room now is told to come again.
        await calls.enter("b", size=10)
        with pytest.raises(ApiError) as caught:
            await calls.tasks[2]
        assert caught.value.status == 429

    run(test())


def test_tenant_that_took_little_goes_on_from_the_present() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(3, 100))
        for tenant in ("a", "a", "b"):
            await calls.enter(tenant, cost=1000)
        await calls.leave("a", correction=-2000)
        await calls.leave("a", correction=-2000)
        await calls.leave("b", correction=-990)
        await calls.enter("b", size=3)
        for tenant in ("a", "a", "b", "b"):
            await calls.enter(tenant)
        await calls.leave("b")
        assert sorted(calls.turns[4:]) == ["a", "a", "b"], "nothing was saved up"

    run(test())


def test_full_queue_turns_the_greedy_away() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 3))
        for _ in range(5):
            await calls.enter("greedy")
        with pytest.raises(ApiError, match="3 requests wait"):
            await calls.tasks[4]
        await calls.enter("small")
        with pytest.raises(ApiError) as caught:
            await calls.tasks[3]
        assert caught.value.status == 429 and caught.value.retry_after_s
        await calls.leave("greedy")
        assert calls.turns == ["greedy", "small"]

    run(test())


def test_giving_up_frees_the_place_or_the_turn() -> None:
    async def test() -> None:
        queue = FairQueue(1, 3)
        calls = Calls(queue)
        for tenant in ("a", "b", "c"):
            await calls.enter(tenant, cost=1000 if tenant == "c" else 10)
        calls.tasks[1].cancel()
        await settle()
        assert queue.num_waiting == 1
        queue.leave(calls.places["a"].popleft(), 0.0)  # c's turn has come, but c does not know yet.
        calls.tasks[2].cancel()
        await settle()
        assert (queue.num_running, queue.num_waiting, calls.turns) == (0, 0, ["a"])
        for tenant in "aac":
            await calls.enter(tenant)
        await calls.leave("a")
        assert calls.turns == ["a", "a", "c"], "a turn that was not taken costs nothing"

    run(test())


def test_smaller_priorities_go_first_among_the_calls_of_a_tenant() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 100))
        for priority in (0, 5, 0, -3, 5, -3):
            await calls.enter("a", priority=priority)
        await calls.enter("b")
        for tenant in "abaaaa":
            await calls.leave(tenant)
        assert calls.turns.index("b") == 1, "it has its turn whatever the other says of its own"
        assert calls.priorities == [0, 0, -3, -3, 0, 5, 5]

    run(test())


def test_nobody_is_passed_for_ever() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 1000))
        for priority in (0, 9, *[1] * (PASSED_MAX + 3)):
            await calls.enter("a", priority=priority)
        for _ in range(PASSED_MAX + 2):
            await calls.leave("a")
        assert calls.priorities.index(9) == PASSED_MAX + 1
        for task in calls.tasks:
            task.cancel()

    run(test())


def test_an_urgent_call_passes_when_its_own_tenant_fills_the_engine() -> None:
    async def test() -> None:
        queue = FairQueue(4, 100, urgent_max=2)
        calls = Calls(queue)
        await calls.enter("a", size=4)
        await calls.enter("a", priority=0)
        assert (queue.num_running, queue.num_waiting) == (4, 1), "an equal waits"
        await calls.enter("a", priority=-1)
        assert calls.priorities == [0, -1] and (queue.num_running, queue.num_beyond) == (5, 1)
        await calls.enter("b", priority=-100)
        assert calls.turns == ["a", "a"], "b has nothing there to give way"
        await calls.leave("a")
        assert calls.turns == ["a", "a", "b", "a"], "those beyond take no place of the share"

    run(test())


def test_the_urgent_are_bounded() -> None:
    async def test() -> None:
        queue = FairQueue(4, 100, call_max=7, urgent_max=2)
        calls = Calls(queue)
        await calls.enter("a", size=4)
        for priority in (-1, -1, -2):
            await calls.enter("a", priority=priority)
        assert calls.priorities == [0, -1, -1], "the reserve is full, whoever is in it"
        queue.leave(calls.places["a"].pop(), 0.0)
        await settle()
        assert calls.priorities == [0, -1, -1, -2] and queue.num_beyond == 2
        calls = Calls(FairQueue(4, 100, call_max=7, urgent_max=2))
        await calls.enter("a", size=6)
        await calls.enter("a", size=2, priority=-1)
        assert calls.queue.num_running == 6, "more than the engine can take"
        await calls.enter("a", size=1, priority=-2)
        assert calls.queue.num_running == 7

    run(test())


def test_a_tenant_has_no_more_beyond_the_share_than_it_has_less_urgent_within() -> None:
    async def test() -> None:
        queue = FairQueue(4, 100, urgent_max=4)
        calls = Calls(queue)
        await calls.enter("b", size=2, priority=9)
        await calls.enter("a", priority=-5)
        await calls.enter("a")
        for priority in (-5, -5):
            await calls.enter("a", priority=priority)
        assert calls.priorities == [9, -5, 0, -5], "one gives way to one"
        for priority in (-6, -7):
            await calls.enter("a", priority=priority)
        assert calls.priorities == [9, -5, 0, -5, -6], "those beyond are not there to be passed"
        assert queue.num_beyond == 2

    run(test())


def test_whoever_passes_pays_and_does_not_starve_the_tenants_others() -> None:
    async def test() -> None:
        calls = Calls(FairQueue(1, 1000, urgent_max=1))
        await calls.enter("a", priority=9)
        await calls.enter("b")
        await calls.enter("a", priority=9)
        for _ in range(PASSED_MAX):
            await calls.enter("a", priority=-1)
            calls.queue.leave(calls.places["a"].pop(), 0.0)
            await settle()
        await calls.enter("a", priority=-1)
        assert calls.priorities == [9, *[-1] * PASSED_MAX], "it has been passed often enough"
        await calls.enter("b")
        await calls.enter("b")
        for tenant in "abbb":
            await calls.leave(tenant)
        assert calls.turns[-5:] == ["b", "b", "b", "a", "a"], "what passed was paid for"
        assert calls.priorities[-2:] == [9, -1]

    run(test())


def test_requests_that_have_ended_leave_room_before_their_call_has() -> None:
    async def test() -> None:
        queue = FairQueue(4, 100)
        calls = Calls(queue)
        await calls.enter("a", size=4)
        for _ in range(4):
            await calls.enter("b")
        for _ in range(3):
            await calls.give_back("a")
        assert calls.turns == ["a", "b", "b", "b"] and queue.num_running == 4
        for _ in range(3):
            await calls.give_back("a")
        assert calls.turns == ["a", "b", "b", "b", "b"] and queue.num_running == 4
        await calls.leave("a")
        assert queue.num_running == 4, "nothing is given back twice"

    run(test())


def test_urgent_calls_of_an_engine_with_little_room() -> None:
    async def urgent_max(waiting_max: int) -> int:
        options = EngineOptions(decode_rows=(2, 4), waiting_max=waiting_max)
        calls = Calls(FairQueue.for_engine(options))
        num_ordinary = 4 + min(4, waiting_max)
        await calls.enter("a", size=num_ordinary)
        for _ in range(waiting_max - 4 if waiting_max > 4 else 0):
            await calls.enter("a", priority=-1)
        assert calls.queue.num_running <= 4 + waiting_max
        return calls.queue.num_beyond

    async def test() -> None:
        assert [await urgent_max(waiting_max) for waiting_max in (3, 4, 6, 60)] == [0, 0, 2, 4]

    run(test())


_RUNNING, _WAITING, _ALL, _URGENT = 4, 6, 8, 3


class Crowd:
    """Calls that come, end in part, end, and give up; the bounds hold after each step."""

    def __init__(self) -> None:
        self.queue = FairQueue(_RUNNING, _WAITING, _ALL, _URGENT)
        self.tasks: list[asyncio.Task[Place]] = []

    async def step(self, action: str, number: int, size: int, priority: int) -> None:
        """One of the four, for the call that `number` points at."""
        if action == "enter":
            entering = self.queue.enter("ab"[number % 2], size, 10.0 * size, priority)
            self.tasks.append(asyncio.create_task(entering))
        elif self.tasks:
            await self._change(self.tasks[number % len(self.tasks)], action)
        await settle()
        self.check()

    async def _change(self, task: asyncio.Task[Place], action: str) -> None:
        is_there = task.done() and not task.cancelled() and not task.exception()
        if is_there and action == "give back":
            self.queue.give_back(task.result())
        elif is_there and action == "leave":
            self.queue.leave(task.result(), -3.0)
            self.tasks.remove(task)
        elif action == "give up":
            task.cancel()

    def check(self) -> None:
        """What holds at all times."""
        queue = self.queue
        ended = [task for task in self.tasks if task.done() and not task.cancelled()]
        places = [task.result() for task in ended if not task.exception()]
        assert queue.num_running == sum(place.num_held for place in places) <= _ALL
        beyond = [place for place in places if place.is_beyond]
        assert queue.num_beyond == sum(place.num_held for place in beyond) <= _URGENT
        assert 0 <= queue.num_waiting <= _WAITING
        assert queue.num_running or not queue.num_waiting, "all wait for nothing"


_STEPS = st.tuples(
    st.sampled_from(["enter", "enter", "give back", "leave", "give up"]),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(-2, 2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_counts_hold_and_return_to_the_start(steps: list[tuple[str, int, int, int]]) -> None:
    async def test() -> None:
        crowd = Crowd()
        for step in steps:
            await crowd.step(*step)
        while crowd.tasks:
            for task in list(crowd.tasks):
                if task.done() and (task.cancelled() or task.exception()):
                    crowd.tasks.remove(task)
                elif task.done():
                    await crowd._change(task, "leave")
            await settle()
            crowd.check()
        queue = crowd.queue
        assert (queue.num_running, queue.num_beyond, queue.num_waiting) == (0, 0, 0)
        assert not any(state.places or state.waiters for state in queue._tenants.values())

    run(test())
