"""Payloads in stripes over storage nodes, of which some may be gone.

A call to `write` makes one stripe. It counts as stored when so many nodes have their fragment on
their disks that one more may be lost; the others follow, or are repaired. What there is, the nodes
tell: at the start, and whenever something changes. So several of these tiers may use the same
nodes, each finds what the others have written, and none of them keeps anything that could be lost.
"""

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving.clock import Clock, ns_of_s
from serving.kv import storage_wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.fragments import CorruptFragmentError, StripeCodec
from serving.kv.indexed_tier import IndexedTier
from serving.kv.node_links import LinkTimes, NodeLinks
from serving.kv.segment_index import Row, SegmentIndex
from serving.kv.store import (
    Buffer,
    CorruptPayloadError,
    Name,
    StoreCounts,
    StoreError,
    read_header,
)
from serving.kv.stripe_calls import Scattered, StripeCalls
from serving.kv.stripe_repair import RepairOptions, StripeRepair
from serving.kv.stripes import Coding, NodeStates, StripeMap, StripePlan, rank_nodes

_log = logging.getLogger(__name__)

_DROPPED_MAX = 100_000
_VERIFY_S = 3600.0
_FULL_S = 30.0
"""A node that could not write is not asked to for so long."""


@dataclass(frozen=True, slots=True)
class ErasureTimes:
    """How long what may take.

    Attributes:
        start_s: to hear from all nodes at the start.
        read_s: a read, after which what has not come is a miss.
        write_s: a write.
        grace_s: to wait for the slowest nodes of a write that counts already.
        link: when a node counts as silent.
    """

    start_s: float = 5.0
    read_s: float = 2.0
    write_s: float = 10.0
    grace_s: float = 1.0
    link: LinkTimes = field(default_factory=LinkTimes)


class ErasureTier(IndexedTier):
    """A `BlockStore` over storage nodes.

    Args:
        nodes: name -> address. It is enough to know some of them.
        coding: of the stripes that are written.
        bytes_max: of the fragments on all nodes together.
        tenant_bytes_max: of the payloads of one tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept; 0 is no limit.
        random_source: of the names of stripes, which nobody may have given before.
    """

    def __init__(
        self,
        nodes: Mapping[str, str],
        coding: Coding,
        bytes_max: int,
        key: ClusterKey | None,
        clock: Clock,
        random_source: random.Random,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
        times: ErasureTimes | None = None,
        repair: RepairOptions | None = None,
    ) -> None:
        super().__init__(SegmentIndex(bytes_max, tenant_bytes_max, ttl_s))
        self._clock = clock
        self._coding = coding
        self._random = random_source
        self._times = times or ErasureTimes()
        self._repair_options = repair or RepairOptions()
        self._map = StripeMap(coding)
        self._dropped: dict[str, None] = {}
        self._listed: set[str] = set()
        self._is_listed = threading.Event()
        self._leaving: set[str] = set()
        self._full_until_ns: dict[str, int] = {}
        self._num_written = self._num_read = self._num_corrupt = self._num_failed = 0
        self._bytes_written = self._bytes_read = self._num_degraded = 0
        self._codec = StripeCodec(coding)
        self._first_nodes = frozenset(nodes)
        self._links = NodeLinks(nodes, key, clock, self._on_listing, self._times.link)
        self._calls = StripeCalls(self._links, coding, clock)
        self._links.start()
        if not self._is_listed.wait(self._times.start_s):
            silent = sorted(self._first_nodes - self._listed)
            _log.warning("storage nodes that do not answer: %s", ", ".join(silent))
        self._repair = StripeRepair(
            self._calls, self._codec, self._plans, self._on_placed, clock, self._repair_options
        )
        self._repair.start()

    # --- BlockStore ---

    def contains(self, names: Sequence[Name]) -> list[bool]:
        """Which payloads are not too old and have enough fragments on nodes that answer."""
        now_s = self._clock.unix_s()
        present = self._links.present()
        known: dict[str, bool] = {}
        with self._lock:
            locations = [self._index.find(name, now_s) for name in names]
            for location in locations:
                if location is not None and location.segment not in known:
                    stripe = location.segment
                    known[stripe] = self._map.is_readable(stripe, present)
        return [place is not None and known[place.segment] for place in locations]

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        """The payloads, checked; None for those of which too little comes in time."""
        now_s = self._clock.unix_s()
        present = self._links.present()
        places: dict[Name, tuple[str, int]] = {}
        wanted: dict[str, set[int]] = {}
        with self._lock:
            self._index.chain(names)
            for name in reversed(names):
                location = self._index.find(name, now_s)
                if location is None:
                    continue
                self._index.touch(name)
                if self._map.is_readable(location.segment, present):
                    places[name] = location.segment, location.number
                    wanted.setdefault(location.segment, set()).add(location.number)
            holders = {stripe: self._map.holders(stripe, present) for stripe in wanted}
        ordered = {stripe: sorted(numbers) for stripe, numbers in wanted.items()}
        gathered = self._calls.gather(ordered, holders, self._times.read_s)
        self._report_damage(gathered.damaged)
        whole = {stripe for stripe, held in holders.items() if self._is_whole(held)}
        whole -= {stripe for _, stripe in gathered.damaged}
        found: dict[Name, Buffer] = {}
        for name, place in places.items():
            data = self._decode(name, gathered.pieces[place])
            if data is not None:
                found[name] = data
        with self._lock:
            self._num_read += len(found)
            self._bytes_read += sum(map(len, found.values()))
            self._num_degraded += sum(places[name][0] not in whole for name in found)
        return [found.get(name) for name in names]

    def write(self, payloads: Sequence[Buffer]) -> None:
        """Store payloads as one stripe.

        Those that are stored already are passed over, and so are those that a limit of their
        tenant has no room for.

        Raises:
            StoreError: too few nodes have taken their fragments; none of it counts as stored.
        """
        with self._lock:
            self._forget_unreadable(payloads)
            self._index.expire(self._clock.unix_s())
            rows, parts = self._index.choose(payloads)
            self._drop_removed()
        if not rows:
            return
        stripe = self._random.randbytes(16).hex()
        fragments = [
            (head.encode(), pieces)
            for head, pieces in self._codec.encode_stripe(stripe, rows, parts)
        ]
        size = sum(len(head) + sum(map(len, pieces)) for head, pieces in fragments)
        with self._lock:
            self._index.make_room(size)
            self._drop_removed()
        nodes = rank_nodes(stripe, self._states().taking)[: self._coding.num_fragments]
        places = {node: fragment for fragment, node in enumerate(nodes)}
        num_min = self._coding.num_written_min
        done = Scattered()
        if len(places) >= num_min:
            data = {node: fragments[fragment] for node, fragment in places.items()}
            times = self._times
            done = self._calls.scatter(stripe, data, places, num_min, times.write_s, times.grace_s)
            self._mark_full(done.refused)
            if len(done.placed) >= num_min:
                with self._lock:
                    self._on_placed(stripe, done.placed)
                    self._index.adopt(stripe, rows, size)
                    self._num_written += len(rows)
                    self._bytes_written += sum(map(len, parts))
                return
        self._give_up(stripe, nodes)
        said = ", ".join(f"{node}: {why}" for node, why in sorted(done.refused.items()))
        raise StoreError(
            f"{len(done.placed)} storage nodes have taken a fragment; expected at least "
            f"{num_min} of {len(self._links.nodes)}" + (f" ({said})" if said else "")
        )

    def forget(self, names: Sequence[Name]) -> None:
        """Drop payloads from the index; their bytes go with their stripes."""
        with self._lock:
            self._index.forget(names)
            self._drop_removed()

    def purge(self, tenant: bytes | None) -> int:
        """Drop all payloads of a tenant, or of everybody, for good; how many there were.

        What shares their stripes is written anew. A node that is away removes its fragments when
        it is heard of again.
        """
        with self._lock:
            names = self._index.of_tenant(tenant)
            now_s = self._clock.unix_s()
            places = [self._index.find(name, now_s) for name in names]
            touched = {place.segment for place in places if place is not None}
            self._index.forget(names)
            left = [name for stripe in touched for name in self._index.in_segment(stripe)]
        survivors = [data for data in self.read(left) if data is not None]
        with self._lock:
            for stripe in touched:
                self._index.remove(stripe)
            self._drop_removed()
        self.write(survivors)
        return len(names)

    def verify(self) -> list[Name]:
        """Have all nodes look at every byte; what cannot be read by that is forgotten and named.

        Damaged fragments of others are removed, and made anew in the background.
        """
        answers = self._calls.ask(self._links.present(), lambda: storage_wire.Check(0), _VERIFY_S)
        num_damaged = sum(int(answer.numbers.get("corrupt", 0)) for answer in answers.values())
        with self._lock:
            self._num_corrupt += num_damaged
            names = list(self._index)
        lost = [name for name, there in zip(names, self.contains(names), strict=True) if not there]
        self.forget(lost)
        return lost

    def counts(self) -> StoreCounts:
        """What the tier has done and holds; bytes are those of fragments on all nodes."""
        with self._lock:
            return StoreCounts(
                num_payloads=len(self._index),
                num_bytes=self._index.num_bytes,
                num_written=self._num_written,
                num_read=self._num_read,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                num_corrupt=self._num_corrupt,
                num_evicted=self._index.num_evicted,
                num_failed=self._num_failed,
                num_repaired=self._repair.num_made,
                num_degraded=self._num_degraded,
                num_missing=self._repair.num_missing,
                num_nodes=len(self._links.nodes),
                num_nodes_away=len(self._links.nodes - self._links.present()),
            )

    def close(self) -> None:
        """Leave the nodes alone."""
        self._repair.close()
        self._links.close()

    # --- what not every tier does ---

    def repair(self) -> int:
        """Make all missing fragments anew that can be made now; how many there were."""
        return self._repair.run_once()

    def leave(self, node: str, is_leaving: bool = True) -> int:
        """Have a node give away what it holds, or no longer; the number of its fragments.

        Raises:
            StoreError: there is no such node, or it does not answer.
        """
        if node not in self._links.nodes:
            known = ", ".join(sorted(self._links.nodes))
            raise StoreError(f"no storage node is called {node!r}; expected one of {known}")
        answers = self._calls.ask([node], lambda: storage_wire.Leave(0, is_leaving), 10.0)
        if node not in answers or answers[node].error is not None:
            raise StoreError(f"storage node {node} does not answer, or cannot remember it")
        with self._lock:
            (self._leaving.add if is_leaving else self._leaving.discard)(node)
        return int(answers[node].numbers["fragments"])

    def _is_whole(self, held: Mapping[str, int]) -> bool:
        return len(set(held.values())) == self._coding.num_fragments

    def _decode(self, name: Name, pieces: Mapping[int, bytes]) -> Buffer | None:
        if len(pieces) < self._coding.num_data:
            return None
        try:
            data = self._codec.decode(pieces)
            # Every piece has been checked, and whoever uses the payload checks it once more.
            header = read_header(data)
            if header.name != name or header.size != len(data):
                raise CorruptPayloadError(f"another payload lies where {name} should")
        except (CorruptFragmentError, CorruptPayloadError) as error:
            _log.warning("a stripe is not what it should be: %s", error)
            with self._lock:
                self._num_corrupt += 1
            self.forget([name])
            return None
        return data

    def _report_damage(self, damaged: set[tuple[str, str]]) -> None:
        """Have nodes look at fragments with pieces that were not good."""
        with self._lock:
            self._num_corrupt += len(damaged)
        for node, stripe in damaged:
            self._calls.tell([node], lambda stripe=stripe: storage_wire.Check(0, [stripe]))

    def _forget_unreadable(self, payloads: Sequence[Buffer]) -> None:
        """What cannot be read counts as not stored, so that it can be stored anew."""
        names = [Row.of(data).name for data in payloads]
        there = self.contains(names)
        self._index.forget(name for name, found in zip(names, there, strict=True) if not found)

    def _drop_removed(self) -> None:
        for stripe in self._index.take_removed():
            nodes = self._map.pop(stripe)
            self._remember_dropped(stripe)
            self._calls.tell(nodes, lambda stripe=stripe: storage_wire.Drop(0, [stripe]))

    def _give_up(self, stripe: str, nodes: Sequence[str]) -> None:
        """A write has failed: what was written of it, or will be, is to go."""
        with self._lock:
            self._num_failed += 1
            self._index.remove(stripe)
            self._index.take_removed()
            self._map.pop(stripe)
            self._remember_dropped(stripe)
        self._calls.tell(nodes, lambda: storage_wire.Drop(0, [stripe]))

    def _remember_dropped(self, stripe: str) -> None:
        self._dropped[stripe] = None
        if len(self._dropped) > _DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def _mark_full(self, refused: Mapping[str, str]) -> None:
        until_ns = self._clock.now_ns() + ns_of_s(_FULL_S)
        for node, why in refused.items():
            _log.warning("storage node %s did not take a fragment: %s", node, why)
            if why != "no answer":
                self._full_until_ns[node] = until_ns

    def _on_placed(self, stripe: str, placed: Mapping[str, int]) -> None:
        with self._lock:
            for node, fragment in placed.items():
                self._map.add(node, stripe, fragment, self._clock.now_ns())

    def _on_listing(self, node: str, listing: storage_wire.Listing) -> None:
        """A node has told what has changed there. On the thread of the lines."""
        unwanted: list[str] = []
        with self._lock:
            before = set(self._map.stripes) if listing.is_anew else set(listing.dropped)
            if listing.is_anew:
                self._map.remove_node(node)
            for stripe in listing.dropped:
                self._map.remove(node, stripe)
            for stripe, fragment, size, rows in listing.held:
                if stripe in self._dropped:
                    unwanted.append(stripe)
                    continue
                self._map.add(node, stripe, fragment, self._clock.now_ns())
                self._index.adopt(stripe, rows, size * self._coding.num_fragments)
            if not listing.has_more:
                self._listed.add(node)
                gone = before.difference(self._map.stripes)
                for stripe in gone:
                    self._index.remove(stripe)
            (self._leaving.add if listing.is_leaving else self._leaving.discard)(node)
            self._drop_removed()
        if unwanted:
            self._calls.tell([node], lambda: storage_wire.Drop(0, unwanted))
        if self._first_nodes <= self._listed:
            self._is_listed.set()

    def _states(self) -> NodeStates:
        now_ns = self._clock.now_ns()
        present = self._links.present()
        lost = self._links.lost(self._repair_options.after_s) - present
        with self._lock:
            full = {node for node, until_ns in self._full_until_ns.items() if now_ns < until_ns}
            is_complete = self._links.nodes <= self._listed | lost
            leaving = frozenset(self._leaving)
        return NodeStates(present, lost, leaving, frozenset(full), is_complete)

    def _plans(self) -> list[tuple[str, Mapping[str, int], StripePlan]]:
        """What is to be done, for stripes of which something is."""
        states = self._states()
        before_ns = self._clock.now_ns() - ns_of_s(self._repair_options.settle_s)
        found: list[tuple[str, Mapping[str, int], StripePlan]] = []
        with self._lock:
            for stripe in self._map.stripes:
                plan = self._map.plan(stripe, states, before_ns)
                if plan.is_broken:
                    self._index.remove(stripe)
                if plan != StripePlan():
                    found.append((stripe, self._map.holders(stripe, states.present), plan))
            self._drop_removed()
        return found
