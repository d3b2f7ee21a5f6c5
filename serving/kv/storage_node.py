"""A storage node: keeps fragments in its directory and tells others which.

One thread answers; disk work is done on others. Writes, drops and checks are done one after another
in the order in which they came, reads beside them. Every change has a number, and whoever asks is
told the changes since the last time, so that all of them know what there is without anybody keeping
it for them. Numbers begin anew with every life of the node, which `epoch` tells.
"""

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from serving.clock import Clock
from serving.kv import storage_wire, wire
from serving.kv.change_log import ChangeLog
from serving.kv.cluster_key import ClusterKey
from serving.kv.fragment_directory import FragmentDirectory, Held
from serving.kv.fragments import CorruptFragmentError

_log = logging.getLogger(__name__)

_READ_THREADS = 2
_LISTED_MAX = 200
"""Fragments in one listing."""


class StorageNode:
    """Serves fragments on a socket.

    Args:
        address: where to listen.
        directory: what it keeps, closed at the end.
        key: what others must have; None listens to everybody.
        random_source: of the number of this life.

    Raises:
        zmq.ZMQError: it cannot listen there.
        OSError: the directory cannot be read.
    """

    def __init__(
        self,
        name: str,
        address: str,
        directory: FragmentDirectory,
        key: ClusterKey | None,
        clock: Clock,
        random_source: random.Random,
    ) -> None:
        self.name = name
        self._directory = directory
        self._held = ChangeLog[Held]()
        for stripe, held in directory.load().items():
            self._held.add(stripe, held)
        # The last thing that can fail.
        self._context, self._socket = wire.bind(address, key)
        self._loop = wire.Loop(clock)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.listen(self._socket, self._receive)
        self._readers = ThreadPoolExecutor(_READ_THREADS, "fragment-read")
        self._writer = ThreadPoolExecutor(1, "fragment-write")
        self._epoch = random_source.getrandbits(62) | 1
        names = ("written", "read", "bytes_read", "corrupt", "failed")
        self._counts: dict[str, float | int] = dict.fromkeys(names, 0)
        self._nodes = {**directory.nodes(), name: address}

    def run(self) -> None:
        """Serve until asked to stop."""
        self._loop.run()
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._socket.close()
        self._context.term()
        self._directory.close()

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something called again and again on the thread of `run`; before that."""
        self._loop.every(seconds, call)

    def stop(self) -> None:
        """Let `run` return; from any thread."""
        self._loop.stop()

    def meet(self, name: str, address: str) -> None:
        """Tell those who ask, from now on, that there is a node called `name`."""
        if self._nodes.get(name) == address:
            return
        self._nodes[name] = address
        try:
            self._directory.remember_nodes(self._nodes)
        except OSError as error:
            _log.warning("node %s is not remembered: %s", name, error)

    def numbers(self) -> dict[str, float | int]:
        """What it holds now and has done since its start, under names."""
        return {
            "fragments": len(self._held),
            "bytes": sum(held.size for held in self._held.items()),
            "is_leaving": int(self._directory.is_leaving),
            "nodes": len(self._nodes),
            **self._counts,
        }

    def _receive(self, frames: list[bytes]) -> None:
        client, frame, *data = frames
        try:
            message = storage_wire.decode_request(frame)
        except msgspec.MsgspecError as error:
            _log.warning("a message that is none: %s", error)
            return
        match message:
            case storage_wire.Put():
                self._on_put(client, message, data)
            case storage_wire.Get():
                self._on_get(client, message)
            case storage_wire.Copy():
                self._on_copy(client, message)
            case storage_wire.Drop():
                self._on_drop(client, message)
            case storage_wire.Check():
                self._on_check(client, message)
            case storage_wire.Leave():
                self._on_leave(client, message)
            case storage_wire.Meet():
                self.meet(message.name, message.address)
                self._answer(client, message.call)
            case storage_wire.List():
                self._on_list(client, message)
            case wire.Ask():
                self._on_ask(client, message)

    def _send(self, client: bytes, message: msgspec.Struct, *data: bytes) -> None:
        self._socket.send_multipart([client, wire.encode(message), *data], copy=False)

    def _answer(self, client: bytes, call: int, error: str | None = None, **counts: int) -> None:
        self._send(client, wire.Answer(call, dict(counts.items()), error))

    def _in_order[T](self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do disk work after all that was to be done before, and go on with its result."""

        def job() -> None:
            result = work()
            self._loop.post(lambda: then(result))

        self._writer.submit(job)

    # --- writing and removing ---

    def _on_put(self, client: bytes, message: storage_wire.Put, data: Sequence[bytes]) -> None:
        def work() -> Held | str:
            try:
                return self._directory.write(data)
            except CorruptFragmentError as error:
                return f"no fragment came: {error}"
            except OSError as error:
                return f"cannot be written: {error.strerror or error}"

        def then(result: Held | str) -> None:
            if isinstance(result, str):
                self._counts["failed"] += 1
                self._answer(client, message.call, result)
                return
            self._counts["written"] += 1
            self._held.add(result.head.stripe, result)
            self._answer(client, message.call)

        if not data:
            self._answer(client, message.call, "no fragment came: no bytes")
        else:
            self._in_order(work, then)

    def _on_drop(self, client: bytes, message: storage_wire.Drop) -> None:
        def work() -> list[str]:
            gone: list[str] = []
            for stripe in message.stripes:
                try:
                    self._directory.remove(stripe)
                    gone.append(stripe)
                except OSError as error:
                    _log.warning("fragment of %s cannot be removed: %s", stripe, error)
            return gone

        def then(gone: list[str]) -> None:
            num_left = len(message.stripes) - len(gone)
            for stripe in gone:
                self._held.remove(stripe)
            error = f"{num_left} fragments cannot be removed" if num_left else None
            self._answer(client, message.call, error, dropped=len(gone))

        self._in_order(work, then)

    def _on_check(self, client: bytes, message: storage_wire.Check) -> None:
        chosen = list(self._held) if message.stripes is None else message.stripes
        looked_at = [held for stripe in chosen if (held := self._held.get(stripe)) is not None]

        def work() -> list[str]:
            return [held.head.stripe for held in looked_at if not self._directory.is_good(held)]

        def then(damaged: list[str]) -> None:
            self._counts["corrupt"] += len(damaged)
            for stripe in damaged:
                self._held.remove(stripe)
            self._answer(client, message.call, corrupt=len(damaged))
            if damaged:
                self._in_order(lambda: self._remove_files(damaged), lambda _: None)

        self._in_order(work, then)

    def _remove_files(self, stripes: Sequence[str]) -> None:
        for stripe in stripes:
            try:
                self._directory.remove(stripe)
            except OSError as error:
                _log.warning("damaged fragment of %s cannot be removed: %s", stripe, error)

    def _on_leave(self, client: bytes, message: storage_wire.Leave) -> None:
        try:
            self._directory.mark_leaving(message.is_leaving)
        except OSError as error:
            self._answer(client, message.call, f"cannot be remembered: {error.strerror}")
            return
        self._answer(client, message.call, fragments=len(self._held))

    # --- reading ---

    def _on_get(self, client: bytes, message: storage_wire.Get) -> None:
        wanted = [
            (held, numbers)
            for stripe, numbers in message.wanted
            if (held := self._held.get(stripe)) is not None
        ]

        def read() -> None:
            found: list[tuple[str, int, list[int], list[bytes]]] = []
            data: list[bytes] = []
            num_failed = 0
            for held, numbers in wanted:
                head = held.head
                try:
                    data.append(self._directory.read(held, numbers))
                except (OSError, IndexError) as error:
                    num_failed += 1
                    _log.warning("fragment of %s cannot be read: %s", head.stripe, error)
                    continue
                sizes = [head.piece_sizes[number] for number in numbers]
                checksums = [head.checksums[number] for number in numbers]
                found.append((head.stripe, head.fragment, sizes, checksums))

            def reply() -> None:
                self._counts["failed"] += num_failed
                self._counts["read"] += len(found)
                self._counts["bytes_read"] += sum(map(len, data))
                self._send(client, storage_wire.Pieces(message.call, found), *data)

            self._loop.post(reply)

        self._readers.submit(read)

    def _on_copy(self, client: bytes, message: storage_wire.Copy) -> None:
        found = self._held.get(message.stripe)

        def read() -> None:
            data: tuple[bytes, ...] = ()
            if found is not None:
                try:
                    data = self._directory.read_whole(found)
                except OSError as error:
                    _log.warning("fragment of %s cannot be read: %s", message.stripe, error)
            self._loop.post(lambda: self._send(client, storage_wire.Whole(message.call), *data))

        self._readers.submit(read)

    def _on_list(self, client: bytes, message: storage_wire.List) -> None:
        since = message.since if message.epoch == self._epoch else 0
        changes = self._held.since(since, _LISTED_MAX)
        held = [
            (stripe, one.head.fragment, one.size, list(one.head.rows))
            for stripe, one in changes.held
        ]
        listing = storage_wire.Listing(
            message.call,
            self._epoch,
            changes.upto,
            changes.has_more,
            changes.is_anew,
            self._directory.is_leaving,
            held,
            changes.gone,
            self._nodes,
        )
        self._send(client, listing)

    def _on_ask(self, client: bytes, message: wire.Ask) -> None:
        match message.what:
            case "stats":
                self._send(client, wire.Answer(message.call, self.numbers()))
            case "stop":
                self._answer(client, message.call)
                self.stop()
            case _:
                error = f"{message.what!r} is not known to a storage node; expected stats, stop"
                self._answer(client, message.call, error)
