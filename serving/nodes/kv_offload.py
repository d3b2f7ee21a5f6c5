"""A worker's use of the KV tiers: what it waits for before a request starts, and what it stores.

    submit -> FetchPrefix -> PrefixFetched -> blocks are written to the device -> the request starts
           \\-> wait budget over, nothing stored, or a fault ------------------/
    commit -> prefixes that became usable -> OfferPrefix -> PrefixWanted -> blocks are read from the
              device -> StorePrefix

A late answer is dropped: blocks are chosen on the device when the request starts, never before.
Until then the prefix is in host memory. A prefix that is offered is pinned until it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

from serving.core.kv_transfer import KVRead, KVTransfer, SwapInTimes
from serving.core.prefix import PrefixKey
from serving.core.prefix_transfer import PrefixTransfers, StagedPrefix
from serving.core.request import Request
from serving.kv.offload import (
    Breaker,
    CacheReply,
    FetchPrefix,
    OfferPrefix,
    OffloadLimits,
    OffloadStatus,
    PrefixFetched,
    PrefixWanted,
    Sightings,
    StorePrefix,
)
from serving.nodes.node import Outbox

_PROBE = "kv probe"
_WAIT = "kv wait "
_OFFER = "kv offer "
_SIGHTINGS = 65536


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a transfer reads, and whose it is."""

    blocks: tuple[PrefixKey, ...]
    state: PrefixKey | None
    salt: str


class KVOffload:
    """The tiers as one worker uses them; its effects go into the worker's outbox.

    Args:
        move: dispatches what is to be written before the next step; None leaves it to the outbox.
    """

    def __init__(
        self,
        outbox: Outbox,
        transfers: PrefixTransfers,
        limits: OffloadLimits,
        move: Callable[[KVTransfer], None] | None = None,
    ) -> None:
        self._outbox = outbox
        self._move = move or outbox.execute
        self._transfers = transfers
        self._limits = limits
        self._breaker = Breaker(limits.faults_max)
        self._sightings = Sightings(_SIGHTINGS)
        # Whose share of the device's memory the prefix of each request goes to.
        self._waiting: dict[str, str] = {}
        self._offers: dict[int, OfferPrefix] = {}
        self._reading: dict[int, _Stored] = {}
        self._num_offers = 0
        self._counts = dict.fromkeys(("hits", "misses", "faults", "late", "skipped", "unused"), 0)
        self._num_fetched_blocks = self._num_stored_blocks = 0
        self._swap_in_ns = self._swap_in_hidden_ns = 0
        transfers.record()
        transfers.deliver = self._deliver

    def fetch(self, request: Request) -> bool:
        """Ask for the stored prefix of a checked request; whether it is to wait for the answer."""
        wanted = self._transfers.wanted(request)
        if wanted is None:
            return False
        is_possible = len(self._waiting) < self._limits.fetching_max
        if not is_possible or not self._breaker.allow():
            self._counts["skipped"] += 1
            return False
        call = FetchPrefix(
            request.request_id,
            wanted.keys,
            wanted.first,
            wanted.num_usable,
            request.cache_salt,
            wanted.has_state,
        )
        self._waiting[request.request_id] = request.cache_owner
        self._outbox.ask_cache(call)
        self._outbox.set_timer(_WAIT + request.request_id, self._limits.wait_ns)
        return True

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._waiting.pop(request_id, None)
        self._transfers.unstage(request_id)

    def on_timer(self, name: str) -> str | None:
        """Take the end of a timer; the request that is to start without its prefix, if any."""
        if name == _PROBE:
            self._breaker.probe()
            self._set_probe()
            return None
        if name.startswith(_OFFER):
            self._close_offer(int(name.removeprefix(_OFFER)))
            return None
        request_id = name.removeprefix(_WAIT)
        if self._waiting.pop(request_id, None) is None:
            return None
        self._counts["late"] += 1
        self._fail()
        return request_id

    def on_reply(self, reply: CacheReply) -> str | None:
        """Take an answer; the request that may start now, if any."""
        match reply:
            case PrefixFetched():
                return self._on_fetched(reply)
            case PrefixWanted():
                self._on_wanted(reply)
                return None

    def on_read(self, read: KVRead) -> None:
        """Store what was read from the device."""
        stored = self._reading.pop(read.transfer_id)
        self._num_stored_blocks += len(stored.blocks)
        self._outbox.ask_cache(StorePrefix(stored.blocks, stored.state, read, stored.salt))

    def on_swap_in(self, times: SwapInTimes | None) -> None:
        """Count how blocks came to the device for a step that is over; None if none did."""
        if times is not None:
            self._swap_in_ns += times.copy_ns
            self._swap_in_hidden_ns += times.hidden_ns

    def offer_kept(self) -> None:
        """Offer the prefixes that became usable since the last call."""
        for salt, keys in self._transfers.take_kept():
            is_seen = self._sightings.see(keys[-1]) >= self._limits.sightings_min
            if not is_seen or len(self._offers) >= self._limits.offers_max or self._breaker.is_open:
                continue
            self._num_offers += 1
            offer = OfferPrefix(self._num_offers, keys, salt)
            self._offers[offer.offer_id] = offer
            self._transfers.pin(offer.offer_id, keys)
            self._outbox.ask_cache(offer)
            # One whose answer was lost is not kept for ever.
            self._outbox.set_timer(f"{_OFFER}{offer.offer_id}", self._limits.retry_ns)

    @property
    def num_offers(self) -> int:
        """Offers that are open, and prefixes that are being read from the device."""
        return len(self._offers) + len(self._reading)

    def status(self) -> OffloadStatus:
        """Counts for metrics."""
        return OffloadStatus(
            num_hits=self._counts["hits"],
            num_misses=self._counts["misses"],
            num_faults=self._counts["faults"],
            num_late=self._counts["late"],
            num_skipped=self._counts["skipped"],
            num_unused=self._counts["unused"],
            num_fetched_blocks=self._num_fetched_blocks,
            num_offered=self._num_offers,
            num_stored_blocks=self._num_stored_blocks,
            swap_in_ns=self._swap_in_ns,
            swap_in_hidden_ns=self._swap_in_hidden_ns,
            num_waiting=len(self._waiting),
            num_opened=self._breaker.num_opened,
            is_open=self._breaker.is_open,
        )

    def _on_fetched(self, reply: PrefixFetched) -> str | None:
        owner = self._waiting.pop(reply.request_id, None)
        if owner is None:
            # Late. It shows that the tiers answer again.
            self._breaker.succeed()
            return None
        if reply.error is not None:
            self._counts["faults"] += 1
            self._breaker.succeed()
        elif reply.prefix is None:
            self._counts["misses"] += 1
            self._breaker.succeed()
        else:
            self._breaker.succeed()
            self._counts["hits"] += 1
            self._stage(reply.request_id, reply.prefix, owner)
        return reply.request_id

    def _stage(self, request_id: str, prefix: StagedPrefix, owner: str) -> None:
        size = self._transfers.num_staged_bytes + prefix.num_bytes
        if size <= self._limits.staged_bytes_max:
            self._transfers.stage(request_id, prefix, owner)
        else:
            self._deliver(self._transfers.write(prefix, owner))

    def _deliver(self, transfer: KVTransfer | None) -> None:
        """Move a prefix to the device before the next step; None if it is of no use there."""
        if transfer is None:
            self._counts["unused"] += 1
        else:
            self._num_fetched_blocks += len(transfer.write_blocks)
            self._move(transfer)

    def _close_offer(self, offer_id: int) -> OfferPrefix | None:
        self._transfers.unpin(offer_id)
        return self._offers.pop(offer_id, None)

    def _on_wanted(self, reply: PrefixWanted) -> None:
        offer = self._close_offer(reply.offer_id)
        has_state = reply.has_state and self._transfers.needs_states
        if offer is None or not (reply.blocks or has_state):
            return
        state = offer.keys[-1] if has_state else None
        transfer, blocks, has_state = self._transfers.read(reply.blocks, state)
        if transfer.is_reading:
            stored = _Stored(blocks, state if has_state else None, offer.salt)
            self._reading[transfer.transfer_id] = stored
            self._outbox.execute(transfer)

    def _fail(self) -> None:
        was_open = self._breaker.is_open
        if self._breaker.fail():
            # Offers that were never answered are not waited for.
            for offer_id in list(self._offers):
                self._close_offer(offer_id)
            if not was_open:
                self._set_probe()

    def _set_probe(self) -> None:
        if self._breaker.is_open:
            self._outbox.set_timer(_PROBE, self._limits.retry_ns)
