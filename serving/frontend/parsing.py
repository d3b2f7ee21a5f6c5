"""Parsing of request bodies on threads, where it may take long.

A body with images at web addresses waits for other people's servers. So a tenant has a few of the
threads at one time, and the rest of its bodies wait for those, not for everybody's.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

THREADS = 64
THREADS_OF_ONE_TENANT = 8


class ParsingThreads:
    """Threads that start when they are needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "parse")
        self._tenants: dict[str, asyncio.Semaphore] = {}

    async def run[T](self, tenant: str, parse: Callable[[bytes], T], raw: bytes) -> T:
        """What `parse` makes of a body, or raises."""
        limit = self._tenants.setdefault(tenant, asyncio.Semaphore(THREADS_OF_ONE_TENANT))
        async with limit:
            return await asyncio.get_running_loop().run_in_executor(self._threads, parse, raw)
