"""Stripes over storage nodes: which node gets which fragment, and what has to be made anew.

What one write stores is a *stripe*. It is coded into `num_data + num_parity` fragments, of which
any `num_data` give all of it back, and no two of them lie on one node. A stripe never changes, and
its name is never used again, so a fragment that turns up late is either a good one or not wanted.

A stripe is there when enough of its fragments are. There is no other record of it: a write that
broke off has left too few of them, or enough.

Placement is by rendezvous: for each stripe the nodes are put into an order that depends on its name
and theirs alone. A node that joins gets its share of what is written from then on, and one that
leaves changes nothing for the others. (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", 1998.)
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import xxhash


@dataclass(frozen=True, slots=True)
class Coding:
    """How many fragments a stripe has, and how many of them may be lost."""

    num_data: int = 10
    num_parity: int = 2

    @property
    def num_fragments(self) -> int:
        """Fragments of a stripe, each on a node of its own."""
        return self.num_data + self.num_parity

    @property
    def num_written_min(self) -> int:
        """Fragments that must be on disks for a write to count: one loss is borne from then on."""
        return self.num_data + (self.num_parity + 1) // 2


@dataclass(frozen=True, slots=True)
class NodeStates:
    """What is known of the nodes. Who is in none of these has been silent for a short while.

    Attributes:
        present: they answer.
        lost: silent for so long that what they hold is to be made anew.
        leaving: what they hold is to go to others; a part of `present`, or of neither.
        full: they take nothing at the moment.
        is_complete: every node has told what it holds, or is lost.
    """

    present: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    is_complete: bool = True

    @property
    def taking(self) -> frozenset[str]:
        """Those that fragments can be written to."""
        return self.present - self.leaving - self.full


@dataclass(frozen=True, slots=True)
class StripePlan:
    """What is to be done for a stripe.

    Attributes:
        make: (fragment, node that gets it); made from the others, or copied.
        drop: nodes whose fragment is not needed.
        num_missing: fragments that are to be made, whether or not there is a node for them.
        is_broken: too few are left for ever.
    """

    make: tuple[tuple[int, str], ...] = ()
    drop: tuple[str, ...] = ()
    num_missing: int = 0
    is_broken: bool = False


def rank_nodes(stripe: str, nodes: Iterable[str]) -> list[str]:
    """`nodes` in the order in which they are to hold fragments of a stripe."""
    return sorted(
        nodes, key=lambda node: (xxhash.xxh3_64_intdigest(f"{stripe}/{node}".encode()), node)
    )


@dataclass(slots=True)
class _Stripe:
    heard_ns: int
    held: dict[str, int] = field(default_factory=dict[str, int])


class StripeMap:
    """Which node holds which fragment, as the nodes have told. A node holds one of a stripe."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._stripes: dict[str, _Stripe] = {}
        self._by_node: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._stripes)

    @property
    def stripes(self) -> list[str]:
        """The names of all stripes that somebody holds a fragment of."""
        return list(self._stripes)

    def add(self, node: str, stripe: str, fragment: int, now_ns: int) -> None:
        """A node holds a fragment."""
        known = self._stripes.setdefault(stripe, _Stripe(now_ns))
        known.held[node] = fragment
        self._by_node.setdefault(node, set()).add(stripe)

    def remove(self, node: str, stripe: str) -> None:
        """A node holds nothing of a stripe any more."""
        known = self._stripes.get(stripe)
        self._by_node.get(node, set[str]()).discard(stripe)
        if known is not None:
            known.held.pop(node, None)
            if not known.held:
                del self._stripes[stripe]

    def remove_node(self, node: str) -> None:
        """What a node holds is not known any more."""
        for stripe in list(self._by_node.get(node, ())):
            self.remove(node, stripe)

    def pop(self, stripe: str) -> list[str]:
        """Forget a stripe; the nodes that held something of it."""
        known = self._stripes.pop(stripe, None)
        nodes = [] if known is None else list(known.held)
        for node in nodes:
            self._by_node[node].discard(stripe)
        return nodes

    def held_by(self, node: str) -> int:
        """How many fragments a node holds."""
        return len(self._by_node.get(node, ()))

    def holders(self, stripe: str, among: Collection[str]) -> dict[str, int]:
        """Nodes of `among` and the fragment that each holds."""
        known = self._stripes.get(stripe)
        held = {} if known is None else known.held
        return {node: fragment for node, fragment in held.items() if node in among}

    def is_readable(self, stripe: str, among: Collection[str]) -> bool:
        """Whether `among` hold enough of a stripe."""
        fragments = set(self.holders(stripe, among).values())
        return len(fragments) >= self._coding.num_data

    def plan(self, stripe: str, nodes: NodeStates, before_ns: int) -> StripePlan:
        """What is to be done for a stripe; nothing while a node may hold some that has not told.

        Nor is anything done for a stripe first heard of after `before_ns`, which may still be in
        the middle of its write.
        """
        known = self._stripes.get(stripe)
        if known is None or known.heard_ns > before_ns or not nodes.is_complete:
            return StripePlan()
        return plan_stripe(stripe, known.held, self._coding, nodes)


def plan_stripe(
    stripe: str, held: Mapping[str, int], coding: Coding, nodes: NodeStates
) -> StripePlan:
    """What is to be done for a stripe of which `held` tells who has which fragment.

    Fragments of nodes that have been silent for a short while are waited for. Where two nodes have
    the same fragment, the one that comes first in the stripe's order keeps it. A node that leaves
    keeps its fragment until another has it.
    """
    order = rank_nodes(stripe, set(held) | nodes.taking)
    at_hand = {held[node] for node in held if node in nodes.present}
    silent = {node for node in held if node not in nodes.present | nodes.lost}
    if len(at_hand) < coding.num_data:
        if silent or nodes.lost:
            return StripePlan(num_missing=coding.num_fragments - len(at_hand))
        return StripePlan(is_broken=True, drop=tuple(sorted(held)))
    keepers: dict[int, str] = {}
    for node in order:
        if node in held and node in nodes.present - nodes.leaving:
            keepers.setdefault(held[node], node)
    kept = set(keepers) | {held[node] for node in silent}
    missing = [number for number in range(coding.num_fragments) if number not in kept]
    free = [node for node in order if node in nodes.taking and node not in held]
    drop = [
        node for node in held if node in nodes.present and keepers.get(held[node], node) != node
    ]
    make = tuple(zip(missing, free, strict=False))
    return StripePlan(make, tuple(sorted(drop)), len(missing))


class ByteBudget:
    """How many bytes may be moved by now, at `bytes_per_s`; at most a second's worth at once."""

    def __init__(self, bytes_per_s: int, now_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = float(bytes_per_s)
        self._then_ns = now_ns

    def wait_s(self, now_ns: int) -> float:
        """Seconds until more may be moved; 0 if it may be now."""
        self._left += (now_ns - self._then_ns) / 1e9 * self._bytes_per_s
        self._left = min(self._left, float(self._bytes_per_s))
        self._then_ns = now_ns
        return max(0.0, -self._left / self._bytes_per_s)

    def spend(self, num_bytes: int) -> None:
        """So many bytes were moved."""
        self._left -= num_bytes
