"""What is asked of the directory over the wire, and what it answers.

Names travel as two strings of bytes, one with a kind for each and one with 16 bytes of key for
each, so that thousands of them are one message. Every answer has the *epoch* of the directory,
which no two starts of it share: whoever sees another one tells it what there is.
"""

import itertools
from collections.abc import Sequence

import msgspec

from serving.kv.key_bytes import split_keys
from serving.kv.segment_index import Row
from serving.kv.store import Name

Spot = tuple[int, int, int]
"""Where a payload lies: which of the segments of the answer, its first byte, its size."""

Found = tuple[str, int, list[Row]]
"""A segment that is stored: its name, its bytes, its payloads in order."""


class Match(msgspec.Struct, tag=True):
    """How many blocks of the chain `keys` are stored, up to one with a state?

    `first` blocks are present elsewhere; `num_usable` or fewer are of no use.
    """

    call: int
    keys: bytes
    first: int = 0
    num_usable: int = 0


class Matched(msgspec.Struct, tag=True):
    """Blocks of the longest stored prefix that has a state at its end; 0 if none is of use.

    `num_present` blocks are stored, or present elsewhere, with or without a state.
    """

    call: int
    epoch: int
    num_blocks: int
    num_present: int = 0


class Contains(msgspec.Struct, tag=True):
    """Which payloads are stored?"""

    call: int
    kinds: bytes
    keys: bytes


class Contained(msgspec.Struct, tag=True):
    """One byte for each name: 1 if it is stored."""

    call: int
    epoch: int
    flags: bytes


class Locate(msgspec.Struct, tag=True):
    """Where do payloads lie? They stay there until `Release`, or until the lease is over."""

    call: int
    kinds: bytes
    keys: bytes


class Located(msgspec.Struct, tag=True):
    """A spot for each name, or None."""

    call: int
    epoch: int
    lease: int
    segments: list[str]
    spots: list[Spot | None]


class Release(msgspec.Struct, tag=True):
    """What was located has been read; `lost` was damaged or not there. Not answered."""

    lease: int
    lost_kinds: bytes = b""
    lost_keys: bytes = b""


class Begin(msgspec.Struct, tag=True):
    """May these payloads be written?"""

    call: int
    rows: list[Row]


class Begun(msgspec.Struct, tag=True):
    """Those that may, by index, under a write that has to be completed in time.

    `doomed` are segments that the asker is to remove; `Removed` tells that it has.
    """

    call: int
    epoch: int
    write: int
    granted: list[int]
    doomed: list[str] = []


class Complete(msgspec.Struct, tag=True):
    """What `write` was granted, all of it, is stored as `segment` of so many bytes."""

    call: int
    write: int
    segment: str
    size: int


class Completed(msgspec.Struct, tag=True):
    """Whether it counts as stored; if not, the segment is to be removed."""

    call: int
    epoch: int
    is_kept: bool


class Announce(msgspec.Struct, tag=True):
    """Segments that are stored. With `rows` they are taken over; `names` are only asked about."""

    call: int
    names: list[str] = []
    segments: list[Found] = []


class Announced(msgspec.Struct, tag=True):
    """The segments among `names` that the directory does not know."""

    call: int
    epoch: int
    unknown: list[str]


class Drop(msgspec.Struct, tag=True):
    """Forget payloads; or all of `tenant`, if `is_purge`, or of everybody if that is None."""

    call: int
    kinds: bytes = b""
    keys: bytes = b""
    is_purge: bool = False
    tenant: bytes | None = None


class Dropped(msgspec.Struct, tag=True):
    """How many there were; `touched` segments still hold their bytes, beside those of others."""

    call: int
    epoch: int
    num_dropped: int
    touched: list[str] = []


class Removed(msgspec.Struct, tag=True):
    """Segments that are no longer stored. Not answered."""

    segments: list[str]


class Remaining(msgspec.Struct, tag=True):
    """Which payloads are left in these segments? Without segments: in all of them."""

    call: int
    segments: list[str] = []


class Remained(msgspec.Struct, tag=True):
    """The names."""

    call: int
    epoch: int
    kinds: bytes
    keys: bytes


class Pin(msgspec.Struct, tag=True):
    """Keep payloads from being evicted, or no longer."""

    call: int
    kinds: bytes
    keys: bytes
    is_pinned: bool


class Pinned(msgspec.Struct, tag=True):
    """How many of them there are."""

    call: int
    epoch: int
    num_pinned: int


class Hello(msgspec.Struct, tag=True):
    """Is anybody there? What is to be removed is asked for on the way."""

    call: int


class Welcome(msgspec.Struct, tag=True):
    """Yes."""

    call: int
    epoch: int
    doomed: list[str] = []


Call = (
    Match | Contains | Locate | Release | Begin | Complete | Announce | Drop | Removed
    | Remaining | Pin | Hello
)  # fmt: skip
Reply = (
    Matched | Contained | Located | Begun | Completed | Announced | Dropped | Remained | Pinned
    | Welcome
)  # fmt: skip


def pack_names(names: Sequence[Name]) -> tuple[bytes, bytes]:
    """The kinds and the keys of names."""
    return bytes(name.kind for name in names), b"".join(name.key for name in names)


def unpack_names(kinds: bytes, keys: bytes) -> list[Name]:
    """The names of `pack_names`.

    Raises:
        KeysError: no whole number of keys.
        ValueError: not as many keys as kinds.
    """
    split = split_keys(keys)
    if len(split) != len(kinds):
        raise ValueError(f"{len(split)} keys for {len(kinds)} kinds; expected one for each")
    return list(itertools.starmap(Name, zip(kinds, split, strict=True)))
