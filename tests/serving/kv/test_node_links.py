"""Goal: calls are answered once, by the node or by nobody, and it is known which nodes are there.

Method: nodes in threads, of which some end and come back, and addresses where nobody is.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.kv import storage_wire, wire
from serving.kv.node_links import LinkTimes, NodeLinks
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import Nodes, running_nodes, wait_until
from tests.serving.kv.test_fragment_directory import STRIPE, fragment

TIMES = LinkTimes(every_s=0.05, silent_s=0.8)


class Listener:
    """Links, with what nodes have told."""

    def __init__(self, nodes: Nodes) -> None:
        self.held: dict[str, set[str]] = {}
        self.links = NodeLinks(nodes.addresses, nodes.key, SystemClock(), self.hear, TIMES)

    def hear(self, node: str, listing: storage_wire.Listing) -> None:
        held = self.held.setdefault(node, set())
        if listing.is_anew:
            held.clear()
        held.difference_update(listing.dropped)
        held.update(stripe for stripe, *_ in listing.held)

    def ask(
        self,
        node: str,
        message: storage_wire.Request,
        data: Sequence[bytes] = (),
        time_s: float = 9,
    ) -> storage_wire.Reply | None:
        answers: list[storage_wire.Reply | None] = []
        arrived = threading.Event()

        def answered(reply: storage_wire.Reply | None, frames: Sequence[bytes]) -> None:
            answers.append(reply)
            arrived.set()

        self.links.call(node, message, data, answered, time_s)
        assert arrived.wait(20) and len(answers) == 1
        return answers[0]


@contextmanager
def listening(nodes: Nodes) -> Iterator[Listener]:
    listener = Listener(nodes)
    listener.links.start()
    try:
        wait_until(lambda: len(listener.links.present()) == len(nodes.running), "all are there")
        yield listener
    finally:
        listener.links.close()


def test_calls_are_answered_and_changes_heard(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 2) as nodes, listening(nodes) as listener:
        reply = listener.ask("n01", storage_wire.Put(0, STRIPE), fragment())
        assert isinstance(reply, wire.Answer) and reply.error is None
        wait_until(lambda: listener.held == {"n00": set(), "n01": {STRIPE}}, "it is heard of")
        listener.ask("n01", storage_wire.Drop(0, [STRIPE]))
        wait_until(lambda: not listener.held["n01"], "its end is heard of")


def test_a_node_that_ends_is_missed_and_comes_back(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 2) as nodes, listening(nodes) as listener:
        links = listener.links
        listener.ask("n01", storage_wire.Put(0, STRIPE), fragment())
        nodes.stop("n01")
        # Not known to be away yet: nobody answers in time.
        assert listener.ask("n01", storage_wire.Check(0), time_s=0.1) is None
        wait_until(lambda: links.present() == {"n00"}, "it is missed")
        assert links.lost(0.5) == {"n01"} and links.lost(1000) == frozenset()
        # At once, although there would be time.
        assert listener.ask("n01", storage_wire.Check(0), time_s=1000) is None
        nodes.start("n01")
        wait_until(lambda: links.present() == {"n00", "n01"}, "it is back")
        wait_until(lambda: listener.held["n01"] == {STRIPE}, "what it holds is heard of")


def test_nodes_are_learnt_from_others(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes, listening(nodes) as listener:
        nodes.start("n01")
        listener.ask("n00", storage_wire.Meet(0, "n01", nodes.addresses["n01"]))
        wait_until(lambda: listener.links.present() == {"n00", "n01"}, "it is met")
        listener.ask("n00", storage_wire.Meet(0, "n02", "nonsense"))
        assert listener.links.nodes == {"n00", "n01"}


def test_closing_answers_all_that_is_open(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes:
        listener = Listener(nodes)
        listener.links.start()
        wait_until(lambda: bool(listener.links.present()), "it is there")
        nodes.stop("n00")
        answers: list[object] = []
        listener.links.call(
            "n00", storage_wire.Check(0), (), lambda reply, _: answers.append(reply), 1000
        )
        pause = threading.Event()
        pause.wait(0.1)
        listener.links.close()
        assert answers == [None]
