"""Goal: every message that may cross between processes comes out as it went in, arrays without a
copy, and whatever else comes in is refused and runs nothing.

Method: messages with all that they can hold; frames that are damaged one by one.
"""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.core.kv_transfer import KVRead
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import (
    ConstraintKind,
    FinishReason,
    OutputConstraint,
    Request,
    RequestImage,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from serving.nodes import messages
from serving.nodes.values import HandOffCounts, HandOffRef, MemberCard, NodeId, NodeStatus
from serving.transport.codec import Codec, Parcel, WireError
from tests.serving.engine.checked_engine import make_limits

A, B = NodeId("prefill", "0"), NodeId("router", "0")
REF = HandOffRef(A, 2**61, 3, 300, 3)
IMAGE = RequestImage(1, 2, 1, 4, b"digest", np.arange(12, dtype=np.uint8).reshape(4, 3))
REQUEST = Request(
    "a",
    (1, 2, 3, 4),
    SamplingParams(seed=2**62, logit_bias=((3, -1.5),), stop_token_ids=(7,)),
    images=(IMAGE,),
    constraint=OutputConstraint(ConstraintKind.JSON, "{}"),
    resumed_token_ids=(5, 6),
)


def carried(message: Any) -> Any:
    codec = Codec()
    parcel = codec.decode(codec.encode(Parcel(A, "ipc:///a", B, message)))
    assert (parcel.source, parcel.address, parcel.destination) == (A, "ipc:///a", B)
    return parcel.message


def test_requests_and_tokens_come_out_as_they_went_in() -> None:
    request = carried(messages.Submit(REQUEST)).request
    assert request == REQUEST
    np.testing.assert_array_equal(request.images[0].pixels, IMAGE.pixels)
    delta = TokenDelta(
        "a", (1, 2), FinishReason.STOP, 4, 2, (TokenLogprob(-1.5, ((3, -2.0),)),), (None,)
    )
    assert carried(messages.Tokens((delta,))) == messages.Tokens((delta,))


def test_members_and_references_come_out_as_they_went_in() -> None:
    limits = make_limits(replay=ReplayRule(ReplayMode.COMPACT, 140))
    card = MemberCard("ipc:///x", "1", b"f" * 32, limits, (), ())
    assert carried(messages.Join(2**61, card)) == messages.Join(2**61, card)
    from serving.core.engine_status import total_status

    status = NodeStatus(None, total_status([]), HandOffCounts(refused={"stale": 2}))
    beat = messages.Heartbeat(4, status, True)
    assert carried(beat) == beat
    for message in (
        messages.ReadBlocks(REF, b"f", 1, 2),
        messages.Refused("a", messages.RefusalReason.BUSY, "full"),
        messages.BlocksRefused(REF, messages.HandOffProblem.STALE),
    ):
        assert carried(message) == message


def test_arrays_travel_as_frames_of_their_own() -> None:
    rng = np.random.default_rng(1)
    groups = tuple(rng.integers(0, 256, (3, size), np.uint8) for size in (40, 7))
    part = KVRead(9, (groups[0][:, ::2], groups[1]), np.zeros((0, 5), np.uint8))
    codec = Codec()
    frames = codec.encode(Parcel(A, "", B, messages.Blocks(REF, 64, part)))
    assert [len(frame) for frame in frames[1:]] == [60, 21, 0]
    came = codec.decode(frames).message
    assert isinstance(came, messages.Blocks) and came.first == 64
    for array, expected in zip(came.part.groups, part.groups, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert came.part.states.shape == (0, 5)
    assert np.shares_memory(came.part.groups[1], np.frombuffer(frames[2], np.uint8))


def test_only_messages_that_may_cross_do() -> None:
    codec = Codec()
    for message in (messages.Crashed("x"), messages.Computed("k", 1), messages.Undeliverable(A, 1)):
        with pytest.raises(WireError, match="no message that leaves its process"):
            codec.encode(Parcel(A, "", B, message))


def test_whatever_is_no_message_is_refused() -> None:
    codec = Codec()
    good = codec.encode(Parcel(A, "", B, messages.Submit(REQUEST)))
    head = msgspec.msgpack.decode(good[0])
    bad: list[list[Any]] = [[], [b""], [b"x"], [good[0]], [*good, *[b""] * 5000]]
    for change in (
        {0: 99},
        {4: "Crashed"},
        {4: "Nonsense"},
        {5: {"request": 1}},
        {5: {"request": head[5]["request"] | {"sampling": {"temperature": 7.0}}}},
    ):
        bad.append(
            [msgspec.msgpack.encode([change.get(n, v) for n, v in enumerate(head)]), good[1]]
        )
    for place in ([1, "|u1", [4, 4]], [1, "|O8", [4, 3]], [2, "|u1", [4, 3]], [1, "|u1", [-4, 3]]):
        image = head[5]["request"]["images"][0] | {"pixels": place}
        request = head[5]["request"] | {"images": [image]}
        bad.append([msgspec.msgpack.encode([*head[:5], {"request": request}]), good[1]])
    for frames in bad:
        with pytest.raises(WireError):
            codec.decode(frames)
    # Nothing of it stays.
    assert codec.decode(good).message == messages.Submit(REQUEST)


@pytest.mark.parametrize("kind", messages.WIRE_MESSAGES)
def test_messages_that_cross_hold_only_what_travels(kind: type) -> None:
    assert dataclasses.is_dataclass(kind) and kind.__name__ in Codec()._decoders
