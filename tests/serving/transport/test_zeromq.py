"""Goal: messages reach nodes of other processes, in order and again after these were started anew;
what cannot be sent comes back at once; and nobody takes part without the key.

Method: networks in one event loop, which know each other by address alone.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from serving.core.kv_transfer import KVRead
from serving.kv.cluster_key import ClusterKey
from serving.nodes import messages
from serving.nodes.values import HandOffRef, NodeId
from serving.transport.driver import Driver, SystemClock
from serving.transport.shared_frames import SharedFrames
from serving.transport.zeromq import ZeroMQNetwork
from tests.serving.transport.test_driver import Recorder

A, B = NodeId("a", "0"), NodeId("b", "0")
KEY = ClusterKey(b"k" * 32)


class End:
    """A network that keeps what comes."""

    def __init__(
        self,
        address: str,
        key: ClusterKey | None = KEY,
        queue_max: int = 100,
        shared: Path | None = None,
    ) -> None:
        self.got: list[Any] = []
        self.shared = None if shared is None else SharedFrames(shared, SystemClock())
        self.network = ZeroMQNetwork(address, key, self._take, queue_max, self.shared)

    def _take(self, *parcel: Any) -> None:
        self.got.append(parcel)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def abort(number: int) -> messages.Abort:
    return messages.Abort(str(number))


def test_messages_come_in_order_and_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        a, b = End(f"ipc://{tmp_path}/a"), End("tcp://127.0.0.1:0")
        async with a.network, b.network:
            a.network.connect(B, b.network.address)
            for number in range(50):
                assert a.network.send(A, B, abort(number))
            await wait_for(lambda: len(b.got) == 50)
            assert b.got == [(A, B, abort(number)) for number in range(50)]
            # Nobody has told b where a is.
            assert b.network.send(B, A, abort(7))
            await wait_for(lambda: a.got == [(B, A, abort(7))])
            part = KVRead(1, (np.arange(10**6, dtype=np.uint8)[None],), np.zeros((1, 3), np.uint8))
            blocks = messages.Blocks(HandOffRef(A, 1, 2, 3, 4), 0, part)
            assert a.network.send(A, B, blocks)
            await wait_for(lambda: len(b.got) == 51)
            np.testing.assert_array_equal(b.got[50][2].part.groups[0], part.groups[0])

    asyncio.run(run())


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_large_arrays_go_through_shared_memory_on_one_machine(tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    array = np.arange(10**6, dtype=np.uint8)[None]
    blocks = messages.Blocks(HandOffRef(A, 1, 2, 3, 4), 0, KVRead(1, (array,), array[:, :3]))
    to_b = f"ipc://{tmp_path}/b" if scheme == "ipc" else "tcp://127.0.0.1:0"

    async def run() -> None:
        a, b = End(f"ipc://{tmp_path}/a", shared=folder), End(to_b, shared=folder)
        async with a.network, b.network:
            a.network.connect(B, b.network.address)
            for _ in range(2):
                assert a.network.send(A, B, blocks) and a.network.send(A, B, abort(1))
            await wait_for(lambda: len(b.got) == 4)
            assert [type(m) for _, _, m in b.got] == [messages.Blocks, messages.Abort] * 2
            np.testing.assert_array_equal(b.got[2][2].part.groups[0], array)
            assert a.shared is not None and b.shared is not None
            assert a.shared.num_put == b.shared.num_taken == 2 * (scheme == "ipc")
            # One that is gone when it is wanted is a message lost.
            if scheme == "ipc":
                a.network.send(A, B, blocks)
                for path in folder.iterdir():
                    path.unlink()
                await wait_for(lambda: b.network.num_malformed == 1 or len(b.got) == 5)
        assert list(folder.iterdir()) == []

    asyncio.run(run())


def test_one_that_was_started_anew_is_found_again(tmp_path: Path) -> None:
    async def run() -> None:
        a = End(f"ipc://{tmp_path}/a")
        async with a.network:
            for life in range(2):
                b = End(f"ipc://{tmp_path}/b")
                async with b.network:
                    a.network.connect(B, b.network.address)
                    assert a.network.send(A, B, abort(life))
                    await wait_for(lambda b=b, life=life: (A, B, abort(life)) in b.got)

    asyncio.run(run())


def test_what_cannot_be_sent_comes_back_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        sender = Recorder(A, lambda node, message: None)
        a = End(f"ipc://{tmp_path}/a", queue_max=4)
        async with a.network, Driver([sender], {}) as driver:
            driver.remote = a.network
            sender.outbox.send(B, abort(0))
            driver.perform(A)
            assert sender.got == [messages.Undeliverable(B, abort(0))]
            sender.got.clear()
            # Nobody listens there, so a few wait and the others come back.
            sender.outbox.connect(B, f"ipc://{tmp_path}/nobody")
            for number in range(50):
                sender.outbox.send(B, abort(number))
            driver.perform(A)
            assert 40 <= len(sender.got) < 50
            assert sender.got[-1] == messages.Undeliverable(B, abort(49))
            assert a.network.num_undelivered == len(sender.got) + 1

    asyncio.run(run())


@pytest.mark.parametrize("other", [None, ClusterKey(b"x" * 32)])
def test_nobody_takes_part_without_the_key(tmp_path: Path, other: ClusterKey | None) -> None:
    async def run() -> None:
        a, stranger = End(f"ipc://{tmp_path}/a"), End(f"ipc://{tmp_path}/s", other)
        friend = End(f"ipc://{tmp_path}/f")
        async with a.network, stranger.network, friend.network:
            stranger.network.connect(A, a.network.address)
            stranger.network.send(B, A, abort(1))
            friend.network.connect(A, a.network.address)
            friend.network.send(B, A, abort(2))
            await wait_for(lambda: bool(a.got))
            await asyncio.sleep(0.1)
            assert a.got == [(B, A, abort(2))]

    asyncio.run(run())


def test_one_who_knows_only_where_to_listen_is_counted(tmp_path: Path) -> None:
    """Knowing the public key is not enough."""

    async def run() -> None:
        a = End(f"ipc://{tmp_path}/a")
        async with a.network:
            context = zmq.Context()
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = KEY._public
            socket.connect(a.network.address)
            socket.send(b"hello")
            await wait_for(lambda: a.network.num_refused > 0)
            socket.close()
            context.term()
            assert a.got == [] and a.network.num_malformed == 0

    asyncio.run(run())


def test_what_is_no_message_is_counted_and_does_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        a, b = End(f"ipc://{tmp_path}/a", None), End(f"ipc://{tmp_path}/b", None)
        async with a.network, b.network:
            context = zmq.Context()
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(a.network.address)
            for frames in ([b"hello"], [b""], [b"\x96\x01", b"x"]):
                socket.send_multipart(frames)
            await wait_for(lambda: a.network.num_malformed == 3)
            socket.close()
            context.term()
            b.network.connect(A, a.network.address)
            b.network.send(B, A, abort(1))
            await wait_for(lambda: a.got == [(B, A, abort(1))])

    asyncio.run(run())


def test_one_is_reached_by_the_name_that_it_listens_at(tmp_path: Path) -> None:
    async def run() -> None:
        free = End("tcp://localhost:0")
        port = free.network.address.rpartition(":")[2]
        assert int(port) > 0
        async with free.network:
            pass
        a, b = End(f"tcp://localhost:{port}"), End(f"ipc://{tmp_path}/b")
        assert a.network.address == f"tcp://localhost:{port}"
        async with a.network, b.network:
            b.network.connect(A, a.network.address)
            b.network.send(B, A, abort(1))
            await wait_for(lambda: a.got == [(B, A, abort(1))])

    asyncio.run(run())


def test_an_address_that_is_taken_is_an_error() -> None:
    async def run() -> None:
        a = End("tcp://127.0.0.1:0")
        async with a.network:
            with pytest.raises(zmq.ZMQError):
                End(a.network.address)

    asyncio.run(run())
