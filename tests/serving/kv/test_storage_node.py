"""Goal: a storage node answers what it is asked, in order, and only those who have the key.

Method: a node on a thread, and plain sockets.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from serving.kv import storage_wire, wire
from serving.kv.cluster_key import ClusterKey
from tests.serving.kv.storage_parts import make_read_only, running_nodes, small_disk
from tests.serving.kv.test_fragment_directory import STRIPE, fragment

KEY = ClusterKey(b"a secret of the cluster")


class Client:
    """Asks a node and waits for the answer."""

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.socket = wire.connect(self.context, address, key)

    def send(self, message: storage_wire.Request, *data: bytes) -> None:
        self.socket.send_multipart([wire.encode(message), *data])

    def answer(self, timeout_ms: int = 20_000) -> Any:
        if not self.socket.poll(timeout_ms):
            return None
        frame, *self.data = self.socket.recv_multipart()
        return storage_wire.decode_reply(frame)

    def ask(self, message: storage_wire.Request, *data: bytes) -> Any:
        self.send(message, *data)
        return self.answer()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@contextmanager
def client(address: str, key: ClusterKey | None = None) -> Iterator[Client]:
    with closing(Client(address, key)) as made:
        yield made


def test_a_fragment_is_kept_found_and_removed(tmp_path: Path) -> None:
    data = fragment()
    with running_nodes(tmp_path, 1) as nodes, client(nodes.addresses["n00"]) as asked:
        assert asked.ask(storage_wire.Put(1, STRIPE), *data) == wire.Answer(1)
        pieces = asked.ask(storage_wire.Get(2, [(STRIPE, [0, 2]), ("ff" * 16, [0])]))
        ((stripe, number, sizes, checksums),) = pieces.found
        assert (stripe, number, sizes) == (STRIPE, 2, [len(data[1]), len(data[3])])
        assert asked.data == [data[1] + data[3]] and len(set(checksums)) == 2
        assert asked.ask(storage_wire.Get(2, [(STRIPE, [0, 99])])).found == []
        assert asked.ask(storage_wire.Copy(3, STRIPE)) == storage_wire.Whole(3)
        assert asked.data == [data[0], b"".join(data[1:])]
        listing = asked.ask(storage_wire.List(4, 0, 0))
        ((stripe, number, size, rows),) = listing.held
        assert (stripe, number, size, len(rows)) == (STRIPE, 2, sum(map(len, data)), 5)
        assert listing.is_anew and listing.nodes == {"n00": nodes.addresses["n00"]}
        # Nothing new since.
        same = asked.ask(storage_wire.List(4, listing.epoch, listing.upto))
        assert same.held == [] and not same.is_anew
        assert asked.ask(storage_wire.Drop(5, [STRIPE])).numbers == {"dropped": 1}
        assert asked.ask(storage_wire.List(4, listing.epoch, listing.upto)).dropped == [STRIPE]
        assert asked.ask(storage_wire.Copy(3, STRIPE)) and asked.data == []
        assert nodes.files("n00") == []
        numbers = asked.ask(wire.Ask(6, "stats")).numbers
        assert numbers["fragments"] == 0 and numbers["written"] == 1


def test_a_drop_behind_a_write_leaves_nothing(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes, client(nodes.addresses["n00"]) as asked:
        asked.send(storage_wire.Put(1, STRIPE), *fragment())
        asked.send(storage_wire.Drop(2, [STRIPE]))
        assert {asked.answer().call, asked.answer().call} == {1, 2}
        assert asked.ask(storage_wire.List(3, 0, 0)).held == [] and nodes.files("n00") == []


def test_damage_is_found_and_removed(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes, client(nodes.addresses["n00"]) as asked:
        for stripe in (STRIPE, "cd" * 16):
            asked.ask(storage_wire.Put(1, stripe), *fragment(stripe))
        assert asked.ask(storage_wire.Check(2)).numbers == {"corrupt": 0}
        path = nodes.files("n00")[0]
        path.write_bytes(path.read_bytes()[:-1])
        assert asked.ask(storage_wire.Check(2, ["cd" * 16])).numbers == {"corrupt": 0}
        assert asked.ask(storage_wire.Check(2)).numbers == {"corrupt": 1}
        assert len(asked.ask(storage_wire.List(3, 0, 0)).held) == 1


def test_a_restart_is_another_life_with_the_same_fragments(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes:
        with client(nodes.addresses["n00"]) as asked:
            asked.ask(storage_wire.Put(1, STRIPE), *fragment())
            asked.ask(storage_wire.Leave(2, True))
            asked.ask(storage_wire.Meet(3, "n07", "ipc://seven"))
            before = asked.ask(storage_wire.List(4, 0, 0))
        nodes.stop("n00")
        nodes.start("n00")
        with client(nodes.addresses["n00"]) as asked:
            after = asked.ask(storage_wire.List(4, before.epoch, before.upto))
            assert after.is_anew and after.epoch != before.epoch and after.held == before.held
            assert after.is_leaving and after.nodes["n07"] == "ipc://seven"
            assert asked.ask(storage_wire.Leave(5, False)).numbers == {"fragments": 1}


@pytest.mark.parametrize("key", [None, ClusterKey(b"a secret of another one")])
def test_who_has_not_the_key_is_not_answered(tmp_path: Path, key: ClusterKey | None) -> None:
    with running_nodes(tmp_path, 1, KEY) as nodes:
        address = nodes.addresses["n00"]
        with client(address, key) as stranger, client(address, KEY) as friend:
            stranger.send(wire.Ask(1, "stats"))
            stranger.send(storage_wire.Put(1, STRIPE), *fragment())
            assert friend.ask(wire.Ask(1, "stats")).numbers["fragments"] == 0
            assert stranger.answer(300) is None
            assert friend.ask(wire.Ask(1, "stats")).numbers["written"] == 0


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes, client(nodes.addresses["n00"]) as asked:
        asked.socket.send(b"nonsense")
        asked.socket.send(wire.encode(wire.Answer(1)))
        assert "no bytes" in asked.ask(storage_wire.Put(1, STRIPE)).error
        assert "no fragment came" in asked.ask(storage_wire.Put(1, STRIPE), b"x" * 100).error
        assert "expected stats, stop" in asked.ask(wire.Ask(1, "what?")).error


def test_a_full_disk_takes_nothing_more_and_keeps_what_it_has(tmp_path: Path) -> None:
    small = tmp_path / "n00"
    with (
        small_disk(small, "64k"),
        running_nodes(tmp_path, 1) as nodes,
        client(nodes.addresses["n00"]) as asked,
    ):
        answers = [
            asked.ask(storage_wire.Put(1, stripe), *fragment(stripe))
            for stripe in (f"{number:032x}" for number in range(40))
        ]
        errors = [answer.error for answer in answers]
        num_written = errors.index("cannot be written: No space left on device")
        assert 0 < num_written < 40 and not any(errors[:num_written])
        listing = asked.ask(storage_wire.List(2, 0, 0))
        assert len(listing.held) == errors.count(None) == len(nodes.files("n00"))
        assert asked.ask(storage_wire.Check(3)).numbers == {"corrupt": 0}
        # Room again, when something goes.
        dropped = [stripe for stripe, *_ in listing.held[:3]]
        assert asked.ask(storage_wire.Drop(4, dropped)).numbers == {"dropped": 3}
        assert asked.ask(storage_wire.Put(5, STRIPE), *fragment()).error is None
        # Read-only: what is there is served, and nothing else changes.
        make_read_only(small)
        assert "Read-only" in asked.ask(storage_wire.Put(6, "cd" * 16), *fragment()).error
        assert asked.ask(storage_wire.Copy(7, STRIPE)) and asked.data[0] == fragment()[0]
        assert "cannot be removed" in asked.ask(storage_wire.Drop(8, [STRIPE])).error
        nodes.stop("n00")
        nodes.start("n00")
        held = {stripe for stripe, *_ in asked.ask(storage_wire.List(9, 0, 0)).held}
        assert STRIPE in held and not held & set(dropped)
        assert "cannot be remembered" in asked.ask(storage_wire.Leave(10, True)).error
