"""What was compiled at the start, how long it took, and what the compilation cache had already.

Programs are compiled on several threads. Jax reports a hit of its cache on the thread that asked,
so each thread remembers which program it is busy with.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax

from serving.core.buckets import CompiledProgram

_HIT = "/jax/compilation_cache/cache_hits"


class CompileLog:
    """Collects programs while they are compiled.

    Args:
        now_ns: the clock.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._here = threading.local()
        self._programs: list[CompiledProgram] = []

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """What was compiled so far, in the order in which it was finished."""
        return tuple(self._programs)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hears of hits of the cache while it is open; `watch` belongs inside."""
        jax.monitoring.register_event_listener(self._on_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_listener(self._on_event)

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Around the compilation of one program, on the thread that does it."""
        self._here.is_hit = False
        begun_ns = self._now_ns()
        yield
        seconds = (self._now_ns() - begun_ns) / 1e9
        # Appending is one operation, so threads need no lock.
        self._programs.append(CompiledProgram(name, seconds, self._here.is_hit))

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _HIT:
            self._here.is_hit = True
