"""Goal: a payload is read as what it is or refused, whatever happens to its bytes. Method: every
byte of a payload flipped, every length cut, and names and layouts that are others'.
"""

import pytest

from serving.kv.store import (
    HEADER_SIZE,
    CorruptPayloadError,
    Header,
    Name,
    PayloadKind,
    check,
    decode,
    encode,
    encode_into,
    layout_id,
    read_header,
    tenant_id,
)

NAME = Name(PayloadKind.BLOCK, b"k" * 16)
LAYOUT = layout_id(b"model")
HEADER = Header(NAME, LAYOUT, tenant_id("salt"), 1_700_000_000, 11)
PAYLOAD = bytes(encode(HEADER, [b"hello ", b"world"]))


def test_what_was_encoded_is_decoded() -> None:
    assert bytes(decode(PAYLOAD, NAME, LAYOUT)) == b"hello world"
    assert check(PAYLOAD) == read_header(PAYLOAD) == HEADER
    assert len(PAYLOAD) == HEADER.size == HEADER_SIZE + 11


def test_every_flipped_bit_is_noticed() -> None:
    for index in range(len(PAYLOAD)):
        for bit in range(8):
            damaged = bytearray(PAYLOAD)
            damaged[index] ^= 1 << bit
            with pytest.raises(CorruptPayloadError):
                decode(damaged, NAME, LAYOUT)


def test_every_cut_and_every_addition_is_noticed() -> None:
    for length in range(len(PAYLOAD)):
        with pytest.raises(CorruptPayloadError):
            decode(PAYLOAD[:length], NAME, LAYOUT)
    with pytest.raises(CorruptPayloadError, match="expected 91"):
        decode(PAYLOAD + b"x", NAME, LAYOUT)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (Name(PayloadKind.STATE, NAME.key), LAYOUT),
        (Name(PayloadKind.BLOCK, b"K" * 16), LAYOUT),
        (NAME, layout_id(b"another model")),
    ],
)
def test_a_whole_payload_of_another_name_or_layout_is_refused(name: Name, layout: bytes) -> None:
    with pytest.raises(CorruptPayloadError, match="expected"):
        decode(PAYLOAD, name, layout)


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="body of 5 bytes in 91 bytes; expected 11 in 91"):
        encode(HEADER, [b"hello"])
    with pytest.raises(ValueError):
        encode_into(memoryview(bytearray(90)), HEADER, [b"hello worl"])


def test_ids_tell_things_apart_and_salts_do_not_show() -> None:
    assert len({tenant_id(""), tenant_id("a"), layout_id(b"a")[:8]}) == 3
    assert b"secret" not in tenant_id("secret") and len(tenant_id("")) == 8
