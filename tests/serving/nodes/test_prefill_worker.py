"""Goal: a context is sent to the one that it is meant for, as often as that takes, and to nobody
else; every other reference is refused and counted; and what nobody pulls is let go of.

Method: a fleet in virtual time whose decode worker is played by the test.
"""

from dataclasses import replace

import pytest

from serving.nodes import messages
from serving.nodes.values import HandOffCounts, HandOffProblem, HandOffRef, NodeId
from tests.serving.nodes.fleet import ROUTER, Fleet

TAKER = NodeId("decode", "0")
FINGERPRINT = b"f" * 32


class Rig:
    """A prefill worker that holds one context for `TAKER`."""

    def __init__(self, length: int = 21) -> None:
        self.fleet = Fleet(1, 1)
        self.fleet.stop(TAKER)
        (self.at,) = self.fleet.prefill
        self.fleet.run(0.2)
        request = self.fleet.submit("a", length)
        request = replace(request, request_id="a#0")
        self.fleet.give(ROUTER, self.at, messages.Prefill(request, TAKER))
        self.fleet.run(2, until=lambda: bool(self.of(messages.Held)))
        self.ref: HandOffRef = self.of(messages.Held)[0].ref

    def of(self, kind: type) -> list:
        return [m for s, _, m in self.fleet.sent if isinstance(m, kind) and s == self.at]

    def ask(
        self,
        ref: HandOffRef | None = None,
        first: int = 0,
        count: int = 99,
        source: NodeId = TAKER,
        fingerprint: bytes = FINGERPRINT,
    ) -> messages.Blocks | HandOffProblem:
        begin = len(self.fleet.sent)
        ask = messages.ReadBlocks(ref or self.ref, fingerprint, first, count)
        self.fleet.give(source, self.at, ask)
        (answer,) = [m for s, d, m in self.fleet.sent[begin:] if (s, d) == (self.at, source)]
        if isinstance(answer, messages.BlocksRefused):
            return answer.problem
        assert isinstance(answer, messages.Blocks)
        return answer

    @property
    def counts(self) -> HandOffCounts:
        return self.fleet.worker(self.at).status().hand_offs


def test_a_context_is_sent_in_parts_that_make_a_whole() -> None:
    rig = Rig()
    assert (rig.ref.num_tokens, rig.ref.num_blocks) == (21, 6)
    whole = rig.ask()
    assert isinstance(whole, messages.Blocks)
    for first in range(0, 6, 2):
        part = rig.ask(first=first, count=2)
        assert isinstance(part, messages.Blocks) and part.first == first
        for mine, all_of_it in zip(part.part.groups, whole.part.groups, strict=True):
            assert (mine == all_of_it[first : first + 2]).all()
        # The state comes with the last block.
        assert len(part.part.states) == (first == 4)


def test_references_that_name_nothing_are_refused_and_counted() -> None:
    rig = Rig()
    assert rig.ask(replace(rig.ref, generation=1)) is HandOffProblem.STALE
    assert rig.ask(replace(rig.ref, holder=TAKER)) is HandOffProblem.STALE
    assert rig.ask(replace(rig.ref, number=7)) is HandOffProblem.UNKNOWN
    assert rig.ask(source=NodeId("decode", "1")) is HandOffProblem.FOREIGN
    assert rig.ask(fingerprint=b"g" * 32) is HandOffProblem.LAYOUT
    # None of these has harmed it, nor can others say that they are done with it.
    rig.fleet.give(NodeId("decode", "1"), rig.at, messages.HandOffDone(rig.ref))
    assert rig.counts.num_held == 1
    assert isinstance(rig.ask(), messages.Blocks)
    rig.fleet.give(TAKER, rig.at, messages.HandOffDone(rig.ref))
    assert rig.counts.num_held == 0 and rig.counts.num_given == 1
    assert rig.ask() is HandOffProblem.CONSUMED
    assert rig.counts.refused == {
        "stale": 2,
        "unknown": 1,
        "foreign": 1,
        "layout": 1,
        "consumed": 1,
    }


def test_a_lease_is_renewed_by_asking_and_ends_without() -> None:
    rig = Rig()
    for _ in range(3):
        rig.fleet.run(1.5)
        assert isinstance(rig.ask(first=0, count=1), messages.Blocks)
    rig.fleet.run(2.1)
    assert rig.ask() is HandOffProblem.EXPIRED
    assert rig.counts.num_held == 0 and rig.counts.num_lost == 1


def test_references_of_an_earlier_life_name_nothing() -> None:
    rig = Rig()
    worker = rig.fleet.worker(rig.at)
    beat = messages.Fenced(rig.ref.generation)
    rig.fleet.give(ROUTER, rig.at, beat)
    assert rig.counts.num_held == 0
    assert rig.ask() is HandOffProblem.STALE
    rig.fleet.run(1)
    assert worker.is_member


@pytest.mark.parametrize("is_late", [False, True])
def test_a_context_that_nobody_wants_any_more_is_not_held(is_late: bool) -> None:
    fleet = Fleet(1, 1)
    (at,) = fleet.prefill
    request = replace(fleet.submit("a", 21, salt=3), request_id="b")
    # The router does not know of it.
    fleet.lose = lambda source, _, message: isinstance(message, messages.Abort) and source != at
    fleet.give(ROUTER, at, messages.Prefill(request, TAKER))

    def is_out() -> bool:
        out = [m for s, _, m in fleet.sent if s == at and isinstance(m, messages.Tokens)]
        return any(delta.request_id == "b" for message in out for delta in message.deltas)

    if is_late:
        # Its token is out, and the context on its way to the host.
        fleet.run(2, until=is_out)
    fleet.lose = lambda *_: False
    fleet.give(ROUTER, at, messages.Abort("b"))
    fleet.run(3)
    assert not any(isinstance(m, messages.Held) and m.request_id == "b" for _, _, m in fleet.sent)
    fleet.check_at_rest()
