"""Goal: nodes hear of each other through the metadata node, which forgets those that are gone and
finds them again after a life of its own has ended. Method: the service with a clock of the test's,
and announcers over a real process.
"""

import os
from collections.abc import Callable
from pathlib import Path

from serving.kv.whereabouts import Announcer, Here, There, Whereabouts
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import wait_until
from tests.serving.node_processes import NodeProcess, nodes


class StillClock:
    """A clock that stands where it was put."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_ns(self) -> int:
        return round(self.s * 1e9)

    def unix_s(self) -> int:
        return round(self.s)


def here(name: str, **numbers: int) -> Here:
    return Here(7, "storage", name, f"ipc://{name}", 5, dict(numbers))


def test_everybody_is_told_of_everybody_until_they_are_silent_for_long() -> None:
    clock = StillClock()
    service = Whereabouts(Here(0, "metadata", "m", "ipc://m", 4), clock)

    def told(name: str, **numbers: int) -> dict[str, float]:
        service.on_message(b"client", here(name, **numbers))
        ((source, reply),) = service.take_replies()
        assert source == b"client" and isinstance(reply, There) and reply.call == 7
        assert reply.nodes[0].role == "metadata" and reply.nodes[0].address == "ipc://m"
        return {node.name: node.silent_s for node in reply.nodes[1:]}

    assert told("a") == {"a": 0}
    clock.s += 2.5
    assert told("b", fragments=3) == {"a": 2.5, "b": 0}
    clock.s += 58
    service.on_tick()
    assert told("c") == {"b": 58, "c": 0}
    service.on_message(b"", here("b", fragments=4))
    ((_, reply),) = service.take_replies()
    assert isinstance(reply, There)
    assert [node.numbers for node in reply.nodes if node.name == "b"] == [{"fragments": 4}]


def test_nodes_find_each_other_again_behind_a_new_metadata_node(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/m"
    settings = {"directory": str(tmp_path)}
    made = [Announcer(address, here(name), None, SystemClock()) for name in "ab"]

    def know_all() -> bool:
        heard = [{found.name for found in one.beat()} for one in made]
        return heard == [{"0", "a", "b"}] * 2

    def metadata(pid: int) -> Callable[[], bool]:
        def is_known() -> bool:
            return know_all() and any(found.pid == pid for found in made[0].found())

        return is_known

    with nodes() as running:
        try:
            running.append(NodeProcess("metadata", address, settings))
            wait_until(metadata(running[0].process.pid), "both know both")
            running[0].kill()
            for one in made:
                one.beat()
            # What was heard is not forgotten, and grows old.
            assert {found.name for found in made[0].found()} == {"0", "a", "b"}
            age_s = made[0].found()[0].silent_s
            wait_until(lambda: made[0].found()[0].silent_s > age_s, "it is silent")
            running.append(NodeProcess("metadata", address, settings))
            assert running[1].process.pid != os.getpid()
            wait_until(metadata(running[1].process.pid), "they know each other again")
        finally:
            for one in made:
                one.close()
