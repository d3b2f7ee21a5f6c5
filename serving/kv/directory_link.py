"""A line to the metadata node, for a storage tier whose threads wait for its answers.

It says hello now and then, so that a directory that has started anew, and segments that are to be
removed, are heard of while nothing else is asked.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from serving.clock import Clock
from serving.kv import directory_calls as calls
from serving.kv.cluster_key import ClusterKey
from serving.kv.directory_calls import Call, Reply
from serving.kv.store import StoreError
from serving.kv.wire import Loop, connect, encode

_log = logging.getLogger(__name__)

_HELLO_S = 0.5
_OPEN_MAX = 1024
_MATCH_BLOCKS = 4096
"""Blocks of one look-up; the time of the last one adds to that of hashing."""

_decoder = msgspec.msgpack.Decoder(Reply)


class DirectoryLink:
    """Asks the metadata node at `address`, with `timeout_s` for each answer.

    It has the same `key`, if any.

    Set `on_epoch` and `on_doomed` before `start`; they are called on the link's thread and must not
    wait for it.

    Raises:
        zmq.ZMQError: that is no address.
    """

    def __init__(
        self, address: str, clock: Clock, timeout_s: float, key: ClusterKey | None = None
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._context = zmq.Context[zmq.Socket[bytes]]()
        try:
            self._socket = connect(self._context, address, key)
            self._match_socket = connect(self._context, address, key)
        except zmq.ZMQError:
            self._context.term()
            raise
        self._match_lock = threading.Lock()
        self._loop = Loop(clock)
        self._loop.listen(self._socket, self._receive)
        self._loop.every(_HELLO_S, self._say_hello)
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        self._epoch: int | None = None
        self.on_epoch: Callable[[int], None] | None = None
        self.on_doomed: Callable[[list[str]], None] | None = None
        self._thread = threading.Thread(target=self._loop.run, name="kv-directory", daemon=True)

    def start(self) -> None:
        """Begin to carry calls."""
        self._thread.start()
        self._loop.post(self._say_hello)

    def close(self) -> None:
        """Give up all calls."""
        self._loop.stop()
        self._thread.join()
        for future in self._open.values():
            future.cancel()
        self._socket.close()
        with self._match_lock:
            self._match_socket.close()
        self._context.term()

    def ask[R](self, kind: type[R], message: Call) -> R:
        """The answer to a message, from any thread but the link's.

        Raises:
            StoreError: none came in time.
        """
        future: Future[Any] = Future()
        self._loop.post(lambda: self._begin(message, future))
        try:
            answer = future.result(self._timeout_s)
        except TimeoutError:
            raise StoreError(f"{self._address}: the metadata node does not answer") from None
        if not isinstance(answer, kind):
            raise StoreError(f"{self._address}: answered with a {type(answer).__name__}")
        return answer

    def match(self, keys: Iterable[bytes]) -> int:
        """Blocks of the longest stored prefix of a chain that has a state at its end.

        A long chain is looked up part by part while the rest of `keys` is still being made. The
        caller's thread does it over a socket of its own: another thread would have to wait for the
        interpreter while this one hashes.

        Raises:
            StoreError: an answer did not come in time.
        """
        with self._match_lock:
            sizes: dict[int, int] = {}
            for part in itertools.batched(keys, _MATCH_BLOCKS):
                number = next(self._numbers)
                sizes[number] = len(part)
                try:
                    message = encode(calls.Match(number, b"".join(part)))
                    self._match_socket.send(message, zmq.NOBLOCK)
                except zmq.Again:
                    raise StoreError(f"{self._address} takes no more messages") from None
            answers = self._matched(sizes)
        num_blocks = num_before = 0
        for number, size in sizes.items():
            if answers[number].num_blocks:
                num_blocks = num_before + answers[number].num_blocks
            num_before += size
            if answers[number].num_present < size:
                break
        return num_blocks

    def _matched(self, numbers: Collection[int]) -> dict[int, calls.Matched]:
        """The answers to the calls of these numbers; what comes for others is too late."""
        found: dict[int, calls.Matched] = {}
        while len(found) < len(numbers):
            if not self._match_socket.poll(round(1000 * self._timeout_s)):
                raise StoreError(f"{self._address}: the metadata node does not answer")
            reply = _decoder.decode(self._match_socket.recv())
            if isinstance(reply, calls.Matched) and reply.call in numbers:
                found[reply.call] = reply
        return found

    def tell(self, message: Call) -> None:
        """Send what is not answered."""
        self._loop.post(lambda: self._send(message))

    def _begin(self, message: Call, future: "Future[Any]") -> None:
        number = next(self._numbers)
        assert not isinstance(message, calls.Release | calls.Removed), "nobody answers that"
        message.call = number
        self._open[number] = future
        if len(self._open) > _OPEN_MAX:
            del self._open[next(iter(self._open))]
        self._send(message)

    def _send(self, message: Call) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("%s takes no more messages", self._address)

    def _say_hello(self) -> None:
        self._send(calls.Hello(0))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            reply = _decoder.decode(frames[-1])
        except msgspec.MsgspecError as error:
            _log.warning("a message that is none: %s", error)
            return
        future = self._open.pop(reply.call, None)
        if future is not None and not future.done():
            future.set_result(reply)
        if reply.epoch != self._epoch:
            self._epoch = reply.epoch
            if self.on_epoch is not None:
                self.on_epoch(reply.epoch)
        if isinstance(reply, calls.Begun | calls.Welcome) and reply.doomed and self.on_doomed:
            self.on_doomed(reply.doomed)
