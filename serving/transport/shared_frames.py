"""Large frames of messages in shared memory, between processes of one machine.

    sender: a file in a memory file system -> its name crosses the socket -> receiver: maps the file
    and removes its name, so that the memory is free when nobody looks at it any more

Bytes are copied once and neither encrypted nor cut up, unlike on a socket. Only the user of the
cluster may open the files. What nobody takes, because it died or the message was lost, the sender
removes after a while, or whoever comes next where that one was killed.
"""

import fcntl
import logging
import mmap
import os
import re
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serving.clock import Clock, ns_of_s
from serving.kv.host_tier import remove_abandoned
from serving.transport.codec import Frame, WireError

_log = logging.getLogger(__name__)

MIN_BYTES = 4096
"""Less than that crosses a socket as quickly as the name of a file does."""

_PREFIX = "deepinfer-frames-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_MARK = b"\0shared"
"""No message begins like this: its first byte is that of an array of msgpack."""

_TAKEN_S = 60.0
_BYTES_MAX = 1 << 40


class _Place(msgspec.Struct, array_like=True):
    name: str
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class _Sent:
    path: Path
    descriptor: int
    deadline_ns: int

    def is_taken(self) -> bool:
        return not os.fstat(self.descriptor).st_nlink

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


class SharedFrames:
    """Puts frames into `folder`, a memory file system, and takes those that others have put there.

    Attributes:
        num_put, num_taken: messages whose frames went, and came, that way.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.num_put = self.num_taken = 0
        self._folder = folder
        self._clock = clock
        self._sent: deque[_Sent] = deque()
        remove_abandoned(folder, _PREFIX)

    @property
    def num_waiting(self) -> int:
        """Messages whose frames were not taken yet, as far as was looked."""
        return len(self._sent)

    def put(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """The frames to send instead: the same if they are small, or if there is no room."""
        self._let_go()
        head, *large = frames
        sizes = [memoryview(frame).nbytes for frame in large]
        if sum(sizes) < MIN_BYTES:
            return frames
        path = self._folder / f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            sent = self._write(path, large)
        except OSError as error:
            _log.warning("%s: %s; the socket is used instead", path, error.strerror)
            return frames
        self._sent.append(sent)
        self.num_put += 1
        return [_MARK + msgspec.msgpack.encode(_Place(path.name, sizes)), head]

    def take(self, frames: Sequence[memoryview]) -> Sequence[Frame]:
        """The frames that were sent, wherever they are.

        Raises:
            WireError: they are in shared memory, but not there any more, or not all of them.
        """
        if frames[0][: len(_MARK)] != _MARK:
            return frames
        try:
            place = msgspec.msgpack.decode(frames[0][len(_MARK) :], type=_Place)
        except msgspec.MsgspecError as error:
            raise WireError(f"a place in shared memory that is none: {error}") from None
        total = sum(place.sizes)
        is_possible = min(place.sizes, default=0) >= 0 and 0 < total <= _BYTES_MAX
        if not _NAME.fullmatch(place.name) or not is_possible or len(frames) != 2:
            raise WireError(f"{place} is none in shared memory")
        self.num_taken += 1
        return [frames[1], *self._read(place, total)]

    def close(self) -> None:
        """Remove what nobody has taken."""
        while self._sent:
            self._sent.popleft().close()

    def _write(self, path: Path, frames: Sequence[Frame]) -> _Sent:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            # Held as long as this process wants the file: who finds it unlocked may remove it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for frame in frames:
                left = memoryview(frame).cast("B")
                while left:
                    left = left[os.write(descriptor, left) :]
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return _Sent(path, descriptor, self._clock.now_ns() + ns_of_s(_TAKEN_S))

    def _read(self, place: _Place, total: int) -> list[Frame]:
        path = self._folder / place.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WireError(f"{path}: {error.strerror}") from None
        try:
            path.unlink(missing_ok=True)
            if os.fstat(descriptor).st_size != total:
                raise WireError(f"{path} has not the {total} bytes that were sent")
            view = memoryview(mmap.mmap(descriptor, total, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
        frames: list[Frame] = []
        for size in place.sizes:
            frames.append(view[:size])
            view = view[size:]
        return frames

    def _let_go(self) -> None:
        """Forget what was taken, and take back what nobody wants; in the order of sending."""
        now_ns = self._clock.now_ns()
        while self._sent and (self._sent[0].is_taken() or self._sent[0].deadline_ns <= now_ns):
            self._sent.popleft().close()
