"""Messages between nodes of different processes, over ZeroMQ.

Every process listens at one address and has one outgoing line to each other process that it sends
to. A message tells where its sender listens, so whoever was spoken to can answer. Lines are made
anew by ZeroMQ when they break. What waits on a line is bounded: what is more comes back to the
sender as `Undeliverable`, at once, as does a message to a node that nobody knows.

Nothing is promised beyond that: a message may be lost with the process that it went to, so whoever
waits for an answer has a timer.
"""

import asyncio
import contextlib
import logging
import socket
import urllib.parse
from typing import Any

import zmq
import zmq.asyncio

from serving.kv.cluster_key import ClusterKey, Doorkeeper
from serving.nodes.messages import Message
from serving.nodes.node import NodeId
from serving.transport.codec import Codec, Parcel, WireError
from serving.transport.in_process import Deliver
from serving.transport.shared_frames import SharedFrames

_log = logging.getLogger(__name__)

QUEUE_MAX = 1000
"""Messages that may wait for one other process, on either side."""

_MESSAGE_BYTES_MAX = 1 << 31
_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 1000


def _numeric(address: str) -> str:
    """An address to listen at: sockets listen at numbers, and are reached by names."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname:
        return address
    try:
        found = socket.getaddrinfo(parts.hostname, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return address  # Refused by whoever binds it.
    return f"tcp://{found[0][4][0]}:{parts.netloc.rpartition(':')[2]}"


class ZeroMQNetwork:
    """The way from this process to others, on the current event loop.

    Args:
        address: where to listen and to be reached, such as `ipc:///path`, `tcp://name:7000` or
            `tcp://127.0.0.1:0`; `address` holds the port that was found.
        key: what the others must have, too; None listens to everybody.
        deliver: called with (source, destination, message) for what comes in.
        shared: the way of large frames to processes of the same machine, which are those with
            `ipc://` addresses; None sends all of them over sockets.

    Use as an async context manager.

    Raises:
        zmq.ZMQError: it cannot listen there.

    Attributes:
        num_malformed: frames that came in and were no message.
        num_undelivered: messages that could not be sent.
    """

    def __init__(
        self,
        address: str,
        key: ClusterKey | None,
        deliver: Deliver,
        queue_max: int = QUEUE_MAX,
        shared: SharedFrames | None = None,
    ) -> None:
        self.num_malformed = self.num_undelivered = 0
        self._key = key
        self._deliver = deliver
        self._queue_max = queue_max
        self._shared = shared
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        # Lines are written to without waiting, which needs no event loop.
        self._lines_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._doorkeeper = None if key is None else Doorkeeper(self._lines_context, key)
        self._socket = self._context.socket(zmq.ROUTER)
        self._lines: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[NodeId, str] = {}
        self._receiving: asyncio.Task[None] | None = None
        try:
            self._prepare(self._socket)
            if key is not None:
                key.listen(self._socket)
            self._socket.bind(_numeric(address))
        except zmq.ZMQError:
            self.close()
            raise
        is_found = address.startswith("tcp://") and address.endswith((":0", ":*"))
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT) if is_found else address

    async def __aenter__(self) -> "ZeroMQNetwork":
        self._receiving = asyncio.get_running_loop().create_task(self._receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._receiving is not None
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiving
        self.close()

    @property
    def num_refused(self) -> int:
        """Processes that tried to connect without the key."""
        return 0 if self._doorkeeper is None else self._doorkeeper.num_refused

    def close(self) -> None:
        """Give up what waits, and let go of all sockets."""
        self._socket.close(linger=0)
        for line in self._lines.values():
            line.close(linger=0)
        self._lines.clear()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._shared is not None:
            self._shared.close()
        self._context.term()

    def connect(self, node_id: NodeId, address: str) -> None:
        """From now on a node is reached at `address`."""
        old = self._addresses.get(node_id)
        self._addresses[node_id] = address
        if old is not None and old not in self._addresses.values() and old in self._lines:
            # Nobody is there any more: what waits for it is given up.
            self._lines.pop(old).close(linger=0)

    def send(self, source: NodeId, destination: NodeId, message: Message) -> bool:
        """Sends without waiting; False if the node is unknown or too much waits for it.

        Raises:
            WireError: the message is none that crosses.
        """
        address = self._addresses.get(destination)
        if address is not None:
            frames = self._codec.encode(Parcel(source, self.address, destination, message))
            if self._shared is not None and address.startswith("ipc://"):
                frames = self._shared.put(frames)
            # Frames may be views of arrays that nobody writes to.
            with contextlib.suppress(zmq.Again):
                self._line(address).send_multipart(frames, zmq.NOBLOCK, copy=False)
                return True
        self.num_undelivered += 1
        return False

    def _line(self, address: str) -> "zmq.Socket[bytes]":
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = self._lines_context.socket(zmq.DEALER)
            self._prepare(line)
            if self._key is not None:
                self._key.connect(line)
            line.connect(address)
        return line

    def _prepare(self, made: "zmq.Socket[Any]") -> None:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, self._queue_max)
        made.setsockopt(zmq.RCVHWM, self._queue_max)
        made.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        made.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                # The first frame is the line that it came on.
                buffers = [frame.buffer for frame in frames[1:]]
                taken = buffers if self._shared is None else self._shared.take(buffers)
                parcel = self._codec.decode(taken)
            except WireError as error:
                self.num_malformed += 1
                _log.warning("a message that is none: %s", error)
                continue
            self.connect(parcel.source, parcel.address)
            self._deliver(parcel.source, parcel.destination, parcel.message)
