"""Goal: only workers that go with the others become members, and a life that is over stays over.

Method: a registry that is told the time; cards that differ in one thing each.
"""

from dataclasses import replace

import pytest

from serving.core.buckets import StepKind
from serving.core.engine_status import total_status
from serving.nodes.registry import JoinRefusedError, Registry
from serving.nodes.values import MemberCard, NodeId, NodeStatus
from tests.serving.engine.checked_engine import BUCKETS, make_limits

LIMITS = make_limits()
CARD = MemberCard(
    "ipc:///x",
    "1",
    b"f" * 32,
    LIMITS,
    tuple(BUCKETS.of(StepKind.PREFILL)),
    tuple(BUCKETS.of(StepKind.DECODE)),
)
STATUS = NodeStatus(None, total_status([]))
P0, P1, D0 = NodeId("prefill", "0"), NodeId("prefill", "1"), NodeId("decode", "0")


def registry() -> Registry:
    made = Registry("1", lost_ns=100, places_max=2)
    made.join(P0, 5, CARD, now_ns=0)
    return made


def test_members_are_those_that_are_heard_of() -> None:
    members = registry()
    members.join(D0, 6, CARD, now_ns=10)
    assert [m.node_id for m in members.members()] == [P0, D0]
    assert [m.node_id for m in members.members("decode")] == [D0]
    assert members.heartbeat(P0, 5, STATUS, False, now_ns=60) is members.get(P0)
    assert [m.node_id for m in members.silent(109)] == []
    assert [m.node_id for m in members.silent(110)] == [D0]
    members.remove(D0)
    assert members.get(D0) is None and members.silent(110) == []


def test_a_life_that_is_over_stays_over() -> None:
    members = registry()
    again = members.join(P0, 7, CARD, now_ns=20)
    assert again.place == 0 and members.get(P0) is again
    assert members.heartbeat(P0, 5, STATUS, False, 30) is None
    assert members.heartbeat(P0, 7, STATUS, False, 30) is again
    assert members.heartbeat(D0, 7, STATUS, False, 30) is None


def test_one_that_fails_or_leaves_is_not_available() -> None:
    members = registry()
    (member,) = members.members()
    assert member.is_available
    members.heartbeat(P0, 5, replace(STATUS, failure="on fire"), False, 1)
    assert not member.is_available
    members.heartbeat(P0, 5, STATUS, True, 2)
    members.heartbeat(P0, 5, STATUS, False, 3)
    assert not member.is_available


@pytest.mark.parametrize(
    ("node_id", "card", "said"),
    [
        (P1, {"code_version": "2"}, "prefill/1 runs code 2 and the router 1; expected the same"),
        (D0, {"fingerprint": b"g" * 32}, "decode/0 has KV of 6767676767676767 and prefill/0 of 66"),
        (
            D0,
            {"limits": make_limits(context_max=48)},
            "decode/0 has a context of 48 .* prefill/0 a",
        ),
        (P1, {"limits": make_limits(num_slots=4)}, "prefill/1 has .* 3 slots .* the same in one"),
        (P1, {"limits": make_limits(num_blocks=40)}, "39 blocks and prefill/0 .* 64 blocks"),
        (NodeId("cook", "0"), {}, "cook/0 has the role 'cook'; expected one of prefill, decode"),
    ],
)
def test_who_does_not_go_with_the_others_is_refused(
    node_id: NodeId, card: dict[str, object], said: str
) -> None:
    members = registry()
    with pytest.raises(JoinRefusedError, match=said):
        members.join(node_id, 1, replace(CARD, **card), 0)
    assert members.get(node_id) is None
    # In another role it may have another size, and alone it may be anything.
    members.join(D0, 1, replace(CARD, limits=make_limits(num_slots=4)), 0)
    members.remove(D0)
    members.join(P0, 2, replace(CARD, fingerprint=b"g" * 32), 0)


def test_places_are_counted_over_all_time() -> None:
    members = registry()
    assert members.join(P1, 1, CARD, 0).place == 1
    members.remove(P1)
    with pytest.raises(JoinRefusedError, match="prefill worker number 3; expected at most 2"):
        members.join(NodeId("prefill", "2"), 1, CARD, 0)
    assert members.join(P1, 2, CARD, 0).place == 1
