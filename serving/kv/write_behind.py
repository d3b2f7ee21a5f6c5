"""Payloads on their way from the host tier to storage.

They are gathered and written together, because storage is slow at small writes, and stay pinned
until they are there. A write that fails is not tried again: its payloads stay in memory as long as
there is room, storage is left alone for a while, and what is computed again is offered again.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving.clock import Clock, ns_of_s, s_of_ns
from serving.kv.host_tier import HostTier, Place
from serving.kv.store import BlockStore, Buffer, CorruptPayloadError, Name, StoreError, check
from serving.kv.wire import Loop
from serving.observe import Histogram

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteBehindOptions:
    """When to write.

    Attributes:
        segment_bytes: payloads are written when so many bytes wait,
        flush_s: or when the oldest has waited so long.
        retry_s: time after a failed write in which nothing is written.
    """

    segment_bytes: int = 16 * 2**20
    flush_s: float = 1.0
    retry_s: float = 5.0


class WriteBehind:
    """Writes payloads of `host` to `store` on a thread of its own; all calls on the loop's thread.

    Attributes:
        num_waiting: payloads that are not in storage yet.
        num_dropped: payloads that storage did not take.
        write_s: how long writes took.
    """

    def __init__(
        self,
        host: HostTier,
        store: BlockStore | None,
        loop: Loop,
        clock: Clock,
        options: WriteBehindOptions,
    ) -> None:
        self._host = host
        self._store = store
        self._loop = loop
        self._clock = clock
        self._options = options
        self._thread = ThreadPoolExecutor(1, "kv-write")
        self._waiting: list[tuple[Name, Place]] = []
        self._since_ns = 0
        self._not_before_ns = 0
        self._num_writing = 0
        self._then: list[Callable[[], None]] = []
        self.num_dropped = 0
        self.write_s = Histogram()

    @property
    def num_waiting(self) -> int:
        """Payloads that are not in storage yet."""
        return len(self._waiting) + self._num_writing

    def add(self, pins: list[tuple[Name, Place]]) -> None:
        """Write payloads, which are pinned, and unpin them then."""
        now_ns = self._clock.now_ns()
        if self._store is None or now_ns < self._not_before_ns:
            self._drop(pins if self._store is not None else [], pins)
            return
        if not self._waiting:
            self._since_ns = now_ns
        self._waiting += pins
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Begin to write if enough is waiting, or has waited for long enough."""
        size = sum(place.size for _, place in self._waiting)
        age_ns = self._clock.now_ns() - self._since_ns
        is_due = size >= self._options.segment_bytes or age_ns >= ns_of_s(self._options.flush_s)
        if self._waiting and is_due and not self._num_writing:
            self._flush()

    def flush_all(self, then: Callable[[], None]) -> None:
        """Write everything that is waiting now, and call `then`."""
        if not self.num_waiting:
            then()
            return
        self._then.append(then)
        if not self._num_writing:
            self._flush()

    def close(self) -> None:
        """Write everything, on this thread, after the loop has ended."""
        self._thread.shutdown()
        pins, self._waiting = self._waiting, []
        if pins:
            self._write(pins)

    def _flush(self) -> None:
        pins, self._waiting = self._waiting, []
        self._num_writing = len(pins)

        begun_ns = self._clock.now_ns()

        def job() -> None:
            is_written = self._write(pins)
            self._loop.post(lambda: self._on_written(pins, is_written))
            self.write_s.observe(s_of_ns(self._clock.now_ns() - begun_ns))

        self._thread.submit(job)

    def _write(self, pins: list[tuple[Name, Place]]) -> bool:
        assert self._store is not None
        payloads: list[Buffer] = []
        for _, place in pins:
            data = self._host.read(place)
            try:
                check(data)
            except CorruptPayloadError as error:
                _log.warning("not written: %s", error)
                continue
            payloads.append(data)
        try:
            self._store.write(payloads)
        except StoreError as error:
            _log.warning("%d payloads are not written: %s", len(payloads), error)
            return False
        return True

    def _on_written(self, pins: list[tuple[Name, Place]], is_written: bool) -> None:
        self._num_writing = 0
        if is_written:
            self._drop([], pins)
        else:
            self._not_before_ns = self._clock.now_ns() + ns_of_s(self._options.retry_s)
            self._drop(pins, pins)
            self._drop(self._waiting, self._waiting)
            self._waiting = []
        if self._waiting and self._then:
            self._flush()
        elif not self._waiting:
            called, self._then = self._then, []
            for then in called:
                then()

    def _drop(self, lost: list[tuple[Name, Place]], pins: list[tuple[Name, Place]]) -> None:
        self.num_dropped += len(lost)
        for name, place in pins:
            self._host.unpin(name, place)
