"""Messages between a cache process and storage nodes. Bytes follow a message as frames.

A node answers every message with one of the same `call`: `Pieces`, `Whole`, `Listing` or
`wire.Answer`. Messages to one node are taken in the order in which they were sent, so a `Drop`
after a `Put` leaves nothing, however late both arrive.
"""

import msgspec

from serving.kv.segment_index import Row
from serving.kv.wire import Answer, Ask


class Put(msgspec.Struct, tag=True):
    """Keep a fragment; its head and its pieces follow. Answered when it is on the disk."""

    call: int
    stripe: str


class Get(msgspec.Struct, tag=True):
    """Send pieces: for each stripe the numbers of payloads, ascending."""

    call: int
    wanted: list[tuple[str, list[int]]]


class Pieces(msgspec.Struct, tag=True):
    """For each stripe that is held: its name, the fragment, and sizes and checksums of the pieces
    that were asked for. They follow, in one frame for each stripe."""

    call: int
    found: list[tuple[str, int, list[int], list[bytes]]]


class Copy(msgspec.Struct, tag=True):
    """Send a fragment as it is."""

    call: int
    stripe: str


class Whole(msgspec.Struct, tag=True):
    """The head and all pieces of a fragment follow, in two frames; none if it is not held."""

    call: int


class Drop(msgspec.Struct, tag=True):
    """Remove fragments; those that are not held are passed over."""

    call: int
    stripes: list[str]


class Check(msgspec.Struct, tag=True):
    """Look at every byte of fragments, of all for None; damaged ones are removed and counted."""

    call: int
    stripes: list[str] | None = None


class Leave(msgspec.Struct, tag=True):
    """Give away what is held, or no longer."""

    call: int
    is_leaving: bool


class Meet(msgspec.Struct, tag=True):
    """There is a node called `name` at `address`."""

    call: int
    name: str
    address: str


class List(msgspec.Struct, tag=True):
    """What has changed since change number `since` of the life `epoch`? 0 begins anew."""

    call: int
    epoch: int
    since: int


class Listing(msgspec.Struct, tag=True):
    """Changes up to number `upto`; more of them if `has_more`.

    `is_anew`: what was heard before does not count. `held`: stripe, fragment, size of the file and
    rows. `dropped`: stripes. `nodes`: the names and addresses that the node has heard of.
    """

    call: int
    epoch: int
    upto: int
    has_more: bool
    is_anew: bool
    is_leaving: bool
    held: list[tuple[str, int, int, list[Row]]]
    dropped: list[str]
    nodes: dict[str, str]


Request = Put | Get | Copy | Drop | Check | Leave | Meet | List | Ask
Reply = Pieces | Whole | Listing | Answer

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def decode_request(frame: bytes) -> Request:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: it is none that a storage node answers.
    """
    return _requests.decode(frame)


def decode_reply(frame: bytes) -> Reply:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: it is none that a storage node sends.
    """
    return _replies.decode(frame)
