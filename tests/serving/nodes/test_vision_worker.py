"""Goal: a vision worker encodes each picture once, keeps what it has room for, refuses what it does
not have, and says so when its device is gone.

Method: one worker in a fleet, spoken to as by a router and by prefill workers.
"""

from collections.abc import Iterator

import pytest

from serving.nodes import messages
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.values import NodeId
from tests.serving.engine.simulated_device import make_image
from tests.serving.nodes.fleet import FEATURES, MS, ROUTER, Fleet

ASKER = NodeId("prefill", "x")


class Rig:
    def __init__(self) -> None:
        self.fleet = Fleet(0, 0, num_vision=1, vision_bytes=60)
        self.fleet.encode_ns = 20 * MS
        (self.at,) = self.fleet.vision

    def encode(self, name: str, number: int, num_tokens: int = 5) -> None:
        message = messages.Encode(name, make_image(0, num_tokens, number))
        self.fleet.give(ROUTER, self.at, message)

    def read(self, number: int, fingerprint: bytes = FEATURES) -> Message:
        digest = make_image(0, 1, number).digest
        self.fleet.give(ASKER, self.at, messages.ReadFeatures(digest, fingerprint))
        return self.said(ASKER)[-1]

    def said(self, to: NodeId) -> list[Message]:
        return [m for source, d, m in self.fleet.sent if source == self.at and d == to]

    def encoded(self) -> list[str]:
        return [m.request_id for m in self.said(ROUTER) if isinstance(m, messages.Encoded)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.fleet.run(1)
    assert not made.fleet.vision_status(made.at).num_waiting


def test_pictures_are_encoded_in_order_and_once(rig: Rig) -> None:
    for name, number in (("a", 1), ("b", 2), ("c", 3), ("again", 3), ("d", 1)):
        rig.encode(name, number)
    rig.encode("a", 1)  # A duplicate.
    status = rig.fleet.vision_status(rig.at)
    assert (status.num_encoding, status.num_waiting, status.num_waiting_tokens) == (2, 1, 5)
    rig.fleet.run(0.1)
    assert rig.encoded() == ["a", "d", "b", "c", "again"]
    rig.encode("late", 3)
    assert rig.encoded()[-1] == "late"
    status = rig.fleet.vision_status(rig.at)
    assert (status.num_encoded, status.num_hits, status.num_kept) == (3, 1, 3)


def test_features_are_given_to_whoever_has_the_same_model(rig: Rig) -> None:
    rig.encode("a", 1)
    rig.fleet.run(0.1)
    given = rig.read(1)
    assert isinstance(given, messages.Features) and given.rows.shape == (5, 4)
    assert isinstance(rig.read(1, b"another"), messages.FeaturesRefused)
    assert isinstance(rig.read(2), messages.FeaturesRefused)
    for name in (2, 3, 4):
        rig.encode(str(name), name)
    rig.fleet.run(0.1)
    # 60 bytes are three images.
    assert isinstance(rig.read(1), messages.FeaturesRefused)
    status = rig.fleet.vision_status(rig.at)
    assert (status.kept_bytes, status.num_evicted) == (60, 1)
    assert (status.num_sent, status.num_missing) == (1, 3)


def test_a_full_line_refuses_and_aborted_pictures_make_room(rig: Rig) -> None:
    for number in range(10):
        rig.encode(f"r{number}", number)
    rig.encode("more", 11)
    refused = rig.said(ROUTER)[-1]
    assert isinstance(refused, messages.Refused) and refused.reason is RefusalReason.BUSY
    for number in range(9):
        rig.fleet.give(ROUTER, rig.at, messages.Abort(f"r{number}"))
    rig.encode("more", 11)
    rig.fleet.run(0.1)
    assert rig.encoded() == ["r9", "more"]
    # The two that were being encoded are kept.
    assert rig.fleet.vision_status(rig.at).num_encoded == 4


def test_one_that_is_asked_for_anew_while_it_is_encoded_is_not_encoded_twice(rig: Rig) -> None:
    rig.encode("a", 1)
    rig.fleet.give(ROUTER, rig.at, messages.Abort("a"))
    rig.encode("b", 1)
    rig.fleet.run(0.1)
    assert rig.encoded() == ["b"] and rig.fleet.vision_status(rig.at).num_encoded == 1


def test_a_fenced_worker_forgets_who_waits_and_keeps_what_it_has(rig: Rig) -> None:
    rig.encode("a", 1)
    rig.fleet.run(0.1)
    for number in range(2, 6):
        rig.encode(f"r{number}", number)
    generation = rig.fleet.vision_worker(rig.at)._membership.generation
    rig.fleet.give(ROUTER, rig.at, messages.Fenced(generation))
    assert rig.fleet.vision_worker(rig.at).is_member
    rig.fleet.run(0.1)
    assert rig.encoded() == ["a"] and isinstance(rig.read(1), messages.Features)


def test_a_lost_device_ends_the_process(rig: Rig) -> None:
    rig.encode("a", 1)
    rig.encode("b", 2)
    rig.encode("c", 3)
    failed = messages.Computed("image 1", None, "not finished within 5 s")
    rig.fleet.give(rig.at, rig.at, failed)
    names = [m.request_id for m in rig.said(ROUTER) if isinstance(m, messages.Failed)]
    assert sorted(names) == ["a", "b", "c"]
    assert rig.fleet.quits == ["an image could not be encoded: not finished within 5 s"]
    assert rig.fleet.vision_worker(rig.at).status().failure == rig.fleet.quits[0]
