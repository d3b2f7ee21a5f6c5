"""What a directory writes down: which segments are stored, in an LMDB file.

One entry per segment, in the order in which they were written, each with its payloads. A change is
on the disk when `record` returns. What cannot be read is left out: whoever sees the store announces
it again.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec

from serving.kv.directory import Changes
from serving.kv.segment_index import Row

_log = logging.getLogger(__name__)

_MAP_BYTES = 1 << 36
"""Room in the address space, not on the disk: the file grows with what is in it."""


class _Entry(msgspec.Struct, array_like=True):
    number: int
    size: int
    rows: list[Row]


class PlacementFile:
    """Segments by their names.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._database = lmdb.open(str(folder), map_size=_MAP_BYTES, subdir=True, lock=True)
        except lmdb.Error as error:
            raise OSError(f"{folder}: {error}") from error
        self._decoder = msgspec.msgpack.Decoder(_Entry)
        self._number = 0

    def load(self) -> Iterator[tuple[str, int, list[Row]]]:
        """The segments that were recorded, with their sizes and payloads, oldest first."""
        entries: list[tuple[str, _Entry]] = []
        with self._database.begin() as transaction:
            for name, value in transaction.cursor():
                try:
                    entries.append((bytes(name).decode(), self._decoder.decode(value)))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    _log.warning("%r is left out: %s", bytes(name), error)
        self._number = max((entry.number for _, entry in entries), default=0)
        for name, entry in sorted(entries, key=lambda item: item[1].number):
            yield name, entry.size, entry.rows

    def record(self, changes: Changes) -> None:
        """Write down what has come and gone.

        Raises:
            OSError: it could not be written; nothing of it is.
        """
        if not changes.come and not changes.gone:
            return
        try:
            with self._database.begin(write=True) as transaction:
                for name in changes.gone:
                    transaction.delete(name.encode())
                for name, (size, rows) in changes.come.items():
                    self._number += 1
                    value = msgspec.msgpack.encode(_Entry(self._number, size, rows))
                    transaction.put(name.encode(), value)
        except lmdb.Error as error:
            raise OSError(f"placements: {error}") from error

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()
