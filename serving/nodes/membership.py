"""A worker's life as a member of a cluster: joining, heartbeats, and being told that it is over.

    Join -> Welcome -> Heartbeat, Heartbeat, ... -> Fenced -> everything is dropped -> Join
        \\-> Rejected: the process ends, since another try would end the same way

A router that has just started knows nobody, so its members' lives are over, too: nobody waits for
what the one before it has asked for.
"""

import random
from collections.abc import Callable

from serving.nodes import messages
from serving.nodes.node import Outbox
from serving.nodes.values import MemberCard, NodeId, NodeStatus

TIMER = "membership"
_JOIN_NS = 500_000_000
"""Time between tries to join."""


class Membership:
    """The part of a worker that keeps it a member; its effects go into the worker's outbox.

    Args:
        status: how the worker is now.
        reset: called when everything that the worker has is to be dropped.
        random_source: of generations.
    """

    def __init__(
        self,
        outbox: Outbox,
        router: NodeId,
        card: MemberCard,
        status: Callable[[], NodeStatus],
        reset: Callable[[], None],
        random_source: random.Random,
    ) -> None:
        self._outbox = outbox
        self._router = router
        self._card = card
        self._status = status
        self._reset = reset
        self._random = random_source
        self._heartbeat_ns = 0
        self._is_joined = False
        self.is_draining = False
        self.generation = self._draw()

    @property
    def is_member(self) -> bool:
        """Whether the router has taken it in, as far as it knows."""
        return self._is_joined

    def start(self) -> None:
        """Begins to join."""
        self._outbox.send(self._router, messages.Join(self.generation, self._card))
        self._outbox.set_timer(TIMER, _JOIN_NS)

    def drain(self) -> None:
        """Tells the router, now, that no more requests are to come."""
        self.is_draining = True
        if self._is_joined:
            self._beat()

    def on_timer(self) -> None:
        """Its time is over: the next sign of life."""
        if self._is_joined:
            self._beat()
        else:
            self.start()

    def on_message(self, message: messages.Welcome | messages.Rejected | messages.Fenced) -> None:
        """Takes what the router says; what is meant for an earlier life is passed over."""
        if message.generation != self.generation:
            return
        match message:
            case messages.Welcome(_, heartbeat_ns):
                self._heartbeat_ns, self._is_joined = heartbeat_ns, True
                self._beat()
            case messages.Rejected(_, detail):
                self._outbox.quit(f"the router refuses this node: {detail}")
            case messages.Fenced():
                self._reset()
                self._is_joined = False
                self.generation = self._draw()
                self.start()

    def _beat(self) -> None:
        beat = messages.Heartbeat(self.generation, self._status(), self.is_draining)
        self._outbox.send(self._router, beat)
        self._outbox.set_timer(TIMER, self._heartbeat_ns)

    def _draw(self) -> int:
        return self._random.getrandbits(62)
