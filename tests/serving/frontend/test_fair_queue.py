"""Goal: under overload each tenant gets its share by tokens, whatever the others ask for; nobody
is kept waiting for ever, and a greedy tenant cannot fill the queue for the others.

Method: calls entered in a known order; the order in which they are let through.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from serving.config import EngineOptions
from serving.frontend.errors import ApiError
from serving.frontend.fair_queue import PASSED_MAX, FairQueue


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
        self.tasks: list[asyncio.Task[None]] = []

    async def enter(self, tenant: str, cost: float = 10.0, size: int = 1) -> None:
        async def wait() -> None:
            await self.queue.enter(tenant, size, cost)
            self.turns.append(tenant)

        self.tasks.append(asyncio.create_task(wait()))
        await settle()

    async def leave(self, tenant: str, correction: float = 0.0) -> None:
        self.queue.leave(tenant, 1, correction)
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
        queue.leave("a", 5, 0.0)
        await settle()
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
        calls.queue.leave("b", 3, 0.0)
        await settle()
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
            await calls.enter(tenant)
        calls.tasks[1].cancel()
        await settle()
        assert queue.num_waiting == 1
        queue.leave("a", 1, 0.0)  # c's turn has come, but c does not know yet.
        calls.tasks[2].cancel()
        await settle()
        assert (queue.num_running, queue.num_waiting, calls.turns) == (0, 0, ["a"])

    run(test())


async def _enter_by_priority(calls: Calls, turns: list[int], priority: int) -> None:
    async def wait() -> None:
        await calls.queue.enter("a", 1, 10.0, priority)
        turns.append(priority)

    calls.tasks.append(asyncio.create_task(wait()))
    await settle()


def test_smaller_priorities_go_first_among_the_calls_of_a_tenant() -> None:
    async def test() -> None:
        calls, turns = Calls(FairQueue(1, 100)), list[int]()
        for priority in (0, 5, 0, -3, 5, -3):
            await _enter_by_priority(calls, turns, priority)
        await calls.enter("b")
        for tenant in "abaaaa":
            await calls.leave(tenant)
        assert turns == [0, -3, -3, 0, 5, 5]
        assert calls.turns == ["b"], "it has its turn whatever the other says of its own"

    run(test())


def test_nobody_is_passed_for_ever() -> None:
    async def test() -> None:
        calls, turns = Calls(FairQueue(1, 1000)), list[int]()
        await _enter_by_priority(calls, turns, 0)
        await _enter_by_priority(calls, turns, 9)
        for _ in range(PASSED_MAX + 3):
            await _enter_by_priority(calls, turns, 1)
        for _ in range(PASSED_MAX + 2):
            await calls.leave("a")
        assert turns.index(9) == PASSED_MAX + 1
        for task in calls.tasks:
            task.cancel()

    run(test())
