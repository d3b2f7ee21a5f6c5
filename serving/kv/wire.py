"""Messages between the processes of the KV tiers, and the loop that carries them.

A message is one msgpack frame under a tag; large bytes follow it as a frame of their own. A `Loop`
belongs to one thread: it waits for sockets, runs what other threads post, and ticks.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from serving.clock import NS_PER_S, Clock
from serving.kv.cluster_key import ClusterKey

Span = tuple[int, int, int]
"""Offset, size and generation of a place in shared memory."""


class Fetch(msgspec.Struct, tag=True):
    """Worker to cache: pin the longest stored prefix. `keys` are 16 bytes each, in order.

    With `has_state` it ends where a state is stored, which is pinned too. `request` names what it
    is for, so that a request that is tried again is counted once.
    """

    call: int
    keys: bytes
    first: int
    num_usable: int
    tenant: bytes
    has_state: bool = True
    request: str = ""


class Fetched(msgspec.Struct, tag=True):
    """Cache to worker: the places of blocks `first` to `num_blocks - 1` and of the state.

    `num_blocks` 0 is a miss, with `error` if it is a fault. Places are pinned under `lease`.
    """

    call: int
    num_blocks: int = 0
    lease: int = 0
    arena: str = ""
    arena_size: int = 0
    blocks: list[Span] = []
    state: Span | None = None
    error: str | None = None


class Release(msgspec.Struct, tag=True):
    """Worker to cache: what `lease` pins has been copied; `corrupt` was damaged."""

    lease: int
    corrupt: list[tuple[int, bytes]] = []


class Offer(msgspec.Struct, tag=True):
    """Worker to cache: blocks with these keys, and the state at their end, could be stored."""

    call: int
    keys: bytes


class Wanted(msgspec.Struct, tag=True):
    """Cache to worker: which blocks of the offer, by index, and whether the state."""

    call: int
    blocks: list[int]
    has_state: bool


class Reserve(msgspec.Struct, tag=True):
    """Worker to cache: room for payloads of (kind, key, size) of a tenant."""

    call: int
    items: list[tuple[int, bytes, int]]
    tenant: bytes


class Reserved(msgspec.Struct, tag=True):
    """Cache to worker: a place, or None, for each item. Nothing is kept before `Commit`."""

    call: int
    write: int
    arena: str
    arena_size: int
    places: list[Span | None]


class Commit(msgspec.Struct, tag=True):
    """Worker to cache: the places of `write` are filled."""

    write: int


class Ask(msgspec.Struct, tag=True):
    """Anybody to any node: `stats`, `flush`, `purge`, `verify`, `repair`, `drain`, `rejoin`,
    `pin`, `unpin`, `warm` or `stop`.

    `tenant` limits a purge; `keys` name a prefix to be pinned or warmed; `node` names the storage
    node that is to give away what it holds, or to take again.
    """

    call: int
    what: str
    tenant: bytes | None = None
    keys: bytes = b""
    node: str = ""


class Answer(msgspec.Struct, tag=True):
    """The answer to `Ask`: numbers under names, or `error`."""

    call: int
    numbers: dict[str, float | int] = {}
    error: str | None = None


Message = Fetch | Fetched | Release | Offer | Wanted | Reserve | Reserved | Commit | Ask | Answer

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message as one frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: it is none of the known ones.
    """
    return _decoder.decode(frame)


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, key: ClusterKey | None = None
) -> "zmq.Socket[bytes]":
    """A socket that asks one other at `address`, who must have the same key.

    Raises:
        zmq.ZMQError: the address is none.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    # What the other side does not take is refused rather than kept: whoever waits goes on.
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if key is not None:
        key.connect(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def bind(
    address: str, key: ClusterKey | None = None
) -> "tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]":
    """A socket that answers many others at `address`, in a context of its own.

    With a key it answers nobody else: who connects has to know the public half, too, and that
    never leaves those who have the secret.

    Raises:
        zmq.ZMQError: it cannot listen there.
    """
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None:
        key.listen(socket)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        context.term()
        raise
    return context, socket


@dataclass(slots=True)
class _Tick:
    every_ns: int
    call: Callable[[], None]
    due_ns: int = 0


class Loop:
    """Waits for messages on the thread that calls `run`; `post` and `stop` are for any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._poller = zmq.Poller()
        self._receive: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {}
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ticks: list[_Tick] = []
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        self._wake_write: int | None = wake_write
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._is_running = True
        self._wake_lock = threading.Lock()

    def listen(self, socket: "zmq.Socket[bytes]", receive: Callable[[list[bytes]], None]) -> None:
        """Call `receive` with the frames of every message; on the loop's thread, or before it."""
        self._receive[socket] = receive
        self._poller.register(socket, zmq.POLLIN)

    def ignore(self, socket: "zmq.Socket[bytes]") -> None:
        """Listen no longer to a socket."""
        del self._receive[socket]
        self._poller.unregister(socket)

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something again and again, about so many seconds apart."""
        every_ns = round(seconds * NS_PER_S)
        self._ticks.append(_Tick(every_ns, call, self._clock.now_ns() + every_ns))

    def post(self, call: Callable[[], None]) -> None:
        """Have something called on the loop's thread."""
        self._posted.put(call)
        # Locked, since a number that was closed may be another file's by now.
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self._wake_write is not None:
                os.write(self._wake_write, b"x")

    def stop(self) -> None:
        """Let `run` return."""

        def stop() -> None:
            self._is_running = False

        self.post(stop)

    def run(self) -> None:
        """Wait and call until `stop`."""
        while self._is_running:
            self.turn()
        with self._wake_lock:
            os.close(self._wake_read)
            assert self._wake_write is not None, "a loop runs once"
            os.close(self._wake_write)
            self._wake_write = None

    def turn(self) -> None:
        """Wait once, at most until the next tick, and call what is due."""
        now_ns = self._clock.now_ns()
        due_ns = min((tick.due_ns for tick in self._ticks), default=now_ns + NS_PER_S)
        events = dict(self._poller.poll(max(0, (due_ns - now_ns) // 1_000_000 + 1)))
        for socket, receive in list(self._receive.items()):
            # A few of each, so that none keeps the others waiting.
            for _ in range(64):
                if socket not in events:
                    break
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                receive(frames)
        if self._wake_read in events:
            os.read(self._wake_read, 4096)
        while not self._posted.empty():
            self._posted.get()()
        now_ns = self._clock.now_ns()
        for tick in self._ticks:
            if now_ns >= tick.due_ns:
                tick.due_ns = now_ns + tick.every_ns
                tick.call()
