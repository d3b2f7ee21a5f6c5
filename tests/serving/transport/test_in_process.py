"""Goal: messages arrive in the order in which they were sent, one at a time.

Method: nodes that answer within a delivery, and a delivery that raises.
"""

import pytest

from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import NodeId
from serving.transport.in_process import InProcessNetwork

A, B = NodeId("a", "0"), NodeId("b", "0")


def test_answers_wait_until_the_delivery_is_over() -> None:
    log: list[str] = []

    def deliver(source: NodeId, destination: NodeId, message: Message) -> None:
        assert isinstance(message, messages.Admitted)
        log.append(f"begin {message.request_id}")
        if message.request_id == "1":
            network.send(destination, source, messages.Admitted("2"))
            network.send(destination, source, messages.Admitted("3"))
        log.append(f"end {message.request_id}")

    network = InProcessNetwork(deliver)
    network.send(A, B, messages.Admitted("1"))
    assert log == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]


def test_network_works_on_after_a_delivery_raised() -> None:
    seen: list[Message] = []

    def deliver(source: NodeId, destination: NodeId, message: Message) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise ValueError("a defect")

    network = InProcessNetwork(deliver)
    with pytest.raises(ValueError, match="a defect"):
        network.send(A, B, messages.Admitted("1"))
    network.send(A, B, messages.Admitted("2"))
    assert seen == [messages.Admitted("1"), messages.Admitted("2")]
