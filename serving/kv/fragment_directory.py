"""The fragments of one storage node, each a file that is there whole or not at all.

    DIRECTORY/fragments/3f/3f...a0        a fragment, called after its stripe
    DIRECTORY/fragments/3f/3f...a0.part   one that is being written; removed at the next start
    DIRECTORY/leaving                     the node gives away what it has
    DIRECTORY/nodes.json                  names and addresses of the nodes it has heard of

Heads are in memory and are read back at the start, which also finds files that were cut. Pieces are
read without a look at their checksums: that is done by whoever asked for them, at the other end of
the line.
"""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serving.kv.fragments import (
    HEAD_SIZE,
    CorruptFragmentError,
    FragmentHead,
    head_size,
    read_head,
)
from serving.kv.store import Buffer

_PART = ".part"


@dataclass(frozen=True, slots=True)
class Held:
    """A fragment that is held: its head, the bytes of that, and the bytes of the whole file."""

    head: FragmentHead
    head_bytes: int
    size: int


class FragmentDirectory:
    """Fragments in a directory that this process alone uses. Calls may come from several threads.

    Raises:
        OSError: the directory cannot be used, or another process uses it (BlockingIOError).
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "fragments"
        self._leaving = directory / "leaving"
        self._nodes = directory / "nodes.json"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    def load(self) -> Mapping[str, Held]:
        """The whole fragments, by stripe; damaged and unfinished ones are removed."""
        held: dict[str, Held] = {}
        for path in sorted(self._folder.glob("*/*")):
            found = None if path.name.endswith(_PART) else _read_held(path)
            if found is None or found.head.stripe != path.name:
                # On a read-only disk it stays, and is looked at again at the next start.
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                held[path.name] = found
        return held

    def write(self, data: Sequence[Buffer]) -> Held:
        """Keep a fragment, head first, for good, or raise and keep nothing of it.

        Raises:
            CorruptFragmentError: this is no fragment.
            OSError: it cannot be written.
        """
        head = read_head(data[0])
        path = self._path(head.stripe)
        part = path.with_name(path.name + _PART)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            _sync_directory(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return Held(head, len(data[0]), sum(map(len, data)))

    def read(self, held: Held, numbers: Sequence[int]) -> bytes:
        """Pieces of a fragment, one after another; fewer bytes where the file has been cut.

        Raises:
            OSError: they cannot be read.
        """
        sizes = held.head.piece_sizes
        offsets = list(itertools.accumulate(sizes, initial=held.head_bytes))
        with self._opened(held) as descriptor:
            return b"".join(
                os.pread(descriptor, offsets[last + 1] - offsets[first], offsets[first])
                for first, last in _runs(numbers)
            )

    def read_whole(self, held: Held) -> tuple[bytes, bytes]:
        """The head and all pieces of a fragment.

        Raises:
            OSError: they cannot be read.
        """
        with self._opened(held) as descriptor:
            data = os.pread(descriptor, held.size, 0)
        return data[: held.head_bytes], data[held.head_bytes :]

    def is_good(self, held: Held) -> bool:
        """Whether every byte of a fragment is what was written."""
        try:
            with self._opened(held) as descriptor:
                data = memoryview(os.pread(descriptor, held.size + 1, 0))
            if len(data) != held.size or read_head(data) != held.head:
                return False
        except (OSError, CorruptFragmentError):
            return False
        at = held.head_bytes
        for number, size in enumerate(held.head.piece_sizes):
            if not held.head.is_good(number, data[at : at + size]):
                return False
            at += size
        return True

    def remove(self, stripe: str) -> None:
        """Remove a fragment; one that is not there is passed over.

        Raises:
            OSError: it cannot be removed.
        """
        self._path(stripe).unlink(missing_ok=True)

    @property
    def is_leaving(self) -> bool:
        """Whether the node gives away what it has."""
        return self._leaving.exists()

    def mark_leaving(self, is_leaving: bool) -> None:
        """Begin to give everything away, or no longer; remembered across restarts."""
        if is_leaving:
            self._leaving.touch()
        else:
            self._leaving.unlink(missing_ok=True)

    def nodes(self) -> dict[str, str]:
        """Names and addresses of nodes that were remembered; none if they cannot be read."""
        try:
            return msgspec.json.decode(self._nodes.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
            return {}

    def remember_nodes(self, nodes: Mapping[str, str]) -> None:
        """Have these nodes known after a restart.

        Raises:
            OSError: it cannot be written.
        """
        part = self._nodes.with_name(self._nodes.name + _PART)
        part.write_bytes(msgspec.json.encode(nodes))
        part.rename(self._nodes)

    def close(self) -> None:
        """Let others use the directory."""
        os.close(self._lock)

    def _path(self, stripe: str) -> Path:
        return self._folder / stripe[:2] / stripe

    @contextlib.contextmanager
    def _opened(self, held: Held) -> Iterator[int]:
        descriptor = os.open(self._path(held.head.stripe), os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Numbers that follow each other, as first and last."""
    first = None
    for number, following in itertools.zip_longest(numbers, numbers[1:]):
        first = number if first is None else first
        if following != number + 1:
            yield first, number
            first = None


def _read_held(path: Path) -> Held | None:
    """What a file holds; None if it is damaged or cut."""
    try:
        with path.open("rb") as file:
            begin = file.read(HEAD_SIZE)
            size = head_size(begin)
            head = read_head(begin + file.read(size - HEAD_SIZE))
            found = os.fstat(file.fileno()).st_size
    except (OSError, CorruptFragmentError):
        return None
    is_whole = found == size + sum(head.piece_sizes)
    return Held(head, size, found) if is_whole else None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
