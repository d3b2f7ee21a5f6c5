"""Messages between nodes of one process: by reference, in order, one at a time."""

from collections import deque
from collections.abc import Callable

from serving.nodes.messages import Message
from serving.nodes.node import NodeId

Deliver = Callable[[NodeId, NodeId, Message], None]
"""Called as (source, destination, message)."""


class InProcessNetwork:
    """Queues messages and hands them to `deliver` in the order in which they were sent.

    A message sent while another is being delivered waits its turn, so that a node is never
    entered twice at once however long the chain of answers grows. Everything happens on the
    caller's thread.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._queue: deque[tuple[NodeId, NodeId, Message]] = deque()
        self._is_delivering = False

    def send(self, source: NodeId, destination: NodeId, message: Message) -> None:
        """Delivers the message before returning, unless a delivery is already under way."""
        self._queue.append((source, destination, message))
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue:
                self._deliver(*self._queue.popleft())
        finally:
            self._is_delivering = False
