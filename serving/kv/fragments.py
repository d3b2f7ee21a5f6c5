"""Fragments of stripes as bytes: the erasure code, checksums, and what a fragment says of itself.

Each payload of a stripe is coded for itself into *pieces*, one for each fragment, so that single
payloads can be read. A fragment is a head and then its pieces of all payloads, in order:

    bytes  0  4  magic                 12  4  size of the index
           4  2  version               16 16  stripe
           6  1  fragment              32 16  xxh3-128 of bytes 0 to 31 and the index
           7  1  data fragments        48     index: rows of the payloads, sizes and checksums
           8  1  parity fragments             of the pieces
           9  3  zero                         pieces

*Why checksums of our own*: the library does not notice a flipped bit, and ends the process when the
head of a piece is damaged, so nothing goes to it whose checksum has not been looked at.
"""

import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash
from pyeclib.ec_iface import ECDriver, ECDriverError

from serving.kv.segment_index import Row
from serving.kv.store import Buffer
from serving.kv.stripes import Coding

_HEAD = struct.Struct("<4sHBBBxxxI16s")
_MAGIC, _VERSION = b"DJFR", 1
_CHECKSUM_SIZE = 16
HEAD_SIZE = _HEAD.size + _CHECKSUM_SIZE

_Index = tuple[list[Row], list[int], list[bytes]]


class CorruptFragmentError(ValueError):
    """Bytes that are no undamaged fragment."""


@dataclass(frozen=True, slots=True)
class FragmentHead:
    """What a fragment says of itself.

    Attributes:
        stripe: 32 hexadecimal digits.
        fragment: its number.
        rows: the payloads of the stripe.
        piece_sizes, checksums: of its pieces, one for each payload.
    """

    stripe: str
    fragment: int
    coding: Coding
    rows: tuple[Row, ...]
    piece_sizes: tuple[int, ...]
    checksums: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The head as bytes."""
        index = msgspec.msgpack.encode((self.rows, self.piece_sizes, self.checksums))
        coding = self.coding
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            self.fragment,
            coding.num_data,
            coding.num_parity,
            len(index),
            bytes.fromhex(self.stripe),
        )
        return head + _head_checksum(head, index) + index

    def of_fragment(self, fragment: int, pieces: Sequence[Buffer]) -> "FragmentHead":
        """The head of another fragment of the same stripe."""
        checksums = tuple(map(xxhash.xxh3_128_digest, pieces))
        return replace(self, fragment=fragment, checksums=checksums)

    def is_good(self, number: int, piece: Buffer) -> bool:
        """Whether these are the bytes of piece `number`."""
        return (
            len(piece) == self.piece_sizes[number]
            and xxhash.xxh3_128_digest(piece) == self.checksums[number]
        )


def good_pieces(pieces: Sequence[Buffer], checksums: Sequence[bytes]) -> list[bool]:
    """Whether each of the pieces is what was written."""
    return list(map(operator.eq, map(xxhash.xxh3_128_digest, pieces), checksums))


def head_size(begin: Buffer) -> int:
    """Bytes of the head that a fragment begins with, of which the first `HEAD_SIZE` are given.

    Raises:
        CorruptFragmentError: this is no fragment.
    """
    if len(begin) < HEAD_SIZE:
        raise CorruptFragmentError(f"{len(begin)} bytes; expected at least {HEAD_SIZE}")
    magic, version, *_, index_size, _stripe = _HEAD.unpack_from(begin)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptFragmentError(
            f"begins with {bytes(begin[:6]).hex()}; expected a fragment of version {_VERSION}"
        )
    return HEAD_SIZE + index_size


def read_head(data: Buffer) -> FragmentHead:
    """The head at the beginning of `data`.

    Raises:
        CorruptFragmentError: it is damaged or missing.
    """
    size = head_size(data)
    view = memoryview(data)
    head, index = bytes(view[: _HEAD.size]), bytes(view[HEAD_SIZE:size])
    if bytes(view[_HEAD.size : HEAD_SIZE]) != _head_checksum(head, index):
        raise CorruptFragmentError("the checksum of a head does not match; bytes are damaged")
    _, _, fragment, num_data, num_parity, _, stripe = _HEAD.unpack(head)
    try:
        rows, sizes, checksums = msgspec.msgpack.decode(index, type=_Index)
    except msgspec.MsgspecError as error:
        raise CorruptFragmentError(f"the index of a fragment: {error}") from None
    coding = Coding(num_data, num_parity)
    return FragmentHead(stripe.hex(), fragment, coding, tuple(rows), tuple(sizes), tuple(checksums))


def _head_checksum(head: bytes, index: bytes) -> bytes:
    return xxhash.xxh3_128_digest(head + index)


class StripeCodec:
    """The erasure code: Reed-Solomon with a Cauchy matrix, by ISA-L."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self._driver = ECDriver(k=coding.num_data, m=coding.num_parity, ec_type="isa_l_rs_cauchy")

    def encode(self, payload: Buffer) -> list[bytes]:
        """The pieces of a payload, one for each fragment."""
        # The library takes nothing but bytes.
        return self._driver.encode(payload if isinstance(payload, bytes) else bytes(payload))

    def encode_stripe(
        self, stripe: str, rows: Sequence[Row], payloads: Sequence[Buffer]
    ) -> list[tuple[FragmentHead, list[bytes]]]:
        """The fragments of a stripe, each a head and its pieces."""
        by_payload: list[list[bytes]] = []
        checksums: list[list[bytes]] = []
        for payload in payloads:
            pieces = self.encode(payload)
            by_payload.append(pieces)
            # Now, while they are in the processor's cache.
            checksums.append(list(map(xxhash.xxh3_128_digest, pieces)))
        sizes = tuple(len(pieces[0]) for pieces in by_payload)
        return [
            (FragmentHead(stripe, number, self.coding, tuple(rows), sizes, sums), list(pieces))
            for number, (pieces, sums) in enumerate(
                zip(zip(*by_payload, strict=True), zip(*checksums, strict=True), strict=True)
            )
        ]

    def decode(self, pieces: Mapping[int, bytes]) -> bytes:
        """A payload from enough of its pieces, by fragment; those of data need no arithmetic.

        Raises:
            CorruptFragmentError: they do not belong together.
        """
        num_data = self.coding.num_data
        chosen = pieces if len(pieces) == num_data else sorted(pieces)[:num_data]
        try:
            return self._driver.decode([pieces[number] for number in chosen])
        except ECDriverError as error:
            numbers = sorted(chosen)
            raise CorruptFragmentError(f"pieces {numbers} cannot be decoded: {error}") from None

    def rebuild(self, pieces: Mapping[int, bytes], fragments: Sequence[int]) -> list[bytes]:
        """Pieces of `fragments` from enough others.

        Raises:
            CorruptFragmentError: they do not belong together.
        """
        try:
            return self._driver.reconstruct(list(pieces.values()), list(fragments))
        except ECDriverError as error:
            raise CorruptFragmentError(f"{fragments} cannot be made anew: {error}") from None
