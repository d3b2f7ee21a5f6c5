"""Which nodes there are and where, as they tell the metadata node themselves.

    node -> Here, again and again -> There: everybody that has been heard of

Nobody keeps this on a disk: a metadata node that was started anew knows nobody for a second, and
whoever had heard of somebody goes on with that.
"""

from collections.abc import Hashable, Sequence

import msgspec
import zmq

from serving.clock import NS_PER_S, Clock, ns_of_s, s_of_ns
from serving.kv import wire
from serving.kv.cluster_key import ClusterKey

_FORGET_S = 60.0
"""A node that has said nothing for so long is no longer spoken of."""

Numbers = dict[str, float | int]


class Here(msgspec.Struct, tag=True):
    """There is a node, which holds and has done so much; answered with `There`."""

    call: int
    role: str
    name: str
    address: str
    pid: int
    numbers: Numbers = {}


class Found(msgspec.Struct, frozen=True):
    """A node that the metadata node has heard of, for the last time `silent_s` ago."""

    role: str
    name: str
    address: str
    pid: int
    silent_s: float
    numbers: Numbers = {}


class There(msgspec.Struct, tag=True):
    """All nodes that have been heard of, the one that asks and the metadata node among them."""

    call: int
    nodes: list[Found]


_replies = msgspec.msgpack.Decoder(There)


class Whereabouts:
    """The service of the metadata node; `own` is how it speaks of itself."""

    def __init__(self, own: Here, clock: Clock) -> None:
        self._own = own
        self._clock = clock
        self._heard: dict[tuple[str, str], tuple[Here, int]] = {}
        self._replies: list[tuple[Hashable, msgspec.Struct]] = []

    def on_message(self, source: Hashable, message: Here) -> None:
        """A node says that it is there."""
        now_ns = self._clock.now_ns()
        self._heard[message.role, message.name] = message, now_ns
        known = [(self._own, now_ns), *self._heard.values()]
        nodes = [
            Found(h.role, h.name, h.address, h.pid, s_of_ns(now_ns - seen_ns), h.numbers)
            for h, seen_ns in known
        ]
        self._replies.append((source, There(message.call, nodes)))

    def on_tick(self) -> None:
        """Forget those that have been silent for long."""
        since_ns = self._clock.now_ns() - ns_of_s(_FORGET_S)
        for node, (_, seen_ns) in list(self._heard.items()):
            if seen_ns < since_ns:
                del self._heard[node]

    def take_replies(self) -> Sequence[tuple[Hashable, msgspec.Struct]]:
        """Answers since the last call."""
        replies, self._replies = self._replies, []
        return replies


class Announcer:
    """One node's line to the metadata node at `address`; `here` is what it says of itself.

    Call `beat` every `every_s` or so, and `close` at the end.

    Raises:
        zmq.ZMQError: the address is none.
    """

    every_s = 1.0

    def __init__(self, address: str, here: Here, key: ClusterKey | None, clock: Clock) -> None:
        self._here = here
        self._clock = clock
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._found: list[Found] = []
        self._heard_ns = 0
        try:
            self._socket = wire.connect(self._context, address, key)
        except zmq.ZMQError:
            self._context.term()
            raise

    def beat(self, numbers: Numbers | None = None) -> list[Found]:
        """Say that the node is there; waits for nobody. The others, as of the last answer."""
        while self._socket.poll(0):
            self._found = _replies.decode(self._socket.recv()).nodes
            self._heard_ns = self._clock.now_ns()
        self._here.call += 1
        self._here.numbers = numbers or {}
        # Answers that nobody waits for need not be asked for.
        if self._socket.poll(0, zmq.POLLOUT):
            self._socket.send(wire.encode(self._here), zmq.NOBLOCK)
        return self._found

    def found(self) -> list[Found]:
        """The others, with how long ago they were last heard of by now."""
        since_s = (self._clock.now_ns() - self._heard_ns) / NS_PER_S
        return [
            msgspec.structs.replace(node, silent_s=round(node.silent_s + since_s, 3))
            for node in self._found
        ]

    def close(self) -> None:
        """Say nothing more."""
        self._socket.close()
        self._context.term()
