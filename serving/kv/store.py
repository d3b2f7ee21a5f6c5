"""What lies in a storage tier, and the interface that all tiers have.

A *payload* is a block or a state as bytes behind a header. The header says what it is (kind, key,
layout, tenant) and carries a checksum over itself and the body, so whoever holds a payload can
tell whether it is the one that was asked for, however it came:

    bytes  0  4  magic              16  8  size of the body
           4  2  version            24 16  key
           6  1  kind               40 16  layout
           7  1  zero               56  8  tenant
           8  8  seconds since 1970 64 16  xxh3-128 of bytes 0 to 63 and the body
                 when written       80     body

The body of a block is its layer groups one after another. The *layout* is the fingerprint of
everything that bytes depend on; bytes of one layout are never read under another.

*Why the checksum is not cryptographic*: it guards against faults. What keeps tenants apart is the
key, and nobody but the service writes to its storage.
"""

import enum
import hashlib
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import xxhash

MAGIC = b"DJKV"
VERSION = 1
HEADER_SIZE = 80
_TENANT_SALT = re.compile("32:[0-9a-f]{32}")
_HEAD = struct.Struct("<4sHBBQQ16s16s8s")

Buffer = bytes | bytearray | memoryview


class PayloadKind(enum.IntEnum):
    """A block of 128 tokens, or the state of a sequence at a block boundary."""

    BLOCK = 1
    STATE = 2


_KINDS = frozenset(map(int, PayloadKind))


class Name(NamedTuple):
    """What a payload is stored under."""

    kind: int
    key: bytes


class CorruptPayloadError(ValueError):
    """Bytes that are not the payload that was asked for."""


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """What payloads look like: `layout` names it, and a block has groups of so many bytes."""

    layout: bytes
    group_bytes: tuple[int, ...]
    state_bytes: int


class Header(NamedTuple):
    """What a payload says of itself. A tuple, because one is made whenever a payload is read."""

    name: Name
    layout: bytes
    tenant: bytes
    written_s: int
    body_size: int

    @property
    def size(self) -> int:
        """Bytes of the whole payload."""
        return HEADER_SIZE + self.body_size


def layout_id(fingerprint: bytes) -> bytes:
    """16 bytes that name a layout."""
    return hashlib.sha256(b"layout" + fingerprint).digest()[:16]


def tenant_id(salt: str) -> bytes:
    """8 bytes that name a tenant without telling its salt.

    A tenant with keys has 32 digits before the salts of its requests; all of those are one tenant,
    so that none gets more room by using many salts.
    """
    own = _TENANT_SALT.match(salt)
    return hashlib.sha256(b"tenant" + (own[0] if own else salt).encode()).digest()[:8]


def encode_into(target: memoryview, header: Header, parts: Iterable[Buffer]) -> None:
    """Write a payload whose body is `parts`, in order, into `target`.

    Raises:
        ValueError: the parts or the target do not have the size that the header says.
    """
    at = HEADER_SIZE
    for part in parts:
        view = memoryview(part).cast("B")
        target[at : at + len(view)] = view
        at += len(view)
    if at != header.size or len(target) != header.size:
        raise ValueError(
            f"a body of {at - HEADER_SIZE} bytes in {len(target)} bytes; expected "
            f"{header.body_size} in {header.size}"
        )
    head = _pack_head(header)
    target[: _HEAD.size] = head
    target[_HEAD.size : HEADER_SIZE] = _checksum(head, target[HEADER_SIZE:])


def encode(header: Header, parts: Iterable[Buffer]) -> bytearray:
    """A payload whose body is `parts`, in order."""
    data = bytearray(header.size)
    encode_into(memoryview(data), header, parts)
    return data


def read_header(data: Buffer) -> Header:
    """The header of a payload, not checked against its body.

    Raises:
        CorruptPayloadError: this is no payload of this version.
    """
    view = memoryview(data)
    if len(view) < HEADER_SIZE:
        raise CorruptPayloadError(f"{len(view)} bytes; expected at least {HEADER_SIZE}")
    magic, version, kind, zero, written_s, size, key, layout, tenant = _HEAD.unpack_from(view)
    if magic != MAGIC or version != VERSION or zero or kind not in _KINDS:
        raise CorruptPayloadError(
            f"begins with {bytes(view[:8]).hex()}; expected a payload of version {VERSION}"
        )
    return Header(Name(kind, key), layout, tenant, written_s, size)


def decode(data: Buffer, name: Name, layout: bytes) -> memoryview:
    """The body of a payload, after everything has been checked.

    Raises:
        CorruptPayloadError: bytes are damaged or missing, or belong to another name or layout.
    """
    header = check(data)
    if header.name != name or header.layout != layout:
        raise CorruptPayloadError(
            f"holds {header.name} of layout {header.layout.hex()}; expected {name} of "
            f"{layout.hex()}"
        )
    return memoryview(data)[HEADER_SIZE : header.size]


def check(data: Buffer) -> Header:
    """The header of an undamaged payload.

    Raises:
        CorruptPayloadError: bytes are damaged or missing.
    """
    header = read_header(data)
    view = memoryview(data)
    if len(view) != header.size:
        raise CorruptPayloadError(f"{len(view)} bytes; expected {header.size}")
    stored = bytes(view[_HEAD.size : HEADER_SIZE])
    if _checksum(bytes(view[: _HEAD.size]), view[HEADER_SIZE:]) != stored:
        raise CorruptPayloadError(f"checksum of {header.name} does not match; bytes are damaged")
    return header


def _pack_head(header: Header) -> bytes:
    return _HEAD.pack(
        MAGIC,
        VERSION,
        header.name.kind,
        0,
        header.written_s,
        header.body_size,
        header.name.key,
        header.layout,
        header.tenant,
    )


def _checksum(head: bytes, body: memoryview) -> bytes:
    digest = xxhash.xxh3_128(head)
    digest.update(body)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a tier has done since its start, and what it holds.

    Attributes:
        num_payloads, num_bytes: held.
        num_written, num_read: payloads.
        bytes_written, bytes_read: of payloads.
        num_corrupt: payloads that were found damaged.
        num_evicted: payloads that made room for others or grew too old.
        num_failed: calls that the storage below refused.
        num_repaired, num_degraded: pieces that were made anew, and reads that missed some.
        num_missing: pieces that are to be made anew.
        num_nodes, num_nodes_away: others that keep the payloads, and those of them that do not
            answer.
    """

    num_payloads: int = 0
    num_bytes: int = 0
    num_written: int = 0
    num_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    num_corrupt: int = 0
    num_evicted: int = 0
    num_failed: int = 0
    num_repaired: int = 0
    num_degraded: int = 0
    num_missing: int = 0
    num_nodes: int = 0
    num_nodes_away: int = 0


class StoreError(OSError):
    """The storage below does not work now: full, read-only, gone or too slow."""


class BlockStore(Protocol):
    """A storage tier. Calls may come from several threads; what one returns was whole when read."""

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are stored, without reading them."""
        ...

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those that are not stored, or damaged."""
        ...

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Store payloads; all of them are kept when this returns, or it raises.

        Raises:
            StoreError: they could not be stored; none of them counts as stored.
        """
        ...

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads; those that are not stored are passed over."""
        ...

    def purge(self, tenant: bytes | None) -> int:
        """Drop all payloads of a tenant, or of everybody, for good; how many there were."""
        ...

    def verify(self) -> list[Name]:
        """Read everything; the names of what was damaged, which is forgotten."""
        ...

    def counts(self) -> StoreCounts:
        """What the tier has done and holds."""
        ...

    def sizes(self) -> Mapping[bytes, int]:
        """Bytes held for each tenant."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


@runtime_checkable
class SparesStore(BlockStore, Protocol):
    """A storage tier over several nodes that can do without some of them."""

    def repair(self) -> int:
        """Make all missing pieces anew that can be made now; how many there were."""
        ...

    def leave(self, node: str, is_leaving: bool = True) -> int:
        """Have a node give away what it holds, or take again; the number of its pieces.

        Raises:
            StoreError: there is no such node, or it does not answer.
        """
        ...
