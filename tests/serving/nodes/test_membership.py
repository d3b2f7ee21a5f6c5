"""Goal: a worker joins until it is taken in, is heard of from then on, drops everything when its
life as a member is over, and gives up when it is refused.

Method: a membership by itself; the test plays router and clock.
"""

import random

from serving.nodes import messages
from serving.nodes.membership import TIMER, Membership
from serving.nodes.node import Outbox, Quit, Send, SetTimer
from serving.nodes.values import NodeId
from tests.serving.nodes.test_registry import CARD, STATUS

ROUTER = NodeId("router", "0")


class Rig:
    def __init__(self) -> None:
        self.outbox = Outbox()
        self.num_resets = 0
        self.membership = Membership(
            self.outbox, ROUTER, CARD, lambda: STATUS, self._reset, random.Random(1)
        )

    def _reset(self) -> None:
        self.num_resets += 1

    def sent(self) -> list[object]:
        effects = self.outbox.take()
        timers = [effect.name for effect in effects if isinstance(effect, SetTimer)]
        assert set(timers) <= {TIMER}
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def join(self) -> int:
        self.membership.start()
        generation = self.membership.generation
        self.membership.on_message(messages.Welcome(generation, 100))
        self.outbox.take()
        return generation


def test_it_tries_to_join_until_it_is_taken_in() -> None:
    rig = Rig()
    rig.membership.start()
    join = messages.Join(rig.membership.generation, CARD)
    assert rig.sent() == [join] and not rig.membership.is_member
    rig.membership.on_timer()
    assert rig.sent() == [join]
    rig.membership.on_message(messages.Welcome(rig.membership.generation + 1, 100))
    assert rig.sent() == [] and not rig.membership.is_member
    rig.membership.on_message(messages.Welcome(rig.membership.generation, 100))
    beat = messages.Heartbeat(rig.membership.generation, STATUS)
    assert rig.sent() == [beat] and rig.membership.is_member
    rig.membership.on_timer()
    assert rig.sent() == [beat]


def test_a_life_that_is_over_is_followed_by_another() -> None:
    rig = Rig()
    old = rig.join()
    rig.membership.on_message(messages.Fenced(old + 1))
    assert rig.num_resets == 0
    rig.membership.on_message(messages.Fenced(old))
    new = rig.membership.generation
    assert rig.num_resets == 1 and new != old and not rig.membership.is_member
    assert rig.sent() == [messages.Join(new, CARD)]
    # What waits of the old life is said once more.
    rig.membership.on_message(messages.Fenced(old))
    assert rig.num_resets == 1 and rig.sent() == []


def test_one_that_leaves_says_so_at_once() -> None:
    rig = Rig()
    rig.membership.drain()
    assert rig.sent() == []
    generation = rig.join()
    rig.membership.drain()
    assert rig.sent() == [messages.Heartbeat(generation, STATUS, True)]


def test_one_that_is_refused_gives_up() -> None:
    rig = Rig()
    rig.membership.start()
    rig.outbox.take()
    rig.membership.on_message(messages.Rejected(rig.membership.generation, "of the colour"))
    assert rig.outbox.take() == [Quit("the router refuses this node: of the colour")]
