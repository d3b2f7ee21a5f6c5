"""Goal: messages arrive as they were sent, and nothing else is taken for one."""

import msgspec
import pytest

from serving.kv import storage_wire, wire
from serving.kv.segment_index import Row

ROW = Row(1, b"k" * 16, 500, b"t" * 8, 1000)
REQUESTS = (
    storage_wire.Put(1, "ab"),
    storage_wire.Get(2, [("ab", [0, 3])]),
    storage_wire.Copy(3, "ab"),
    storage_wire.Drop(4, ["ab", "cd"]),
    storage_wire.Check(5),
    storage_wire.Leave(6, True),
    storage_wire.Meet(7, "n", "ipc://n"),
    storage_wire.List(8, 9, 10),
    wire.Ask(9, "stats"),
)
REPLIES = (
    storage_wire.Pieces(2, [("ab", 3, [10], [b"c" * 16])]),
    storage_wire.Whole(3),
    storage_wire.Listing(8, 9, 11, True, False, False, [("ab", 1, 99, [ROW])], ["cd"], {"n": "a"}),
    wire.Answer(4, {"dropped": 2}),
)


def test_messages_come_as_they_were_sent() -> None:
    for message in REQUESTS:
        assert storage_wire.decode_request(wire.encode(message)) == message
    for message in REPLIES:
        assert storage_wire.decode_reply(wire.encode(message)) == message


def test_nothing_else_is_a_message() -> None:
    for message in REPLIES:
        with pytest.raises(msgspec.MsgspecError):
            storage_wire.decode_request(wire.encode(message))
    for message in REQUESTS:
        with pytest.raises(msgspec.MsgspecError):
            storage_wire.decode_reply(wire.encode(message))
    with pytest.raises(msgspec.MsgspecError):
        storage_wire.decode_request(b"")
