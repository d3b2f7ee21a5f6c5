"""Goal: fragments are placed on different nodes, evenly; a plan makes what is missing and no more.

Method: placement over many stripes; plans for stripes in every state of their nodes, and a cluster
of sets in which nodes join, leave and die at random and the plans are carried out.
"""

import random
from collections import Counter

import pytest

from serving.kv.stripes import (
    ByteBudget,
    Coding,
    NodeStates,
    StripeMap,
    StripePlan,
    plan_stripe,
    rank_nodes,
)

CODING = Coding(3, 2)
ALL = frozenset("abcdefg")
HELD = dict(zip("abcde", range(5), strict=True))


def test_placement_is_even_and_a_new_node_takes_only_its_share() -> None:
    nodes = [f"n{number}" for number in range(16)]
    stripes = [f"{number:032x}" for number in range(2000)]
    before = {stripe: rank_nodes(stripe, nodes)[:12] for stripe in stripes}
    load = Counter(node for placed in before.values() for node in placed)
    assert all(len(set(placed)) == 12 for placed in before.values())
    assert all(abs(count / 1500 - 1) < 0.1 for count in load.values())
    for stripe in stripes:
        after = rank_nodes(stripe, [*reversed(nodes), "n16"])
        after.remove("n16")
        assert after[:12] == before[stripe]


def test_what_counts_as_written_bears_a_loss() -> None:
    assert Coding().num_fragments == 12 and Coding().num_written_min == 11
    assert Coding(4, 1).num_written_min == 5 and Coding(4, 4).num_written_min == 6


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (NodeStates(ALL), StripePlan()),
        # Away for a while: waited for.
        (NodeStates(ALL - {"a"}), StripePlan()),
        (NodeStates(ALL - {"a"}, full=frozenset("fg"), lost=frozenset("a")), StripePlan((), (), 1)),
        (NodeStates(frozenset("abc")), StripePlan()),
        # Too few are left, but those that are away may come back.
        (NodeStates(frozenset("ab")), StripePlan((), (), 3)),
        (NodeStates(frozenset("ab"), lost=frozenset("cdefg")), StripePlan((), (), 3)),
    ],
)
def test_plans_that_make_nothing(states: NodeStates, expected: StripePlan) -> None:
    assert plan_stripe("s", HELD, CODING, states) == expected


def test_what_lost_nodes_had_goes_to_nodes_without_any() -> None:
    plan = plan_stripe("s", HELD, CODING, NodeStates(ALL - {"a", "d"}, lost=frozenset("ad")))
    assert {fragment for fragment, _ in plan.make} == {0, 3} and plan.num_missing == 2
    assert {node for _, node in plan.make} == {"f", "g"} and plan.drop == ()


def test_a_node_that_leaves_keeps_its_fragment_until_another_has_it() -> None:
    states = NodeStates(ALL, leaving=frozenset("b"))
    plan = plan_stripe("s", HELD, CODING, states)
    ((fragment, target),) = plan.make
    assert fragment == 1 and target in "fg" and plan.drop == ()
    after = plan_stripe("s", {**HELD, target: 1}, CODING, states)
    assert after == StripePlan(drop=("b",))


def test_of_two_with_the_same_fragment_the_first_in_order_keeps_it() -> None:
    first, second = rank_nodes("s", "fa")
    plan = plan_stripe("s", {**HELD, "f": 0}, CODING, NodeStates(ALL))
    assert plan == StripePlan(drop=(second,)) and first != second


def test_what_can_never_be_read_is_dropped() -> None:
    plan = plan_stripe("s", {"a": 0, "b": 1}, CODING, NodeStates(ALL))
    assert plan == StripePlan(drop=("a", "b"), is_broken=True)


def test_nothing_is_planned_while_somebody_has_not_told() -> None:
    known = StripeMap(CODING)
    for node, fragment in HELD.items():
        known.add(node, "s", fragment, now_ns=10)
    lost = NodeStates(ALL - {"a"}, lost=frozenset("a"))
    assert known.plan("s", lost, before_ns=10).num_missing == 1
    assert known.plan("s", lost, before_ns=9) == StripePlan()
    incomplete = NodeStates(ALL - {"a"}, lost=frozenset("a"), is_complete=False)
    assert known.plan("s", incomplete, before_ns=10) == StripePlan()
    assert known.plan("t", lost, before_ns=10) == StripePlan()


def test_the_map_follows_what_nodes_tell() -> None:
    known = StripeMap(CODING)
    for node, fragment in {"a": 0, "b": 1, "c": 1, "d": 2}.items():
        known.add(node, "s", fragment, 0)
    known.add("a", "t", 4, 0)
    assert known.holders("s", "bcd") == {"b": 1, "c": 1, "d": 2}
    assert known.is_readable("s", "abd") and not known.is_readable("s", "bcd")
    assert known.held_by("a") == 2 and len(known) == 2
    known.remove_node("a")
    assert known.stripes == ["s"] and known.held_by("a") == 0
    assert sorted(known.pop("s")) == ["b", "c", "d"] and known.pop("s") == []
    known.remove("b", "s")
    assert len(known) == 0


@pytest.mark.parametrize("seed", range(5))
def test_repairs_keep_a_stripe_whole_through_joins_and_losses(seed: int) -> None:
    """Up to two of the nodes are lost at a time; every plan is carried out at once."""
    rng = random.Random(seed)
    nodes = {f"n{number}" for number in range(8)}
    held = {node: f for f, node in enumerate(rank_nodes("s", nodes)[:5])}
    for step in range(200):
        lost = frozenset(rng.sample(sorted(nodes), rng.randint(0, 2)))
        leaving = frozenset(rng.sample(sorted(nodes), rng.randint(0, 1)))
        states = NodeStates(frozenset(nodes) - lost, lost, leaving)
        plan = plan_stripe("s", held, CODING, states)
        assert not plan.is_broken
        for fragment, node in plan.make:
            assert node not in held and node in states.taking
            held[node] = fragment
        for node in plan.drop:
            del held[node]
        # What was lost comes back empty, under another name, or as it was.
        for node in lost:
            if rng.random() < 0.5:
                nodes.remove(node)
                held.pop(node, None)
                nodes.add(f"m{step}-{node}")
    for _ in range(2):
        plan = plan_stripe("s", held, CODING, NodeStates(frozenset(nodes)))
        held = {
            **{n: f for n, f in held.items() if n not in plan.drop},
            **{n: f for f, n in plan.make},
        }
    assert sorted(held.values()) == [0, 1, 2, 3, 4]


def test_a_budget_lets_a_second_through_and_then_the_rate() -> None:
    budget = ByteBudget(1000, 0)
    assert budget.wait_s(0) == 0
    budget.spend(3000)
    assert budget.wait_s(0) == pytest.approx(2.0)
    assert budget.wait_s(1_500_000_000) == pytest.approx(0.5)
    assert budget.wait_s(10_000_000_000) == 0
    budget.spend(1500)
    assert budget.wait_s(10_000_000_000) == pytest.approx(0.5)
