"""Goal: requests are given to workers that can take them, and counted there as long as they are.

Method: pools over a registry whose members come and go. Policies have tests of their own.
"""

from dataclasses import fields, replace

from serving.kv.offload import OffloadStatus
from serving.nodes.pools import Placement, WorkerPools
from serving.nodes.registry import Member, Registry
from serving.nodes.values import NodeId
from tests.serving.nodes.test_registry import CARD, D0, P0, P1, STATUS

OFFLOAD = OffloadStatus(*(False for _ in fields(OffloadStatus)))


class Rig:
    def __init__(self, local_prefill_ms: float = 0.0) -> None:
        self.registry = Registry("1", 100, 8)
        self.pools = WorkerPools(self.registry, local_prefill_ms)

    def add(self, node_id: NodeId, generation: int = 1) -> Member:
        member = self.registry.join(node_id, generation, CARD, 0)
        self.pools.refresh(member)
        return member

    def place(self, num_tokens: int = 10) -> Placement:
        placement = self.pools.place(num_tokens)
        assert placement is not None
        return placement


def test_both_roles_are_needed() -> None:
    rig = Rig()
    assert rig.pools.missing_roles == ["prefill", "decode"] and rig.pools.place(3) is None
    prefill = rig.add(P0)
    assert rig.pools.missing_roles == ["decode"] and rig.pools.place(3) is None
    decode = rig.add(D0)
    assert rig.pools.missing_roles == []
    assert rig.place().members == [prefill, decode]


def test_requests_are_counted_where_they_are() -> None:
    rig = Rig()
    members = [rig.add(node_id) for node_id in (P0, P1)]
    decode = rig.add(D0)
    placements = [rig.place() for _ in range(4)]
    assert {p.prefill.node_id for p in placements if p.prefill} == {P0, P1}
    assert rig.pools.loads(members[0]) == rig.pools.loads(members[1]) == {"work_ms": 20.0}
    assert rig.pools.loads(decode) == {"requests": 4, "context_tokens": 40}
    # Four slots.
    assert rig.pools.place(1) is None
    for placement in placements:
        rig.pools.finish_work(placement)
        rig.pools.finish_work(placement)
    assert rig.pools.loads(members[0]) == {"work_ms": 0.0}
    for placement in placements:
        rig.pools.finish(placement)
        rig.pools.finish(placement)
    assert rig.pools.loads(decode) == {"requests": 0, "context_tokens": 0}


def test_cached_tokens_are_no_work() -> None:
    rig = Rig()
    prefill, _ = rig.add(P0), rig.add(D0)
    assert rig.pools.place(10, 8) is not None
    assert rig.pools.loads(prefill) == {"work_ms": 2.0}
    # More than there are, after a request has gone on without its cache.
    assert rig.pools.place(10, 12) is not None
    assert rig.pools.loads(prefill) == {"work_ms": 2.0}


def test_mostly_cached_prompts_are_computed_where_they_decode() -> None:
    rig = Rig(local_prefill_ms=3.0)
    rig.add(P0)
    decode = rig.add(D0)
    for num_cached, is_local in ((0, False), (6, False), (7, True)):
        placement = rig.pools.place(10, num_cached)
        assert placement is not None
        assert (placement.members == [decode]) == is_local


def test_workers_that_are_avoided_are_taken_if_there_are_no_others() -> None:
    rig = Rig()
    first, second = rig.add(P0), rig.add(P1)
    rig.add(D0)
    for _ in range(3):
        placement = rig.pools.place(10, avoided={P0})
        assert placement is not None and placement.prefill is second
    assert rig.pools.loads(first) == {"work_ms": 0.0}
    assert rig.pools.loads(second) == {"work_ms": 30.0}
    placement = rig.pools.place(10, avoided={P0, P1})
    assert placement is not None and placement.prefill is first
    assert rig.pools.loads(first) == {"work_ms": 10.0}


def test_tiers_are_there_if_a_prefill_worker_has_them() -> None:
    rig = Rig()
    rig.add(D0).status = replace(STATUS, offload=OFFLOAD)
    rig.add(P0)
    assert not rig.pools.has_tiers
    rig.add(P1).status = replace(STATUS, offload=OFFLOAD)
    assert rig.pools.has_tiers


def test_one_that_fails_leaves_or_is_gone_is_not_chosen() -> None:
    rig = Rig()
    rig.add(D0)
    one, other = rig.add(P0), rig.add(P1)
    before = rig.place()
    one.status = replace(STATUS, failure="on fire")
    rig.pools.refresh(one)
    assert all(rig.place().prefill is other for _ in range(2))
    one.status = STATUS
    rig.pools.refresh(one)
    other.is_draining = True
    rig.pools.refresh(other)
    assert rig.place().prefill is one
    # What was counted in an earlier life is not taken off this one.
    load = rig.pools.loads(one)
    rig.pools.finish(before)
    assert rig.pools.loads(one) == load
    rig.registry.remove(P0)
    rig.pools.lose(one)
    rig.pools.lose(one)
    assert rig.pools.missing_roles == ["prefill"] and rig.pools.place(1) is None
    again = rig.add(P0, generation=2)
    assert rig.place().prefill is again and again.place == one.place
