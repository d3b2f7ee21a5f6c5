"""Goal: a node that joins is known by those it has greeted. Method: two nodes, of which one comes
later than the greeting.
"""

from pathlib import Path

from serving.kv import storage_wire
from serving.kv.greeter import Greeter
from tests.serving.kv.storage_parts import running_nodes, wait_until
from tests.serving.kv.test_storage_node import client


def test_others_hear_of_a_node_when_they_are_there(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 1) as nodes:
        late = f"ipc://{tmp_path}/n01.s"
        greeter = Greeter("n09", "ipc://nine", {**nodes.addresses, "n01": late}, None)

        def greeted() -> list[str]:
            greeter.greet()
            return greeter.waiting_for

        wait_until(lambda: greeted() == ["n01"], "the first node answers")
        nodes.start("n01")
        wait_until(lambda: not greeted(), "the second node answers")
        greeter.close()
        for address in nodes.addresses.values():
            with client(address) as asked:
                listing = asked.ask(storage_wire.List(1, 0, 0))
                assert listing.nodes["n09"] == "ipc://nine"
