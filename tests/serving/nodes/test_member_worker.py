"""Goal: what a worker does alone it does as a member, too: whole requests, grammars, faults; and
when its life as a member is over it drops all of it. What members do together is in `test_router`.

Method: a fleet in virtual time; grammars of the golden tokenizer.
"""

from dataclasses import replace

import pytest

from serving.core.request import FinishReason
from serving.engine.engine import Engine
from serving.nodes import messages
from serving.nodes.messages import RefusalReason
from tests.serving.engine.simulated_device import expected_tokens
from tests.serving.nodes.fleet import ROUTER, Fleet

CONTEXT_MAX = 64


def test_a_whole_request_is_served_by_one_worker() -> None:
    fleet = Fleet(0, 1)
    (at,) = fleet.decode
    request = replace(Fleet(1, 1).submit("a", 21), request_id="x#0")
    fleet.lose = lambda _source, _destination, message: isinstance(message, messages.Abort)
    fleet.give(ROUTER, at, messages.Submit(request))
    fleet.run(3)
    deltas = [
        d for s, _, m in fleet.sent if s == at and isinstance(m, messages.Tokens) for d in m.deltas
    ]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_tokens(request, 3, CONTEXT_MAX)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    fleet.check_at_rest()


def test_a_prompt_that_is_refused_leaves_nothing() -> None:
    fleet = Fleet(1, 1)
    request = replace(Fleet(1, 1).submit("a", 21), prompt_token_ids=(99,))
    fleet.give(ROUTER, fleet.prefill[0], messages.Prefill(request, fleet.decode[0]))
    refused = [m for _, _, m in fleet.sent if isinstance(m, messages.Refused)]
    assert refused[0].reason is RefusalReason.INVALID and "99" in refused[0].detail
    engine = fleet.worker(fleet.prefill[0])._engine
    assert isinstance(engine, Engine)
    assert not engine.hand_offs._watched
    fleet.check_at_rest()


def test_duplicates_change_nothing() -> None:
    fleet = Fleet(1, 1)
    twice: list[object] = []

    def repeat(source: object, destination: object, message: object) -> bool:
        kinds = (
            messages.Prefill,
            messages.Held,
            messages.TakeOver,
            messages.Blocks,
            messages.HandedOver,
            messages.HandOffDone,
            messages.Reserved,
            messages.Join,
            messages.Welcome,
        )
        if isinstance(message, kinds) and message not in twice:
            twice.append(message)
            fleet.give(source, destination, message)  # type: ignore[arg-type]
        return False

    fleet.lose = repeat
    request = fleet.submit("a", 21)
    fleet.run(5, until=lambda: "a" in fleet.ended)
    assert len(twice) >= 7
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    fleet.run(3)
    fleet.check_at_rest()


@pytest.mark.parametrize("phase", ["prefilling", "pulling", "decoding"])
def test_one_whose_life_is_over_drops_everything(phase: str) -> None:
    fleet = Fleet(1, 1)
    if phase == "pulling":
        fleet.lose = lambda _source, _destination, message: isinstance(message, messages.ReadBlocks)
    fleet.submit("a", 40, max_tokens=20)
    fleet.run(3, until=lambda: fleet.router.phases().get(phase) == 1)
    fleet.lose = lambda _source, _destination, message: isinstance(message, messages.Join)
    for node_id in (*fleet.prefill, *fleet.decode):
        member = fleet.router.registry.get(node_id)
        assert member is not None
        fleet.give(ROUTER, node_id, messages.Fenced(member.generation))
        assert fleet.worker(node_id).is_idle
    fleet.lose = lambda *_: False
    # They join again, and the request with them.
    fleet.run(5, until=lambda: "a" in fleet.ended)
    assert len(fleet.tokens["a"]) == 20
    fleet.run(3)
    fleet.check_at_rest()
