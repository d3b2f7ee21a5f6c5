"""Segments on a disk, each one Orbax checkpoint, written whole or not at all.

    DIRECTORY/000000000017/payloads.bin      the segment
    DIRECTORY/000000000017/commit_success... what Orbax writes around it

Orbax writes a segment under another name and renames it when everything is on the disk, so a crash
leaves a folder that is removed at the next start.

*Why a file format of our own inside a checkpoint*: an array checkpoint is cut into chunks that go
across blocks, and costs 45 ms and more whatever its size. This one costs 6 ms and the time to write
the bytes, and single payloads are read from it with one call each.
"""

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from serving.clock import Clock
from serving.kv.segment_tier import Range, SegmentTier
from serving.kv.store import Buffer, StoreError

_FILE = "payloads.bin"
_UNFINISHED_S = 3600.0
"""What another process has not finished for so long is left over from a crash."""


@dataclass
class _SegmentArgs(ocp.args.CheckpointArgs):
    parts: Sequence[Buffer] = ()


class _SegmentWriter(ocp.CheckpointHandler):
    """Writes one file inside a checkpoint."""

    def save(self, directory: os.PathLike[str], args: _SegmentArgs) -> None:
        with Path(directory, _FILE).open("wb") as file:
            for part in args.parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, directory: os.PathLike[str], args: object = None) -> bytes:
        return Path(directory, _FILE).read_bytes()


ocp.args.register_with_handler(_SegmentWriter, for_save=True, for_restore=True)(_SegmentArgs)


class OrbaxSegments:
    """A `SegmentStorage` in a directory that this process alone uses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checkpointer = ocp.Checkpointer(_SegmentWriter())
        directory.mkdir(parents=True, exist_ok=True)
        names = [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
        self._numbers = itertools.count(max(names, default=0) + 1)

    def load(self) -> Mapping[str, int]:
        """The segments that are there, whole, with their sizes; what is unfinished is removed."""
        sizes: dict[str, int] = {}
        for path in self._directory.iterdir():
            if not path.is_dir():
                continue
            file = path / _FILE
            if path.name.isdigit() and file.exists():
                sizes[path.name] = file.stat().st_size
            else:
                shutil.rmtree(path, ignore_errors=True)
        return sizes

    def choose_name(self, size: int) -> str:
        """The next number."""
        return f"{next(self._numbers):012d}"

    def write(self, segment: str, parts: Sequence[Buffer]) -> None:
        """Keep a segment for good, or raise and keep nothing of it."""
        try:
            self._checkpointer.save(self._directory / segment, args=_SegmentArgs(parts))
        except ValueError as error:
            # Orbax reports some failures of the file system as wrong values.
            raise OSError(str(error)) from error

    def read(self, segment: str, ranges: Sequence[Range]) -> Iterator[Buffer]:
        """Bytes of a segment, range by range; fewer where it has been cut."""
        descriptor = os.open(self._directory / segment / _FILE, os.O_RDONLY)
        # One piece of memory for all: the system gives large ones faster than many small ones.
        left = memoryview(np.empty(sum(end - begin for begin, end in ranges), np.uint8))
        try:
            for begin, end in ranges:
                part, left = left[: end - begin], left[end - begin :]
                num_read = os.preadv(descriptor, [part], begin)
                yield part[:num_read]
        finally:
            os.close(descriptor)

    def remove(self, segment: str) -> None:
        """Remove a segment; one that is not there is passed over."""
        try:
            shutil.rmtree(self._directory / segment)
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Let go of what Orbax holds."""
        self._checkpointer.close()


class SharedOrbaxSegments(OrbaxSegments):
    """A `SegmentStorage` in a directory that several processes use, on as many hosts.

    Names are random numbers, so that no two of them are equal. What others have not finished stays.
    """

    def __init__(self, directory: Path, random_source: random.Random) -> None:
        super().__init__(directory)
        self._random = random_source

    def load(self) -> Mapping[str, int]:
        """The segments that are there, whole, with their sizes; old unfinished ones are removed."""
        sizes: dict[str, int] = {}
        unfinished: dict[Path, float] = {}
        newest = 0.0
        for path in self._directory.iterdir():
            try:
                changed = path.stat().st_mtime
                if path.name.isdigit():
                    sizes[path.name] = (path / _FILE).stat().st_size
                else:
                    unfinished[path] = changed
            except FileNotFoundError:
                # Removed meanwhile by another process.
                continue
            newest = max(newest, changed)
        for path, changed in unfinished.items():
            # By the clock of the file system, which is everybody's.
            if newest - changed > _UNFINISHED_S:
                shutil.rmtree(path, ignore_errors=True)
        return sizes

    def choose_name(self, size: int) -> str:
        """A number of 39 digits."""
        return f"{self._random.getrandbits(128):039d}"


class OrbaxTier(SegmentTier):
    """A `BlockStore` in a directory that this process alone uses.

    Args:
        directory: made if it does not exist.
        bytes_max, clock, tenant_bytes_max, ttl_s: as for `SegmentTier`.

    Raises:
        StoreError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        clock: Clock,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
    ) -> None:
        try:
            segments = OrbaxSegments(directory)
            super().__init__(segments, bytes_max, clock, tenant_bytes_max, ttl_s)
        except OSError as error:
            raise StoreError(f"{directory}: cannot be used: {error.strerror or error}") from error
