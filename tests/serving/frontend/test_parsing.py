"""Goal: whoever's bodies take long to parse keeps nobody else waiting.

Method: one tenant's parsing stands still, for more bodies than there are threads, until another's
is done.
"""

import asyncio
import threading

import pytest

from serving.frontend.errors import ApiError, bad_request
from serving.frontend.parsing import THREADS, THREADS_OF_ONE_TENANT, ParsingThreads


def test_slow_bodies_of_one_tenant_do_not_delay_others() -> None:
    async def run() -> None:
        gate, begun = threading.Event(), threading.Semaphore(0)

        def slow(raw: bytes) -> bool:
            begun.release()
            return gate.wait(60)

        threads = ParsingThreads()
        held = [asyncio.create_task(threads.run("greedy", slow, b"")) for _ in range(2 * THREADS)]
        try:
            for _ in range(THREADS_OF_ONE_TENANT):
                assert await asyncio.to_thread(begun.acquire, timeout=30)
            async with asyncio.timeout(30):
                assert await threads.run("small", len, b"abc") == 3
        finally:
            gate.set()
        assert all(await asyncio.gather(*held))

    asyncio.run(run())


def test_errors_come_through() -> None:
    def refuse(raw: bytes) -> None:
        raise bad_request(raw.decode())

    with pytest.raises(ApiError, match="so"):
        asyncio.run(ParsingThreads().run("a", refuse, b"so"))
