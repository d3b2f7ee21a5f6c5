"""The metadata service: a directory behind messages, with a log for what must outlive it.

A commit is answered when the log has it. A log that does not work refuses commits, because what
counts as stored has to be found again; looking up goes on.
"""

import logging
from collections.abc import Hashable, Iterator
from typing import Protocol

from serving.clock import Clock
from serving.kv import directory_calls as calls
from serving.kv.directory import Changes, Directory
from serving.kv.directory_calls import Call, Reply
from serving.kv.key_bytes import split_keys
from serving.kv.segment_index import Location, Row

_log = logging.getLogger(__name__)


class PlacementLog(Protocol):
    """What a directory writes down."""

    def load(self) -> Iterator[tuple[str, int, list[Row]]]:
        """The segments that were recorded, with their sizes and payloads, oldest first."""
        ...

    def record(self, changes: Changes) -> None:
        """Write down what has come and gone, or raise OSError."""
        ...


class MetadataNode:
    """Answers calls; it takes what the log has at its start."""

    def __init__(self, directory: Directory, log: PlacementLog, clock: Clock) -> None:
        self._directory = directory
        self._log = log
        self._clock = clock
        self._replies: list[tuple[Hashable, Reply]] = []
        self._pending = Changes()
        self.num_failed_records = 0
        for segment, size, rows in log.load():
            directory.announce(segment, rows, size)
        # What the log had need not be written again, but for what no longer fits.
        self._pending.gone = directory.take_changes().gone

    @property
    def directory(self) -> Directory:
        """What it serves."""
        return self._directory

    def take_replies(self) -> list[tuple[Hashable, Reply]]:
        """Answers since the last call, with those they are for."""
        replies, self._replies = self._replies, []
        return replies

    def on_tick(self) -> None:
        """Time has passed."""
        self._directory.tick(self._clock.unix_s(), self._clock.now_ns())
        self._record()

    def on_message(self, source: Hashable, message: Call) -> None:
        """Take one message.

        Raises:
            ValueError: its keys are no keys.
        """
        reply = self._answer(message)
        if reply is not None:
            self._replies.append((source, reply))

    def _answer(self, message: Call) -> Reply | None:
        directory, epoch = self._directory, self._directory.epoch
        now_s, now_ns = self._clock.unix_s(), self._clock.now_ns()
        match message:
            case calls.Match():
                keys = split_keys(message.keys)
                found = directory.match(keys, message.first, message.num_usable, now_s)
                return calls.Matched(message.call, epoch, *found)
            case calls.Contains():
                names = calls.unpack_names(message.kinds, message.keys)
                flags = bytes(directory.contains(names, now_s))
                return calls.Contained(message.call, epoch, flags)
            case calls.Locate():
                names = calls.unpack_names(message.kinds, message.keys)
                lease, places = directory.locate(names, now_s, now_ns)
                return calls.Located(message.call, epoch, lease, *_spots(places))
            case calls.Release():
                directory.release(message.lease)
                directory.forget(calls.unpack_names(message.lost_kinds, message.lost_keys))
                return None
            case calls.Begin():
                write, granted = directory.begin(message.rows, now_ns)
                doomed = directory.take_doomed(now_ns)
                return calls.Begun(message.call, epoch, write, granted, doomed)
            case calls.Complete():
                return calls.Completed(message.call, epoch, self._complete(message))
            case calls.Removed():
                directory.remove(message.segments)
                self._record()
                return None
            case calls.Hello():
                return calls.Welcome(message.call, epoch, directory.take_doomed(now_ns))
            case _:
                return self._administrate(message, epoch, now_s)

    def _administrate(
        self,
        message: calls.Announce | calls.Drop | calls.Remaining | calls.Pin,
        epoch: int,
        now_s: int,
    ) -> Reply:
        directory = self._directory
        match message:
            case calls.Announce():
                for segment, size, rows in message.segments:
                    directory.announce(segment, rows, size)
                self._record()
                return calls.Announced(message.call, epoch, directory.unknown(message.names))
            case calls.Drop():
                if message.is_purge:
                    count, touched = directory.purge(message.tenant, now_s)
                else:
                    names = calls.unpack_names(message.kinds, message.keys)
                    count, touched = len(names), []
                    directory.forget(names)
                self._record()
                return calls.Dropped(message.call, epoch, count, touched)
            case calls.Remaining():
                index = directory.index
                names = [n for s in message.segments for n in index.in_segment(s)]
                names = names if message.segments else list(index)
                return calls.Remained(message.call, epoch, *calls.pack_names(names))
            case calls.Pin():
                names = calls.unpack_names(message.kinds, message.keys)
                count = directory.pin(names, message.is_pinned, now_s)
                return calls.Pinned(message.call, epoch, count)

    def _complete(self, message: calls.Complete) -> bool:
        directory = self._directory
        if not directory.complete(message.write, message.segment, message.size):
            return False
        if self._record():
            return True
        directory.remove([message.segment])
        return False

    def _record(self) -> bool:
        """Write down what has changed; whether the log has all of it."""
        changes = self._directory.take_changes()
        self._pending.come |= changes.come
        for segment in changes.gone:
            self._pending.come.pop(segment, None)
            self._pending.gone.append(segment)
        try:
            self._log.record(self._pending)
        except OSError as error:
            self.num_failed_records += 1
            _log.warning("what has changed is not written down: %s", error)
            return False
        self._pending = Changes()
        return True


def _spots(
    places: list[Location | None],
) -> tuple[list[str], list[calls.Spot | None]]:
    """The segments of places, and each place within them."""
    numbers: dict[str, int] = {}
    spots: list[calls.Spot | None] = []
    for place in places:
        if place is None:
            spots.append(None)
        else:
            number = numbers.setdefault(str(place.segment), len(numbers))
            spots.append((number, place.offset, place.size))
    return list(numbers), spots
