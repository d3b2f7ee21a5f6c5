"""Goal: room that was promised is there; a context comes whole or not at all; and the router hears
of every one that does not come.

Method: a fleet in virtual time, whose messages the test loses or makes up.
"""

from dataclasses import replace

import pytest

from serving.nodes import decode_worker, messages
from serving.nodes.messages import RefusalReason
from serving.nodes.values import HandOffProblem, NodeId
from tests.serving.engine.simulated_device import expected_tokens
from tests.serving.nodes.fleet import ROUTER, Fleet

CONTEXT_MAX = 64


def of(fleet: Fleet, kind: type, source: NodeId) -> list:
    return [m for s, _, m in fleet.sent if isinstance(m, kind) and s == source]


def test_room_is_kept_as_long_as_there_is_any() -> None:
    fleet = Fleet(0, 1, num_blocks=33)
    (at,) = fleet.decode
    # The router knows of none of these requests.
    fleet.lose = lambda _source, destination, _message: destination == ROUTER
    for number in range(6):
        fleet.give(ROUTER, at, messages.Reserve(f"r{number}", 40))
    # 32 blocks: 11 for each.
    kept = [m.request_id for m in of(fleet, messages.Reserved, at)]
    refused = of(fleet, messages.Refused, at)
    assert kept == ["r0", "r1"] and {m.reason for m in refused} == {RefusalReason.BUSY}
    assert "32 blocks are free, and 22 of these are kept for 2 requests" in refused[0].detail
    fleet.give(ROUTER, at, messages.Reserve("r0", 40))
    assert len(of(fleet, messages.Reserved, at)) == 3
    fleet.give(ROUTER, at, messages.Abort("r0"))
    fleet.give(ROUTER, at, messages.Reserve("r5", 40))
    assert of(fleet, messages.Reserved, at)[-1].request_id == "r5"
    for name in ("r1", "r5"):
        fleet.give(ROUTER, at, messages.Abort(name))
    fleet.check_at_rest()


def test_slots_are_kept_too() -> None:
    fleet = Fleet(0, 1)
    (at,) = fleet.decode
    fleet.lose = lambda _source, destination, _message: destination == ROUTER
    for number in range(6):
        fleet.give(ROUTER, at, messages.Reserve(f"r{number}", 3))
    assert len(of(fleet, messages.Reserved, at)) == 4


@pytest.mark.parametrize("part_blocks", [1, 2, 5])
def test_contexts_come_in_parts(part_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker, "PART_BLOCKS", part_blocks)
    fleet = Fleet(1, 1)
    request = fleet.submit("a", 35)
    fleet.run(5, until=lambda: "a" in fleet.ended)
    asked = of(fleet, messages.ReadBlocks, fleet.decode[0])
    assert len(asked) == -(-9 // part_blocks)
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    fleet.run(1)
    fleet.check_at_rest()


@pytest.mark.parametrize("how", ["lost", "refused", "twice", "no state", "gone"])
def test_several_parts_fail_as_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker, "PART_BLOCKS", 2)
    fleet = Fleet(1, 1)
    (at,), (holder,) = fleet.decode, fleet.prefill
    hits: list[messages.Blocks] = []

    def lose(source: NodeId, destination: NodeId, message: object) -> bool:
        if not isinstance(message, messages.Blocks) or message.first != 4 or hits:
            return False
        hits.append(message)
        if how == "refused":
            problem = HandOffProblem.EXPIRED
            fleet.give(source, destination, messages.BlocksRefused(message.ref, problem))
        if how == "twice":
            before = replace(message, first=2)
            fleet.give(source, destination, before)
            return False
        if how == "no state":
            empty = tuple(group[:0] for group in message.part.groups)
            filled = tuple(group.repeat(20, axis=0) for group in message.part.groups)
            part = replace(message.part, groups=filled or empty)
            fleet.give(source, destination, replace(message, part=part))
        if how == "gone":
            lost = messages.ReadBlocks(message.ref, b"", 4, 2)
            fleet.give(at, at, messages.Undeliverable(holder, lost))
        return True

    fleet.lose = lose
    request = fleet.submit("a", 30)
    fleet.run(5, until=lambda: "a" in fleet.ended)
    assert hits and fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    lost = of(fleet, messages.HandOffLost, at)
    said = {
        "lost": "does not answer",
        "refused": "refuses it: expired",
        "no state": "sends no state",
        "gone": "cannot be reached",
    }
    assert [m.detail for m in lost] == [f"{holder} {said[how]}" for _ in range(how != "twice")]
    fleet.run(4)
    fleet.check_at_rest()


@pytest.mark.parametrize("is_lost", [False, True])
def test_only_blocks_that_are_lacking_are_pulled(is_lost: bool) -> None:
    fleet = Fleet(1, 1)
    (at,) = fleet.decode
    fleet.submit("a", 34)
    fleet.run(5, until=lambda: "a" in fleet.ended)
    parts: list[messages.Blocks] = []

    def lose(_source: NodeId, _destination: NodeId, message: object) -> bool:
        if isinstance(message, messages.Blocks):
            parts.append(message)
        return is_lost and len(parts) == 1 and message is parts[0]

    fleet.lose = lose
    request = fleet.submit("b", 39)
    fleet.run(9, until=lambda: "b" in fleet.ended)
    assert fleet.tokens["b"] == expected_tokens(request, 3, CONTEXT_MAX)
    # Eight of ten blocks of four tokens were there.
    assert [part.first for part in parts] == [8] * (1 + is_lost)
    assert {len(part.part.groups[0]) for part in parts} == {2}
    fleet.run(4)
    fleet.check_at_rest()
    member = next(m for m in fleet.router.registry.members("decode") if m.node_id == at)
    assert member.status is not None
    assert member.status.hand_offs.num_spared_blocks == 8 * (1 + is_lost)
