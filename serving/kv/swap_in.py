"""Swap-in: blocks of a stored prefix go to the device layer group by layer group, each before the
forward pass needs it, while earlier layers compute already.

A prefix that has been fetched is taken at once, but its blocks are written only for the first step
that uses any of them. Of a step in parts (`deepinfer_jax/step_parts.py`) each part reads the long
KV of one layer:

    device    part 0 | scatter 0 | part 1 | scatter 1 | part 2 | ...
    copies    group 0 ...| group 1 ...| group 2 ...|

All blocks of a group are one copy and are scattered by one operation. A step without parts, and a
transfer that reads or writes some of the blocks, needs all groups before it begins. So no block is
ever written later than its prefix says, and blocks that meanwhile serve something else are written
before that.

*Which copies are dispatched when.* A GPU's runtime lets a copy wait for the programs that were
dispatched before it, because they may still use the memory that it goes to; so there all copies are
dispatched before the first part. On a CPU a copy is made by whoever asks for it; so each one is
asked for while the part before it runs.

*How much is hidden.* The times at which copies and parts are over are noted by threads that wait
for them. A copy delays the step from the end of the part before to its own end; the rest of it is
hidden.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from serving.core.kv_transfer import KVTransfer, SwapInTimes


class GroupCopies(Protocol):
    """How the blocks of a layer group reach the device; both calls only dispatch."""

    @property
    def copies_wait(self) -> bool:
        """Whether a copy begins when everything that was dispatched before it is over."""
        ...

    def put(self, group: int, data: np.ndarray) -> Any:
        """Begin to copy blocks [K, bytes] uint8 of a layer group; what `write_group` takes."""
        ...

    def write_group(self, cache: Any, group: int, blocks: np.ndarray, data: Any) -> Any:
        """The cache with other content in the blocks [K] int32 of a layer group."""
        ...


class Step(Protocol):
    """A compiled step, to be called with its arguments."""

    def __call__(self, *arguments: Any, **named: Any) -> tuple[Any, Any]: ...


class Waitable(Protocol):
    """Something on the device that may not be there yet."""

    def block_until_ready(self) -> object:
        """Return when it is."""
        ...


@dataclass(slots=True)
class Timeline:
    """When the copies and the parts of one step began and ended, in nanoseconds.

    Attributes:
        parts: of each copy, the part that waits for it.
        begun: of each copy.
        copied, computed: ends of the copies, and of the parts but the last.
        is_over: set when all of them are noted.
    """

    parts: list[int] = field(default_factory=list[int])
    begun: list[int] = field(default_factory=list[int])
    copied: list[int] = field(default_factory=list[int])
    computed: list[int] = field(default_factory=list[int])
    is_over: tuple[threading.Event, threading.Event] = field(
        default_factory=lambda: (threading.Event(), threading.Event())
    )

    def times(self) -> SwapInTimes:
        """Wait for everything; how long it was copied for, and how much of that was hidden."""
        for event in self.is_over:
            event.wait()
        return hidden_times(self.parts, self.begun, self.copied, self.computed)


def hidden_times(
    parts: Sequence[int], begun: Sequence[int], copied: Sequence[int], computed: Sequence[int]
) -> SwapInTimes:
    """How long blocks were copied, and for how much of it the device computed.

    Copies are made one after another. What is copied for the first part delays the whole step, and
    so does what has not arrived when the part before its own is over.

    Args: those of `Timeline`, copies in their order.
    """
    copy_ns = exposed_ns = ended = 0
    for part, start, end in zip(parts, begun, copied, strict=True):
        start = max(start, ended)
        ended = max(end, start)
        needed = start if part == 0 else max(computed[part - 1], start)
        copy_ns += ended - start
        exposed_ns += max(ended - needed, 0)
    return SwapInTimes(copy_ns, copy_ns - exposed_ns)


class _Notes:
    """Notes when things are there, on a thread of its own, in the order in which they come."""

    def __init__(self, now_ns: Callable[[], int], name: str) -> None:
        self._now_ns = now_ns
        self._queue: queue.SimpleQueue[tuple[Waitable, list[int]] | threading.Event] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, thing: Waitable, times: list[int]) -> None:
        self._queue.put((thing, times))

    def end(self, event: threading.Event) -> None:
        """Set an event when everything before it is noted."""
        self._queue.put(event)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            thing, times = item
            # A step that fails says so where its result is waited for.
            with contextlib.suppress(RuntimeError):
                thing.block_until_ready()
            times.append(self._now_ns())


@dataclass(slots=True, eq=False)
class _Arriving:
    """Blocks that are to be written, and what was copied of them."""

    transfer: KVTransfer
    copies: dict[int, Any] = field(default_factory=dict[int, Any])


class SwapIns:
    """The blocks of one device that are on their way.

    Args:
        part_of_group: of each layer group, the part of a step that reads it.
        now_ns: the clock.
    """

    def __init__(
        self,
        copies: GroupCopies,
        part_of_group: Sequence[int],
        now_ns: Callable[[], int],
    ) -> None:
        self._copies = copies
        self._part_of_group = part_of_group
        self._now_ns = now_ns
        self._arriving: list[_Arriving] = []
        self._copied = _Notes(now_ns, "kv-copied")
        self._computed = _Notes(now_ns, "kv-computed")

    @property
    def num_arriving(self) -> int:
        """Transfers whose blocks are not written yet."""
        return len(self._arriving)

    def add(self, cache: Any, transfer: KVTransfer) -> Any:
        """Take blocks to be written; the cache after those that cannot wait any more."""
        if not len(transfer.write_blocks):
            return cache
        # A block that is to be written twice is written in order.
        cache = self.settle(cache, transfer.write_blocks)
        self._arriving.append(_Arriving(transfer))
        return cache

    def settle(self, cache: Any, blocks: np.ndarray) -> Any:
        """The cache with all that is to be in any of the blocks [...] int32."""
        for arriving in self._take(blocks):
            for group in range(len(self._part_of_group)):
                cache = self._write(cache, arriving, group)
        return cache

    def run(
        self, step: Step, is_parted: bool, blocks: np.ndarray, arguments: tuple[Any, ...], more: Any
    ) -> tuple[Any, Any, Timeline | None]:
        """Dispatch a step that uses `blocks`, with what it needs of the blocks on their way.

        Args:
            is_parted: the step takes `before` and `after`, as in `step_parts.PartedStep`.
            arguments: of the step, the cache being the last; `more` are those by name.

        Returns:
            what the step does, and when all happened; None if nothing was on its way for it.
        """
        *others, cache = arguments
        if not is_parted:
            return *step(*others, self.settle(cache, blocks), **more), None
        mine = self._take(blocks)
        if not mine:
            return *step(*arguments, **more), None
        timeline = Timeline()
        if self._copies.copies_wait:
            for group in self._in_order():
                self._put(mine, group, timeline)

        def before(number: int, cache: Any) -> Any:
            for group in self._in_order():
                if self._part_of_group[group] == number:
                    self._put(mine, group, timeline)
                    for arriving in mine:
                        cache = self._write(cache, arriving, group)
            return cache

        def after(number: int, marker: Waitable) -> None:
            self._computed.add(marker, timeline.computed)

        result, cache = step(*others, cache, before=before, after=after, **more)
        self._copied.end(timeline.is_over[0])
        self._computed.end(timeline.is_over[1])
        return result, cache, timeline

    def _in_order(self) -> Iterable[int]:
        groups = range(len(self._part_of_group))
        return sorted(groups, key=lambda group: self._part_of_group[group])

    def _take(self, blocks: np.ndarray) -> list[_Arriving]:
        if not self._arriving:
            return []
        taken = [a for a in self._arriving if np.isin(a.transfer.write_blocks, blocks).any()]
        self._arriving = [a for a in self._arriving if a not in taken]
        return taken

    def _put(self, mine: list[_Arriving], group: int, timeline: Timeline) -> None:
        for arriving in mine:
            if group in arriving.copies:
                continue
            timeline.parts.append(self._part_of_group[group])
            timeline.begun.append(self._now_ns())
            data = self._copies.put(group, arriving.transfer.write_groups[group])
            arriving.copies[group] = data
            self._copied.add(data, timeline.copied)

    def _write(self, cache: Any, arriving: _Arriving, group: int) -> Any:
        transfer = arriving.transfer
        data = arriving.copies.pop(group, None)
        if data is None:
            data = self._copies.put(group, transfer.write_groups[group])
        return self._copies.write_group(cache, group, transfer.write_blocks, data)
