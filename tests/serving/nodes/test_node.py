"""Goal: an outbox keeps effects in order and hands them out once.

Method: effects of each kind put in, taken out and compared.
"""

from serving.nodes import messages
from serving.nodes.node import NodeId, Outbox, Send, SetTimer


def test_effects_come_out_in_order_and_once() -> None:
    outbox, other = Outbox(), NodeId("frontend", "0")
    outbox.send(other, messages.Admitted("a"))
    outbox.set_timer("watchdog", 5)
    outbox.send(other, messages.Admitted("b"))
    assert outbox.take() == [
        Send(other, messages.Admitted("a")),
        SetTimer("watchdog", 5),
        Send(other, messages.Admitted("b")),
    ]
    assert outbox.take() == []


def test_node_ids_are_values() -> None:
    assert NodeId("mesh_worker", "0") == NodeId("mesh_worker", "0")
    assert len({NodeId("a", "1"), NodeId("a", "1"), NodeId("a", "2")}) == 2
    assert str(NodeId("frontend", "3")) == "frontend/3"
