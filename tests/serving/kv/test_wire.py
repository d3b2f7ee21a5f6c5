"""Goal: messages come out as they went in, and a loop calls what it is asked to, on its own thread.
Method: round trips, and a loop between two sockets.
"""

import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from serving.kv import wire
from serving.transport.driver import SystemClock


@pytest.mark.parametrize(
    "message",
    [
        wire.Fetch(1, b"k" * 32, 1, 0, b"t"),
        wire.Fetched(1, 2, 3, "path", 9, [(1, 2, 3)], (4, 5, 6)),
        wire.Fetched(1, error="why"),
        wire.Reserved(1, 2, "path", 9, [None, (1, 2, 3)]),
        wire.Release(4, [(1, b"k")]),
        wire.Answer(1, {"a": 1}),
    ],
)
def test_messages_come_out_as_they_went_in(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_nonsense_is_refused() -> None:
    for frame in (b"", b"x", wire.encode(wire.Commit(1))[:-1]):
        with pytest.raises(msgspec.MsgspecError):
            wire.decode(frame)


def test_a_loop_receives_ticks_and_runs_what_is_posted(tmp_path: Path) -> None:
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind(f"ipc://{tmp_path}/s")
    sender.connect(f"ipc://{tmp_path}/s")
    loop = wire.Loop(SystemClock())
    frames: list[list[bytes]] = []
    threads: set[str] = set()
    done = threading.Semaphore(0)

    def receive(some: list[bytes]) -> None:
        frames.append(some)
        threads.add(threading.current_thread().name)
        done.release()

    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            done.release()

    loop.listen(receiver, receive)
    loop.every(0.001, tick)
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    for number in range(200):
        sender.send(bytes([number]))
    loop.post(lambda: receive([b"posted"]))
    for _ in range(202):
        assert done.acquire(timeout=20)
    loop.stop()
    thread.join(20)
    assert threads == {"loop"} and [b"posted"] in frames
    assert [f for f in frames if f != [b"posted"]] == [[bytes([n])] for n in range(200)]
    # Nobody is there to run it; that is no error.
    loop.post(lambda: None)
    for socket in (receiver, sender):
        socket.close(linger=0)
    context.term()
