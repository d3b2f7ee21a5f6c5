"""Goal: nodes are named in one way, everywhere. Method: values compared."""

from serving.nodes import node, values
from serving.nodes.values import HandOffProblem, NodeId


def test_nodes_have_a_role_and_a_name() -> None:
    assert str(NodeId("prefill", "a")) == "prefill/a"
    assert sorted([NodeId("p", "b"), NodeId("d", "c"), NodeId("p", "a")])[0].role == "d"
    assert node.NodeId is values.NodeId


def test_reasons_are_told_apart_by_their_names() -> None:
    assert {problem.value for problem in HandOffProblem} == {
        problem.name.lower() for problem in HandOffProblem
    }
