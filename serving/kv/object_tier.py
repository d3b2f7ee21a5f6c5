"""Segments in an object store: S3 and its kind, or any other key-value store of TensorStore.

A segment is one object, called by a random number and its size, so a list of names is all that has
to be read at the start but for the segments' own indexes. An object is there whole or not at all.
Several processes may use one folder of a store: each looks now and then what the others have made.
"""

import json
import logging
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore

from serving.clock import Clock
from serving.kv.segment_tier import Range, SegmentTier
from serving.kv.store import Buffer, StoreError

_log = logging.getLogger(__name__)

_NAME = re.compile(r"segment-[0-9a-f]{32}-(\d+)")
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class ObjectTimes:
    """How long what may take.

    Attributes:
        read_s: one read, after which it is a miss.
        write_s: one write, or the removal of a segment.
        list_s: listing of all segments.
        refresh_s: time between two looks at what others have written.
    """

    read_s: float = 1.0
    write_s: float = 30.0
    list_s: float = 60.0
    refresh_s: float = 10.0


class ObjectSegments:
    """A `SegmentStorage` in a key-value store.

    Args:
        kvstore: its URL, or its specification as JSON.
        random_source: of names, which nobody may have given before.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, kvstore: str, times: ObjectTimes, random_source: random.Random) -> None:
        self._times = times
        self._random = random_source
        spec = json.loads(kvstore) if kvstore.lstrip().startswith("{") else kvstore
        self._store = _result(lambda: tensorstore.KvStore.open(spec), times.list_s)

    def load(self) -> Mapping[str, int]:
        """The segments that are there, with their sizes."""
        found = _result(self._store.list, self._times.list_s)
        names = [name.decode(errors="replace") for name in found]
        return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}

    def choose_name(self, size: int) -> str:
        """A name that no segment has had, which tells its size."""
        return f"segment-{self._random.randbytes(16).hex()}-{size}"

    def write(self, segment: str, parts: Sequence[Buffer]) -> None:
        """Keep a segment for good, or raise and keep nothing of it."""
        data = b"".join(parts)
        _result(lambda: self._store.write(segment, data), self._times.write_s)

    def read(self, segment: str, ranges: Sequence[Range]) -> Iterator[Buffer]:
        """Bytes of a segment; all ranges are asked for at once.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        begun = [self._store.read(segment, byte_range=slice(*one)) for one in ranges]
        for future in begun:
            answer = _result(lambda future=future: future, self._times.read_s)
            if answer.state == "missing":
                raise FileNotFoundError(segment)
            yield answer.value

    def remove(self, segment: str) -> None:
        """Remove a segment; one that is not there is passed over."""
        _result(lambda: self._store.write(segment, None), self._times.write_s)

    def close(self) -> None:
        """Nothing is held."""


def _result(begin: Callable[[], Any], timeout_s: float) -> Any:
    """What comes of a call to TensorStore.

    Raises:
        OSError: it failed, or is not over in time.
    """
    try:
        return begin().result(timeout=timeout_s)
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    except (ValueError, NotImplementedError) as error:
        # TensorStore reports most failures of the store as wrong values.
        raise OSError(str(error).partition(" [")[0]) from error


class ObjectTier(SegmentTier):
    """A `BlockStore` in an object store.

    Args:
        kvstore: URL of TensorStore, or JSON.
        bytes_max, clock, tenant_bytes_max, ttl_s: as for `SegmentTier`.
        random_source: of the names of segments.

    Raises:
        StoreError: the store cannot be used.
    """

    def __init__(
        self,
        kvstore: str,
        bytes_max: int,
        clock: Clock,
        random_source: random.Random,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
        times: ObjectTimes | None = None,
    ) -> None:
        times = times or ObjectTimes()
        try:
            segments = ObjectSegments(kvstore, times, random_source)
            super().__init__(segments, bytes_max, clock, tenant_bytes_max, ttl_s)
        except (OSError, ValueError) as error:
            raise StoreError(f"{kvstore}: cannot be used: {error}") from error
        self._refresh_s = times.refresh_s
        self._is_closing = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="kv-objects", daemon=True)
        self._refresher.start()

    def close(self) -> None:
        """Look for nothing any more."""
        self._is_closing.set()
        self._refresher.join(_CLOSE_S)
        super().close()

    def _refresh(self) -> None:
        while not self._is_closing.wait(self._refresh_s):
            try:
                self.refresh()
            except StoreError as error:
                _log.warning("the object store: %s", error)
