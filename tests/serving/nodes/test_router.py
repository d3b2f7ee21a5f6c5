"""Goal: a request that goes through several workers gets the tokens that it would have had from
one, each of them once and in order, whatever happens to the workers; or one refusal or failure, in
time; and nobody keeps anything of it.

Method: a whole fleet in virtual time, around simulated devices that notice wrong blocks and states.
"""

from dataclasses import replace

import pytest

from serving.core.request import FinishReason
from serving.nodes import messages
from serving.nodes.messages import RefusalReason
from serving.nodes.pools import WorkerPools
from serving.nodes.registry import Member
from serving.nodes.values import NodeId
from tests.serving.engine.simulated_device import expected_tokens
from tests.serving.nodes.fleet import FRONTEND, OPTIONS, ROUTER, Fleet

CONTEXT_MAX = 64


def is_over(fleet: Fleet, *names: str) -> bool:
    return set(names) <= set(fleet.ended)


def phases(fleet: Fleet, phase: str) -> int:
    return fleet.router.phases().get(phase, 0)


@pytest.mark.parametrize("length", [1, 4, 10, 37, 60])
def test_tokens_are_those_of_a_single_worker(length: int) -> None:
    fleet = Fleet()
    request = fleet.submit("a", length)
    fleet.run(5, until=lambda: is_over(fleet, "a"))
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    assert fleet.ended["a"] is FinishReason.LENGTH and fleet.admitted == ["a"]
    kinds = [type(message).__name__ for _, _, message in fleet.sent]
    # Room is kept before the prompt is computed.
    assert kinds.index("Reserved") < kinds.index("Prefill") < kinds.index("Held")
    assert kinds.index("Held") < kinds.index("ReadBlocks") < kinds.index("HandedOver")
    fleet.run(1)
    fleet.check_at_rest()


def test_many_requests_share_the_workers() -> None:
    fleet = Fleet()
    requests = [fleet.submit(f"r{n}", 3 + n % 30, salt=n) for n in range(40)]
    fleet.run(30, until=lambda: is_over(fleet, *[r.request_id for r in requests]))
    for request in requests:
        expected = expected_tokens(request, 3, CONTEXT_MAX)
        assert fleet.tokens[request.request_id] == expected
    for node_id in (*fleet.prefill, *fleet.decode):
        counts = fleet.worker(node_id).status().hand_offs
        assert counts.num_given + counts.num_taken >= 10, f"{node_id} was left out: {counts}"
    fleet.run(1)
    fleet.check_at_rest()


def test_a_request_that_its_first_token_ends_needs_no_decode_worker() -> None:
    fleet = Fleet()
    fleet.submit("a", max_tokens=1)
    fleet.run(5, until=lambda: is_over(fleet, "a"))
    fleet.run(0.2)
    assert len(fleet.tokens["a"]) == 1
    assert all(fleet.worker(n).status().hand_offs.num_taken == 0 for n in fleet.decode)
    fleet.check_at_rest()


def test_more_requests_than_room_wait_and_more_than_that_are_refused() -> None:
    fleet = Fleet(1, 1, replace(OPTIONS, waiting_max=60))
    # Four slots.
    names = [f"r{n}" for n in range(70)]
    for name in names:
        fleet.submit(name, 5, salt=1)
    refused = [name for name in names if name in fleet.ended]
    assert len(refused) == 6 and fleet.ended[refused[0]].reason is RefusalReason.BUSY
    fleet.run(60, until=lambda: is_over(fleet, *names))
    fleet.run(1)
    for name in set(names) - set(refused):
        assert fleet.ended[name] is FinishReason.LENGTH and len(fleet.tokens[name]) == 12
    fleet.check_at_rest()


def hold_in(fleet: Fleet, phase: str) -> None:
    """Lose what would end a phase at once."""
    kinds = {"reserving": messages.Reserve, "pulling": messages.ReadBlocks}
    kind = kinds.get(phase)
    if kind is not None:
        fleet.lose = lambda _source, _destination, message: isinstance(message, kind)


PHASES = ["reserving", "prefilling", "pulling", "decoding"]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["kill", "restart", "stop"])
def test_a_lost_worker_costs_time_and_no_token(victim: str, phase: str, how: str) -> None:
    fleet = Fleet()
    hold_in(fleet, phase)
    request = fleet.submit("a", 30)
    fleet.run(5, until=lambda: phases(fleet, phase) == 1)
    if phase == "decoding":
        fleet.run(5, until=lambda: len(fleet.tokens["a"]) == 5)
    (at,) = [n for n in (*fleet.prefill, *fleet.decode) if n.role == victim and uses(fleet, n)]
    fleet.lose = lambda *_: False
    if how == "stop":
        fleet.stop(at)
    else:
        fleet.kill(at)
    if how == "restart":
        fleet.add(at.role, at.name)
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    if how == "stop":
        fleet.go_on(at)
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    fleet.run(5)
    if how == "stop":
        assert fleet.worker(at).is_member
        # It can be used again.
        again = [fleet.submit(f"b{n}", 12, salt=n) for n in range(6)]
        fleet.run(10, until=lambda: is_over(fleet, *[r.request_id for r in again]))
        for request in again:
            expected = expected_tokens(request, 3, CONTEXT_MAX)
            assert fleet.tokens[request.request_id] == expected
        fleet.run(3)
    fleet.check_at_rest()


def uses(fleet: Fleet, node_id: NodeId) -> bool:
    """Whether the only request was sent to this worker."""
    kinds = (messages.Reserve,) if node_id.role == "decode" else (messages.Prefill,)
    for _, destination, message in fleet.sent:
        if isinstance(message, kinds) and destination == node_id:
            return True
    # Before anything was sent to a prefill worker, any of them will do.
    sent = any(isinstance(message, messages.Prefill) for _, _, message in fleet.sent)
    return node_id.role == "prefill" and not sent and node_id.name == "0"


@pytest.mark.parametrize("kind", ["Reserve", "Reserved", "TakeOver", "HandedOver", "ReadBlocks"])
def test_a_lost_message_costs_time_and_no_token(kind: str) -> None:
    fleet = Fleet()
    lost: list[str] = []

    def lose(source: NodeId, destination: NodeId, message: object) -> bool:
        is_hit = type(message).__name__ == kind and not lost
        lost.extend([kind] * is_hit)
        return is_hit

    fleet.lose = lose
    request = fleet.submit("a", 20, max_tokens=40)
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    assert lost and fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    fleet.run(5)
    fleet.check_at_rest()


def test_what_a_fenced_worker_still_says_is_dropped() -> None:
    fleet = Fleet(1, 2)
    request = fleet.submit("a", 10, max_tokens=50)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 5)
    (at,) = [node for node in fleet.decode if fleet.is_running(node)]
    # It runs on, but is not heard of.
    fleet.cut = {(at, ROUTER)}
    fleet.run(5, until=lambda: fleet.router.num_restarted == 1)
    fleet.cut = set()
    fleet.run(5, until=lambda: is_over(fleet, "a"))
    assert fleet.router.num_stale > 0
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    assert any(isinstance(m, messages.Fenced) and d == at for _, d, m in fleet.sent)
    fleet.run(2)
    fleet.check_at_rest()


def test_without_workers_requests_fail_in_time_and_once() -> None:
    fleet = Fleet(1, 1)
    fleet.submit("a", max_tokens=50)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 3)
    fleet.kill(fleet.decode[0])
    start = fleet.clock.ns
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    waited_ns = fleet.clock.ns - start
    assert waited_ns <= OPTIONS.lost_ns + OPTIONS.stranded_ns + 3 * OPTIONS.heartbeat_ns
    assert isinstance(fleet.ended["a"], messages.Failed)
    assert "no decode worker" in fleet.ended["a"].detail and "silent" in fleet.ended["a"].detail
    fleet.kill(fleet.prefill[0])
    fleet.run(2)
    fleet.submit("b")
    assert fleet.ended["b"].reason is RefusalReason.UNAVAILABLE


def test_a_request_that_no_worker_can_do_fails_after_some_attempts() -> None:
    fleet = Fleet()
    fleet.lose = lambda s, d, m: isinstance(m, messages.TakeOver)
    fleet.submit("a")
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    assert "4 attempts failed; the last one: no answer while pulling" in fleet.ended["a"].detail
    fleet.run(5)
    fleet.check_at_rest()


@pytest.mark.parametrize("phase", PHASES)
def test_an_aborted_request_leaves_nothing(phase: str) -> None:
    fleet = Fleet()
    hold_in(fleet, phase)
    fleet.submit("a", 30, max_tokens=30)
    fleet.run(5, until=lambda: phases(fleet, phase) == 1)
    fleet.give(FRONTEND, ROUTER, messages.Abort("a"))
    fleet.run(3)
    assert not fleet.ended
    fleet.check_at_rest()


def test_requests_that_can_never_be_served_are_refused_at_once() -> None:
    fleet = Fleet()
    fleet.submit("a", 64)
    assert fleet.ended["a"].reason is RefusalReason.INVALID and fleet.ended["a"].param == "prompt"
    assert fleet.router.num_calls == 0


def test_a_draining_worker_finishes_and_gets_nothing_more() -> None:
    fleet = Fleet(1, 2)
    request = fleet.submit("a", max_tokens=40)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 3)
    (at,) = [node for node in fleet.decode if fleet.is_running(node)]
    fleet.worker(at).drain()
    fleet.run(0.15)
    names = [fleet.submit(f"b{n}", salt=n).request_id for n in range(6)]
    fleet.run(10, until=lambda: is_over(fleet, "a", *names))
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    assert fleet.worker(at).status().hand_offs.num_taken == 1 and fleet.router.num_restarted == 0
    assert fleet.worker(at).is_idle


def test_a_worker_with_a_broken_device_is_replaced() -> None:
    fleet = Fleet(1, 2)
    request = fleet.submit("a", max_tokens=30)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 3)
    (at,) = [node for node in fleet.decode if fleet.is_running(node)]
    fleet.give(at, at, messages.Crashed("the device is on fire"))
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    assert fleet.quits == ["the device is on fire"]


def test_status_is_that_of_all_workers() -> None:
    fleet = Fleet()
    fleet.run(0.5)
    fleet.give(FRONTEND, ROUTER, messages.QueryStatus(7))
    (status,) = [m for _, _, m in fleet.sent if isinstance(m, messages.WorkerStatus)]
    assert status.query_id == 7 and status.failure is None
    assert status.engine.num_slots == 16 and status.engine.num_blocks == 4 * 64
    for node_id in fleet.decode:
        fleet.kill(node_id)
    fleet.run(2)
    fleet.give(FRONTEND, ROUTER, messages.QueryStatus(8))
    status = [m for _, _, m in fleet.sent if isinstance(m, messages.WorkerStatus)][-1]
    assert status.failure == "no decode worker is there"


def test_seeds_are_drawn_once_for_all_attempts() -> None:
    fleet = Fleet(1, 2)
    fleet.submit("a", seed=None, max_tokens=30)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 3)
    prefills = [m for _, _, m in fleet.sent if isinstance(m, messages.Prefill)]
    seed = prefills[0].request.sampling.seed
    assert seed is not None
    (at,) = [node for node in fleet.decode if fleet.is_running(node)]
    fleet.kill(at)
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    prefills = [m for _, _, m in fleet.sent if isinstance(m, messages.Prefill)]
    assert [p.request.sampling.seed for p in prefills] == [seed, seed]


def test_prompts_that_are_not_worth_moving_are_computed_where_they_decode() -> None:
    fleet = Fleet(options=replace(OPTIONS, local_prefill_ms=20.0))
    # As long as nobody has measured it, a token counts as a millisecond.
    requests = [fleet.submit(f"r{length}", length, salt=length) for length in (5, 20, 21, 40)]
    fleet.run(10, until=lambda: is_over(fleet, *[r.request_id for r in requests]))
    for request in requests:
        expected = expected_tokens(request, 3, CONTEXT_MAX)
        assert fleet.tokens[request.request_id] == expected
    moved = {m.request.request_id for _, _, m in fleet.sent if isinstance(m, messages.Prefill)}
    assert moved == {"r21#0", "r40#0"}
    fleet.run(1)
    fleet.check_at_rest()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_one_that_is_lost_there_goes_on_elsewhere(how: str) -> None:
    fleet = Fleet(1, 2, replace(OPTIONS, local_prefill_ms=60.0))
    request = fleet.submit("a", 10, max_tokens=40)
    fleet.run(5, until=lambda: len(fleet.tokens.get("a", [])) == 5)
    (at,) = [node for node in fleet.decode if fleet.is_running(node)]
    fleet.kill(at) if how == "kill" else fleet.stop(at)
    fleet.run(10, until=lambda: is_over(fleet, "a"))
    if how == "stop":
        fleet.go_on(at)
    fleet.run(3)
    assert fleet.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    fleet.check_at_rest()


def test_a_worker_whose_contexts_cannot_be_had_is_avoided() -> None:
    fleet = Fleet()
    first = fleet.prefill[0]
    fleet.lose = lambda source, _, message: isinstance(message, messages.Blocks) and source == first
    requests = [fleet.submit(name, 20, salt) for salt, name in enumerate("abc")]
    fleet.run(20, until=lambda: is_over(fleet, *"abc"))
    for request in requests:
        assert fleet.tokens[request.request_id] == expected_tokens(request, 3, CONTEXT_MAX)
    # One failure each at most.
    assert 1 <= fleet.router.num_restarted <= 3


def test_urgent_requests_pass_others_that_wait() -> None:
    fleet = Fleet(1, 1)
    for number in range(12):
        fleet.submit(f"r{number}", 10, number)
    urgent = replace(fleet.submit("x", 10), request_id="urgent", priority=-1)
    fleet.give(FRONTEND, ROUTER, messages.Submit(urgent))
    fleet.run(20, until=lambda: is_over(fleet, "urgent"))
    assert not is_over(fleet, "r11") and not is_over(fleet, "x")
    fleet.run(20, until=lambda: is_over(fleet, "x", *(f"r{n}" for n in range(12))))
    fleet.run(3)
    fleet.check_at_rest()


@pytest.mark.parametrize("has_tiers", [False, True])
def test_prompts_that_were_computed_count_as_cached(
    has_tiers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPools, "has_tiers", has_tiers)
    fleet = Fleet(1, 1)
    works: list[float] = []
    for name, salt in (("a", 1), ("b", 1), ("c", 2)):
        fleet.submit(name, 21, salt)
        works.append(sum(fleet.router.pools.loads(m)["work_ms"] for m in members_of(fleet)))
        fleet.run(5, until=lambda name=name: is_over(fleet, name))
    # Five blocks of four tokens.
    assert works == [21, 1 if has_tiers else 21, 21]


def members_of(fleet: Fleet) -> list[Member]:
    return fleet.router.registry.members("prefill")
