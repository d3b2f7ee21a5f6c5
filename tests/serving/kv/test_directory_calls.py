"""Goal: names survive their way over the wire, and what is none is refused. Method: by hand."""

import msgspec
import pytest

from serving.kv import directory_calls as calls
from serving.kv.segment_index import Row
from serving.kv.store import Name, PayloadKind


def test_names_and_rows_come_back() -> None:
    names = [Name(PayloadKind.BLOCK, bytes(16)), Name(PayloadKind.STATE, b"\1" * 16)]
    assert calls.unpack_names(*calls.pack_names(names)) == names
    message = calls.Begin(7, [Row(1, b"k" * 16, 5, b"t", 9)])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=calls.Call)
    assert decoded == message


def test_what_is_no_list_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes of keys"):
        calls.unpack_names(b"\1", bytes(17))
    with pytest.raises(ValueError, match="2 keys for 1 kinds"):
        calls.unpack_names(b"\1", bytes(32))
