"""Goal: a request waits for features as long as it takes or is worth, and is not held up by others;
features that nobody wants any more are nowhere.

Method: the part of a worker by itself, with what it sends looked at.
"""

import random

import numpy as np
import pytest

from serving.core.request import Request, SamplingParams
from serving.engine.engine import Engine
from serving.nodes import messages
from serving.nodes.feature_pulls import TIMER, FeaturePulls
from serving.nodes.node import Outbox, Send
from serving.nodes.values import FeatureRef, NodeId
from tests.serving.engine.checked_engine import BUCKETS, make_limits
from tests.serving.engine.simulated_device import features_of, make_image

SOURCE, HOLDER = NodeId("router", "0"), NodeId("vision", "0")
FIRST, SECOND = make_image(1, 3, 1), make_image(5, 4, 2)


class Rig:
    def __init__(self, fingerprint: bytes = b"f") -> None:
        self.outbox = Outbox()
        self.engine = Engine(make_limits(), BUCKETS, random.Random(1))
        self.pulls = FeaturePulls(self.outbox, self.engine, fingerprint, 1000)

    def begin(self, name: str, *images: object, refs: tuple[bytes, ...] | None = None) -> bool:
        request = Request(name, (3,) * 12, SamplingParams(), images=images)  # type: ignore
        digests = [i.digest for i in request.images] if refs is None else refs
        places = tuple(FeatureRef(digest, HOLDER, "ipc://v") for digest in digests)
        return self.pulls.begin(SOURCE, request, places)

    def asked(self) -> list[bytes]:
        sent = [effect.message for effect in self.outbox.take() if isinstance(effect, Send)]
        return [m.digest for m in sent if isinstance(m, messages.ReadFeatures)]

    def give(self, image: object) -> list[str]:
        rows = features_of(image)  # type: ignore
        ready = self.pulls.on_features(messages.Features(image.digest, rows))  # type: ignore
        return [request.request_id for _, request in ready]


def test_a_request_goes_on_when_all_are_here() -> None:
    rig = Rig()
    assert rig.begin("a", FIRST, SECOND) and "a" in rig.pulls
    assert rig.asked() == [FIRST.digest, SECOND.digest]
    assert rig.give(SECOND) == [] and rig.give(FIRST) == ["a"] and "a" not in rig.pulls
    counts = rig.pulls.counts()
    assert (counts.num_taken, counts.num_lost, counts.held_bytes) == (2, 0, 28)
    taken = rig.engine.features.take("a", FIRST.digest, is_last=True)
    np.testing.assert_array_equal(taken, features_of(FIRST))


def test_requests_with_the_same_picture_ask_once() -> None:
    rig = Rig()
    rig.begin("a", FIRST)
    rig.begin("b", FIRST, SECOND)
    assert rig.asked() == [FIRST.digest, SECOND.digest]
    assert rig.give(FIRST) == ["a"] and rig.give(FIRST) == [] and rig.give(SECOND) == ["b"]


def test_those_that_wait_for_nothing_pass() -> None:
    assert not Rig().begin("a")
    assert not Rig().begin("a", FIRST, refs=())
    assert not Rig().begin("a", FIRST, refs=(SECOND.digest,))
    assert not Rig(fingerprint=b"").begin("a", FIRST)


@pytest.mark.parametrize("how", ["refused", "late"])
def test_features_that_do_not_come_are_not_waited_for(how: str) -> None:
    rig = Rig()
    rig.begin("a", FIRST, SECOND)
    rig.give(FIRST)
    if how == "refused":
        ready = rig.pulls.on_refused(SECOND.digest)
    else:
        ready = rig.pulls.on_timer(TIMER + SECOND.digest.hex())
    assert [request.request_id for _, request in ready] == ["a"]
    assert rig.pulls.counts().num_lost == 1
    # What comes after all is for nobody.
    assert rig.give(SECOND) == [] and rig.pulls.counts().held_bytes == 12


def test_features_of_another_size_are_not_used() -> None:
    rig = Rig()
    rig.begin("a", FIRST)
    wrong = messages.Features(FIRST.digest, features_of(SECOND))
    assert len(rig.pulls.on_features(wrong)) == 1
    assert rig.engine.features.take("a", FIRST.digest, is_last=True) is None


def test_forgotten_requests_leave_nothing() -> None:
    rig = Rig()
    rig.begin("a", FIRST, SECOND)
    rig.begin("b", SECOND)
    rig.give(FIRST)
    rig.pulls.forget("a")
    assert rig.pulls.counts().held_bytes == 0 and "a" not in rig.pulls
    assert rig.give(SECOND) == ["b"]
    rig.begin("c", FIRST)
    assert [request.request_id for _, request in rig.pulls.drain()] == ["c"]
    assert rig.pulls.counts().held_bytes == rig.pulls.num_pulling == 0
