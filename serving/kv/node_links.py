"""A cache process's lines to storage nodes, and what it hears of them.

One thread carries everything. A call to a node that has been silent for a while fails at once; one
that is not answered in time fails then, and its answer is dropped when it comes. Each node is asked
again and again what has changed there, which also tells that it lives.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from serving.clock import Clock, ns_of_s
from serving.kv import storage_wire, wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.store import Buffer

_log = logging.getLogger(__name__)

_TICK_S = 0.05

Answered = Callable[[storage_wire.Reply | None, Sequence[bytes]], None]
"""Called with a node's answer and what follows it, or with None; on the thread of the lines."""

Heard = Callable[[str, storage_wire.Listing], None]
"""Called with the name of a node and what has changed there."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """When a node counts as what.

    Attributes:
        every_s: time between two questions about changes.
        silent_s: a node that has not answered for so long is asked nothing else.
    """

    every_s: float = 0.25
    silent_s: float = 3.0


@dataclass(slots=True)
class _Line:
    socket: "zmq.Socket[bytes]"
    heard_ns: int | None
    started_ns: int
    epoch: int = 0
    since: int = 0
    is_asked: bool = False
    asked_ns: int = 0


@dataclass(slots=True)
class _Call:
    node: str
    answered: Answered
    deadline_ns: int


class NodeLinks:
    """Lines to nodes. Start them with `start`, end them with `close`.

    Args:
        nodes: name -> address; more of them are learnt from these.
        key: what the nodes have, too; None if they listen to everybody.
        heard: called with all that a node tells of itself.

    Raises:
        zmq.ZMQError: an address is none.
    """

    def __init__(
        self,
        nodes: Mapping[str, str],
        key: ClusterKey | None,
        clock: Clock,
        heard: Heard,
        times: LinkTimes | None = None,
    ) -> None:
        self._key = key
        self._clock = clock
        self._heard = heard
        self._times = times or LinkTimes()
        self._loop = wire.Loop(clock)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._lines: dict[str, _Line] = {}
        try:
            for name, address in nodes.items():
                self._connect(name, address)
        except zmq.ZMQError:
            self._close_lines()
            raise
        self._loop.every(_TICK_S, self._tick)
        self._thread = threading.Thread(target=self._loop.run, name="kv-nodes", daemon=True)

    def start(self) -> None:
        """Begin to carry calls."""
        self._thread.start()

    def close(self) -> None:
        """Give up all calls."""
        self._loop.stop()
        self._thread.join()
        self._close_lines()
        for call in self._calls.values():
            call.answered(None, ())

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes that are known."""
        return frozenset(self._lines)

    def present(self) -> frozenset[str]:
        """The nodes that have answered lately."""
        since_ns = self._clock.now_ns() - ns_of_s(self._times.silent_s)
        lines = list(self._lines.items())
        return frozenset(
            name for name, line in lines if line.heard_ns is not None and line.heard_ns > since_ns
        )

    def lost(self, after_s: float) -> frozenset[str]:
        """The nodes that have not answered for so long, or never since the line was made."""
        since_ns = self._clock.now_ns() - ns_of_s(after_s)
        lines = list(self._lines.items())
        return frozenset(
            name for name, line in lines if (line.heard_ns or line.started_ns) <= since_ns
        )

    def call(
        self,
        node: str,
        message: storage_wire.Request,
        data: Sequence[Buffer],
        answered: Answered,
        timeout_s: float,
    ) -> None:
        """Send a message and bytes; `message.call` is set here. From any thread."""
        deadline_ns = self._clock.now_ns() + ns_of_s(timeout_s)
        self._loop.post(
            lambda: self._begin(node, message, data, _Call(node, answered, deadline_ns))
        )

    def _close_lines(self) -> None:
        for line in self._lines.values():
            line.socket.close()
        self._context.term()

    def _begin(
        self, node: str, message: storage_wire.Request, data: Sequence[Buffer], call: _Call
    ) -> None:
        if node not in self.present():
            call.answered(None, ())
            return
        self._send(node, message, data, call)

    def _send(
        self, node: str, message: storage_wire.Request, data: Sequence[Buffer], call: _Call
    ) -> None:
        message.call = next(self._numbers)
        self._calls[message.call] = call
        frames = [wire.encode(message), *data]
        try:
            self._lines[node].socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            del self._calls[message.call]
            call.answered(None, ())

    def _connect(self, name: str, address: str) -> None:
        socket = wire.connect(self._context, address, self._key)
        self._lines[name] = _Line(socket, None, self._clock.now_ns())
        self._loop.listen(socket, self._receive)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = storage_wire.decode_reply(frames[0])
        except msgspec.MsgspecError as error:
            _log.warning("a message that is none: %s", error)
            return
        call = self._calls.pop(message.call, None)
        if call is not None:
            self._lines[call.node].heard_ns = self._clock.now_ns()
            call.answered(message, frames[1:])

    def _tick(self) -> None:
        now_ns = self._clock.now_ns()
        for number, call in list(self._calls.items()):
            if now_ns >= call.deadline_ns:
                del self._calls[number]
                call.answered(None, ())
        for name, line in list(self._lines.items()):
            if not line.is_asked and now_ns - line.asked_ns >= ns_of_s(self._times.every_s):
                self._ask(name, line)

    def _ask(self, name: str, line: _Line) -> None:
        """Ask a node what has changed."""
        now_ns = self._clock.now_ns()
        line.is_asked, line.asked_ns = True, now_ns

        def answered(reply: storage_wire.Reply | None, _: Sequence[bytes]) -> None:
            line.is_asked = False
            if not isinstance(reply, storage_wire.Listing):
                return
            line.epoch, line.since = reply.epoch, reply.upto
            self._heard(name, reply)
            for other, address in reply.nodes.items():
                if other not in self._lines:
                    self._meet(other, address)
            if reply.has_more:
                self._ask(name, line)

        question = storage_wire.List(0, line.epoch, line.since)
        deadline_ns = now_ns + ns_of_s(self._times.silent_s)
        self._send(name, question, (), _Call(name, answered, deadline_ns))

    def _meet(self, name: str, address: str) -> None:
        try:
            self._connect(name, address)
        except zmq.ZMQError as error:
            _log.warning("node %s at %s: %s", name, address, error)
