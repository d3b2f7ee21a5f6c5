"""Makes missing fragments anew, in the background and no faster than it is allowed to.

Several cache processes on the same nodes may all do this; a fragment that two of them make is made
twice and removed once, which costs nothing but bytes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.clock import Clock
from serving.kv import storage_wire
from serving.kv.fragments import CorruptFragmentError, FragmentHead, StripeCodec
from serving.kv.stripe_calls import StripeCalls
from serving.kv.stripes import ByteBudget, StripePlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """How fragments are made anew.

    Attributes:
        every_s: time between two looks at what is missing.
        after_s: a node that is silent for so long is lost, and what it holds is made anew.
        settle_s: stripes that were first heard of within this time may still be being written.
        bytes_per_s: read and written for it.
        call_s: time for one read or write of fragments.
    """

    every_s: float = 2.0
    after_s: float = 60.0
    settle_s: float = 30.0
    bytes_per_s: int = 64 * 2**20
    call_s: float = 10.0


Plans = Callable[[], Sequence[tuple[str, Mapping[str, int], StripePlan]]]
"""Stripes of which something is to be done: who holds what of them, and what."""

Placed = Callable[[str, Mapping[str, int]], None]
"""Called with a stripe and the nodes that have a fragment of it now."""


class StripeRepair:
    """Works off what `plans` names. Start it with `start`, end it with `close`.

    Attributes:
        num_missing: fragments that were missing at the last look.
        num_made: since the start.
    """

    def __init__(
        self,
        calls: StripeCalls,
        codec: StripeCodec,
        plans: Plans,
        placed: Placed,
        clock: Clock,
        options: RepairOptions,
    ) -> None:
        self._calls = calls
        self._codec = codec
        self._plans = plans
        self._placed = placed
        self._clock = clock
        self._options = options
        self._budget = ByteBudget(options.bytes_per_s, clock.now_ns())
        self._is_closing = threading.Event()
        # A round that was asked for waits for the one that is under way.
        self._round = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-repair", daemon=True)
        self.num_missing = self.num_made = 0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Return when nothing is done any more."""
        self._is_closing.set()
        self._thread.join()

    def run_once(self) -> int:
        """Do all that can be done now; how many fragments were made."""
        with self._round:
            made = 0
            plans = self._plans()
            self.num_missing = sum(plan.num_missing for _, _, plan in plans)
            for stripe, holders, plan in plans:
                if self._is_closing.is_set():
                    break
                if plan.drop:
                    self._calls.tell(plan.drop, lambda stripe=stripe: _drop(stripe))
                if plan.make:
                    num_made = self._make(stripe, holders, plan)
                    made += num_made
                    self.num_made += num_made
                    self.num_missing -= num_made
            return made

    def _run(self) -> None:
        while not self._is_closing.wait(self._options.every_s):
            self.run_once()

    def _make(self, stripe: str, holders: Mapping[str, int], plan: StripePlan) -> int:
        """Make fragments of one stripe; how many have been written."""
        if self._is_closing.wait(self._budget.wait_s(self._clock.now_ns())):
            return 0
        wanted = {fragment for fragment, _ in plan.make}
        sources = {node: number for node, number in holders.items() if number in wanted}
        if len(sources) == len(wanted):
            # Of nodes that leave: as they are.
            whole = self._calls.copy(stripe, sources, len(sources), self._options.call_s)
        else:
            num_data = self._codec.coding.num_data
            whole = self._calls.copy(stripe, holders, num_data, self._options.call_s)
        try:
            made = self._rebuild(whole, sorted(wanted))
        except CorruptFragmentError as error:
            _log.warning("stripe %s is not repaired: %s", stripe, error)
            return 0
        self._budget.spend(_num_bytes(whole) + _num_bytes(made))
        places = {node: fragment for fragment, node in plan.make if fragment in made}
        data = {
            node: (made[fragment][0].encode(), made[fragment][1])
            for node, fragment in places.items()
        }
        call_s = self._options.call_s
        done = self._calls.scatter(stripe, data, places, len(places), call_s, call_s)
        for node, why in done.refused.items():
            _log.warning("storage node %s did not take a repaired fragment: %s", node, why)
        self._placed(stripe, done.placed)
        return len(done.placed)

    def _rebuild(
        self, whole: Mapping[int, tuple[FragmentHead, list[bytes]]], wanted: Sequence[int]
    ) -> dict[int, tuple[FragmentHead, Sequence[bytes]]]:
        """Fragments of a stripe from whole others.

        Raises:
            CorruptFragmentError: they do not belong together.
        """
        made: dict[int, tuple[FragmentHead, Sequence[bytes]]] = {
            number: whole[number] for number in wanted if number in whole
        }
        missing = [number for number in wanted if number not in whole]
        if not missing or len(whole) < self._codec.coding.num_data:
            return made
        head, pieces = next(iter(whole.values()))
        if any(other.rows != head.rows for other, _ in whole.values()):
            raise CorruptFragmentError("fragments tell of different payloads")
        by_payload = [
            self._codec.rebuild({n: pieces[index] for n, (_, pieces) in whole.items()}, missing)
            for index in range(len(pieces))
        ]
        for position, number in enumerate(missing):
            rebuilt = [pieces[position] for pieces in by_payload]
            made[number] = head.of_fragment(number, rebuilt), rebuilt
        return made


def _drop(stripe: str) -> storage_wire.Drop:
    return storage_wire.Drop(0, [stripe])


def _num_bytes(fragments: Mapping[int, tuple[FragmentHead, Sequence[bytes]]]) -> int:
    return sum(len(piece) for _, pieces in fragments.values() for piece in pieces)
