"""Goal: any `num_data` of the fragments give a payload back, and no damaged one is taken for good.

Method: every pattern of losses of a small code and of 10+2, and a flip in every byte of a head.
"""

import itertools
import random

import pytest

from serving.kv.fragments import CorruptFragmentError, StripeCodec, head_size, read_head
from serving.kv.segment_index import Row
from serving.kv.stripes import Coding
from tests.serving.kv.storage_parts import payload

PAYLOADS = [payload(1, 1000), payload(2, 37), payload(3, 40_000)]
ROWS = [Row.of(data) for data in PAYLOADS]
STRIPE = bytes(range(16)).hex()


@pytest.mark.parametrize("coding", [Coding(3, 2), Coding(10, 2), Coding(1, 1)])
def test_any_loss_that_the_code_bears_is_made_good(coding: Coding) -> None:
    codec = StripeCodec(coding)
    fragments = codec.encode_stripe(STRIPE, ROWS, [memoryview(data) for data in PAYLOADS])
    numbers = range(coding.num_fragments)
    assert [head.fragment for head, _ in fragments] == list(numbers)
    for lost in itertools.combinations(numbers, coding.num_parity):
        for index, data in enumerate(PAYLOADS):
            left = {n: fragments[n][1][index] for n in numbers if n not in lost}
            assert codec.decode(left) == data
            assert codec.rebuild(left, lost) == [fragments[n][1][index] for n in lost]


def test_too_few_pieces_are_an_error() -> None:
    codec = StripeCodec(Coding(3, 2))
    pieces = dict(enumerate(codec.encode(PAYLOADS[0])))
    with pytest.raises(CorruptFragmentError, match="cannot be decoded"):
        codec.decode({0: pieces[0], 4: pieces[4]})
    with pytest.raises(CorruptFragmentError, match="cannot be made anew"):
        codec.rebuild({0: pieces[0], 4: pieces[4]}, [1])


def test_a_head_says_what_its_fragment_is() -> None:
    coding = Coding(3, 2)
    fragments = StripeCodec(coding).encode_stripe(STRIPE, ROWS, PAYLOADS)
    for number, (head, pieces) in enumerate(fragments):
        again = read_head(head.encode() + b"".join(pieces))
        assert again == head and again.rows == tuple(ROWS) and again.coding == coding
        assert again.fragment == number and again.stripe == STRIPE
        assert all(again.is_good(index, piece) for index, piece in enumerate(pieces))
        assert not again.is_good(0, pieces[1]) and not again.is_good(0, pieces[0][:-1])
        other = fragments[number - 1]
        assert head.of_fragment(other[0].fragment, other[1]) == other[0]


def test_damage_anywhere_in_a_head_is_seen() -> None:
    head = StripeCodec(Coding(3, 2)).encode_stripe(STRIPE, ROWS, PAYLOADS)[0][0].encode()
    for at in range(len(head)):
        damaged = bytearray(head)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(CorruptFragmentError):
            read_head(damaged)
    for cut in (0, 10, 47, 48, len(head) - 1):
        with pytest.raises(CorruptFragmentError):
            read_head(head[:cut])
    assert head_size(head) == len(head)
