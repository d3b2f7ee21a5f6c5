"""The process that owns the host tier and moves payloads between it and storage.

Workers ask it which part of a prompt is stored, and it reads what is not in memory yet, several
requests for the same payload with one read. They hand it what they have computed; it is found from
then on, and written to storage behind the traffic. One thread owns all of the state and answers;
reads and writes of storage happen on others, which hand their results back to it.

    fetch    match -> pin what is there, reserve the rest -> read into the places -> places, lease
    store    reserve -> the worker fills the places -> commit -> pinned until storage has it

A lease or a write of a worker that is gone ends by itself after a while. Whoever still copies from
a place then sees by its generation that it is another's.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import msgspec
import zmq

from serving.clock import Clock, ns_of_s, s_of_ns
from serving.kv import wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.eviction import LimitedTier, TenantLimits
from serving.kv.host_tier import HostTier, Place, SharedArena
from serving.kv.key_bytes import KeysError, split_keys
from serving.kv.offload import Sightings
from serving.kv.pinned_prefixes import PinnedPrefixes, Pinning
from serving.kv.storage_reads import Fetch, StorageReads
from serving.kv.store import BlockStore, Name, PayloadKind, SparesStore, StoreError
from serving.kv.tier_metrics import EvictingStore, histogram_numbers
from serving.kv.write_behind import WriteBehind, WriteBehindOptions

_log = logging.getLogger(__name__)

_READ_THREADS = 4
_SIGHTINGS = 65536
"""Requests that are known again when they are tried again."""

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class FetcherOptions:
    """How the process works.

    Attributes:
        lease_s: time after which what a worker holds is taken back.
        reading_max: requests that storage is read for at one time; one tenant may have half of
            them, the others wait.
        behind: how payloads are written.
    """

    lease_s: float = 60.0
    reading_max: int = 16
    behind: WriteBehindOptions = field(default_factory=WriteBehindOptions)


@dataclass(slots=True)
class _Lease:
    pins: list[tuple[Name, Place]]
    deadline_ns: int


@dataclass(slots=True)
class FetcherCounts:
    """What has happened since the start.

    A request counts as a hit or a miss once, when it is answered, however often it is tried; the
    tries beyond the first are `num_retries`. Payloads of hits are counted by where they were.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_faults: int = 0
    num_from_memory: int = 0
    num_from_storage: int = 0
    num_stored: int = 0
    num_unwritten: int = 0
    num_refused_commits: int = 0
    num_corrupt: int = 0
    num_retries: int = 0


class Fetcher:
    """Serves workers on a socket.

    Args:
        address: where to listen, such as `ipc:///path` or `tcp://127.0.0.1:7000`.
        arena: shared memory made by this process, which is closed at the end.
        store: the storage tier, closed too; None keeps everything in memory only.
        tenant_bytes_max, ttl_s: limits of the host tier, as for the storage tier.
        key: what workers must have; None listens to everybody.

    Raises:
        zmq.ZMQError: it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        arena: SharedArena,
        store: BlockStore | None,
        clock: Clock,
        options: FetcherOptions | None = None,
        tenant_bytes_max: int = 0,
        ttl_s: int = 0,
        key: ClusterKey | None = None,
    ) -> None:
        # First, because it is what can fail.
        self._context, self._socket = wire.bind(address, key)
        self._clock = clock
        self._options = options or FetcherOptions()
        self._arena = arena
        self._host = HostTier(arena, tenant_bytes_max, ttl_s)
        self._store = store
        self._loop = wire.Loop(clock)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.listen(self._socket, self._receive)
        self._loop.every(_TICK_S, self._tick)
        self._readers = ThreadPoolExecutor(_READ_THREADS, "kv-read")
        self._numbers = itertools.count(1)
        self._leases: dict[int, _Lease] = {}
        self._writes: dict[int, _Lease] = {}
        self.counts = FetcherCounts()
        self._sightings = Sightings(_SIGHTINGS)
        self._reads = StorageReads(
            self._host, store, self._in_background, clock, self._finish, self._options.reading_max
        )
        self._prefixes = PinnedPrefixes(
            self._host, self._reads, store, self._ask_store, self._in_background
        )
        self._behind = WriteBehind(self._host, store, self._loop, clock, self._options.behind)

    def run(self) -> None:
        """Serve until asked to stop, then write what is to be written and close everything."""
        self._loop.run()
        self._readers.shutdown(cancel_futures=True)
        self._behind.close()
        self._socket.close()
        self._context.term()
        if self._store is not None:
            self._store.close()
        self._arena.close()

    def limit(self, tenant: bytes, limits: TenantLimits) -> None:
        """Give a tenant limits of its own, in memory and in storage that has any; before `run`."""
        self._host.queue.limit(tenant, limits)
        if isinstance(self._store, LimitedTier):
            self._store.limit(tenant, limits)

    def stop(self) -> None:
        """Let `run` return; from any thread."""
        self._loop.stop()

    def stop_when(self, condition: Callable[[], bool]) -> None:
        """Look now and then whether `run` is to return."""

        def look() -> None:
            if condition():
                self.stop()

        self._loop.every(_TICK_S, look)

    def _receive(self, frames: list[bytes]) -> None:
        client, frame = frames[0], frames[-1]
        try:
            message = wire.decode(frame)
        except msgspec.MsgspecError as error:
            _log.warning("a message that is none: %s", error)
            return
        try:
            self._take(client, message)
        except KeysError as error:
            _log.warning("%s: %s", type(message).__name__, error)

    def _take(self, client: bytes, message: wire.Message) -> None:
        match message:
            case wire.Fetch():
                self._on_fetch(client, message)
            case wire.Release():
                self._on_release(message)
            case wire.Offer():
                self._on_offer(client, message)
            case wire.Reserve():
                self._on_reserve(client, message)
            case wire.Commit():
                self._on_commit(message)
            case wire.Ask():
                self._on_ask(client, message)
            case _:
                _log.warning("%s is nothing that a fetcher answers", type(message).__name__)

    def _send(self, client: bytes, message: wire.Message) -> None:
        self._socket.send_multipart([client, wire.encode(message)])

    def _in_background[T](self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do slow work on a thread of its own and go on with its result on the loop's."""

        def job() -> None:
            result = work()
            self._loop.post(lambda: then(result))

        self._readers.submit(job)

    def _ask_store(self, names: list[Name], then: Callable[[set[Name]], None]) -> None:
        """Go on with those of `names` that are in memory or in storage."""
        now_s = self._clock.unix_s()
        there = {name for name in names if self._host.contains(name, now_s)}
        asked = [name for name in names if name not in there]
        store = self._store
        if not asked or store is None:
            then(there)
            return

        begun_ns = self._clock.now_ns()

        def look_up() -> set[Name]:
            try:
                found = store.contains(asked)
            except StoreError as error:
                _log.warning("look-up failed: %s", error)
                return there
            return there.union(itertools.compress(asked, found))

        def found(there: set[Name]) -> None:
            elapsed_s = s_of_ns(self._clock.now_ns() - begun_ns)
            self._reads.storage.look_up_s.observe(elapsed_s)
            then(there)

        self._in_background(look_up, found)

    # --- match and fetch ---

    def _on_fetch(self, client: bytes, message: wire.Fetch) -> None:
        keys = split_keys(message.keys)
        first, num_usable, has_state = message.first, message.num_usable, message.has_state
        blocks = [Name(PayloadKind.BLOCK, key) for key in keys]
        states = [Name(PayloadKind.STATE, key) for key in keys]

        sighting = (message.request, message.tenant)
        is_counted = not message.request or self._sightings.see(sighting) == 1
        self.counts.num_retries += not is_counted

        def match(there: set[Name]) -> None:
            count = first
            while count < len(blocks) and blocks[count] in there:
                count += 1
            while has_state and count > num_usable and states[count - 1] not in there:
                count -= 1
            if count <= num_usable:
                self.counts.num_misses += is_counted
                self._send(client, wire.Fetched(message.call))
                return
            names = [*blocks[first:count], *(states[count - 1 : count] if has_state else ())]
            fetch = Fetch(client, message.call, names, count, message.tenant)
            fetch.is_counted = is_counted
            self._reads.begin(fetch)

        wanted = states[num_usable:] if has_state else ()
        self._ask_store([*blocks[first:], *wanted], match)

    def _finish(self, fetch: Fetch) -> None:
        if fetch.on_ready is not None:
            fetch.on_ready(fetch)
            return
        pins = list(fetch.pins.items())
        if fetch.error is not None:
            self.counts.num_faults += fetch.is_counted
            for name, place in pins:
                self._host.unpin(name, place)
            self._send(fetch.client, wire.Fetched(fetch.call, error=fetch.error))
            return
        if fetch.is_counted:
            self.counts.num_hits += 1
            self.counts.num_from_memory += len(fetch.names) - fetch.num_read
            self.counts.num_from_storage += fetch.num_read
        lease = next(self._numbers)
        self._leases[lease] = _Lease(pins, self._deadline())
        spans = [_span(fetch.pins[name]) for name in fetch.names]
        has_state = fetch.names[-1].kind == PayloadKind.STATE
        blocks, state = (spans[:-1], spans[-1]) if has_state else (spans, None)
        self._send(
            fetch.client,
            wire.Fetched(
                fetch.call,
                fetch.num_blocks,
                lease,
                str(self._arena.path),
                self._arena.size,
                blocks,
                state,
            ),
        )

    def _on_release(self, message: wire.Release) -> None:
        lease = self._leases.pop(message.lease, None)
        if lease is None:
            return
        for name, place in lease.pins:
            self._host.unpin(name, place)
        damaged = [Name(kind, key) for kind, key in message.corrupt]
        for name in damaged:
            self.counts.num_corrupt += 1
            self._host.forget(name)
        store = self._store
        if damaged and store is not None:
            self._in_background(lambda: store.forget(damaged), lambda _: None)

    # --- store ---

    def _on_offer(self, client: bytes, message: wire.Offer) -> None:
        keys = split_keys(message.keys)
        blocks = [Name(PayloadKind.BLOCK, key) for key in keys]
        state = Name(PayloadKind.STATE, keys[-1])

        def answer(there: set[Name]) -> None:
            wanted = [
                index
                for index, name in enumerate(blocks)
                if name not in there and not self._host.is_known(name)
            ]
            has_state = state not in there and not self._host.is_known(state)
            self._send(client, wire.Wanted(message.call, wanted, has_state))

        self._ask_store([*blocks, state], answer)

    def _on_reserve(self, client: bytes, message: wire.Reserve) -> None:
        now_s = self._clock.unix_s()
        pins: list[tuple[Name, Place]] = []
        places: list[wire.Span | None] = []
        for kind, key, size in message.items:
            name = Name(kind, key)
            place = None
            if not self._host.is_known(name) and not self._reads.is_reading(name):
                place = self._host.reserve(name, size, message.tenant, now_s)
            if place is not None:
                pins.append((name, place))
            places.append(None if place is None else _span(place))
        write = next(self._numbers)
        self._writes[write] = _Lease(pins, self._deadline())
        arena = str(self._arena.path), self._arena.size
        self._send(client, wire.Reserved(message.call, write, *arena, places))

    def _on_commit(self, message: wire.Commit) -> None:
        write = self._writes.pop(message.write, None)
        if write is None:
            # Given up by this side: the places may hold something else.
            self.counts.num_refused_commits += 1
            return
        kept = [pin for pin in write.pins if self._host.commit(*pin)]
        for pin in write.pins:
            if pin not in kept:
                self._host.unpin(*pin)
        self._host.queue.chain([name for name, _ in kept])
        self.counts.num_stored += len(kept)
        self._behind.add(kept)

    def _deadline(self) -> int:
        return self._clock.now_ns() + ns_of_s(self._options.lease_s)

    def _tick(self) -> None:
        now_ns = self._clock.now_ns()
        for leases in (self._leases, self._writes):
            for number, lease in list(leases.items()):
                if now_ns >= lease.deadline_ns:
                    del leases[number]
                    for pin in lease.pins:
                        self._host.unpin(*pin)
        self._host.expire(self._clock.unix_s())
        self._behind.flush_if_due()

    # --- administration ---

    def _on_ask(self, client: bytes, message: wire.Ask) -> None:
        store = self._store

        def answer(numbers: Mapping[str, float | int]) -> None:
            self._send(client, wire.Answer(message.call, dict(numbers)))

        match message.what:
            case "stats":
                answer(self.numbers())
            case "stop":
                answer({})
                self.stop()
            case "flush":
                self._behind.flush_all(lambda: answer({}))
            case "purge":
                names = self._host.queue.of_tenant(message.tenant)
                for name in names:
                    self._host.forget(name)

                def purge() -> dict[str, float | int]:
                    count = 0 if store is None else store.purge(message.tenant)
                    return {"purged": max(count, len(names))}

                self._behind.flush_all(lambda: self._answer_with(client, message, purge))
            case "pin" | "unpin" | "warm":
                self._on_pin(client, message)
            case "verify":

                def verify() -> dict[str, float | int]:
                    return {"corrupt": 0 if store is None else len(store.verify())}

                self._answer_with(client, message, verify)
            case "repair" | "drain" | "rejoin":
                self._on_spares(client, message)
            case _:
                error = (
                    f"{message.what!r} is not known; expected stats, flush, purge, verify, repair, "
                    "drain, rejoin, pin, unpin, warm, stop"
                )
                self._send(client, wire.Answer(message.call, error=error))

    def _on_spares(self, client: bytes, message: wire.Ask) -> None:
        """What only a tier over several nodes can do."""
        store = self._store
        if not isinstance(store, SparesStore):
            error = f"{message.what}: this storage has no nodes; expected kv.storage = 'erasure'"
            self._send(client, wire.Answer(message.call, error=error))
            return

        def work() -> dict[str, float | int]:
            if message.what == "repair":
                return {"repaired": store.repair()}
            return {"fragments": store.leave(message.node, message.what == "drain")}

        self._answer_with(client, message, work)

    def _answer_with(
        self, client: bytes, message: wire.Ask, work: Callable[[], dict[str, float | int]]
    ) -> None:
        """Answer with what comes of slow work, or with why the storage does not do it."""

        def job() -> wire.Answer:
            try:
                return wire.Answer(message.call, work())
            except StoreError as error:
                return wire.Answer(message.call, error=str(error))

        self._in_background(job, lambda answer: self._send(client, answer))

    def _on_pin(self, client: bytes, message: wire.Ask) -> None:
        def answer(result: Pinning) -> None:
            numbers: dict[str, float | int] = {"blocks": result.num_blocks}
            self._send(client, wire.Answer(message.call, numbers, result.error))

        keys = split_keys(message.keys)
        if message.what == "unpin":
            self._prefixes.unpin(keys, answer)
        else:
            self._prefixes.bring(keys, message.tenant or b"", message.what == "pin", answer)

    def numbers(self) -> dict[str, float | int]:
        """What it holds now and has done since its start, under names."""
        numbers: dict[str, float | int] = {
            f"fetch_{key}": value for key, value in asdict(self.counts).items()
        }
        numbers |= {
            "host_payloads": len(self._host.queue),
            "host_bytes": self._host.queue.num_bytes,
            "host_bytes_max": self._arena.size,
            "host_pinned": self._host.num_pinned,
            "host_pinned_by_operators": len(self._prefixes),
            "host_evicted": self._host.num_evicted,
            "fetch_coalesced": self._reads.num_coalesced,
            "leases": len(self._leases),
            "writes": len(self._writes),
            "unwritten": self._behind.num_waiting,
            "unwritten_dropped": self._behind.num_dropped,
        }
        numbers |= self._reads.host.numbers("host")
        numbers |= histogram_numbers("host_evicted_age_seconds", self._host.queue.evicted_age_s)
        if self._store is not None:
            numbers |= self._reads.storage.numbers("storage")
            numbers |= histogram_numbers("storage_write_seconds", self._behind.write_s)
            if isinstance(self._store, EvictingStore):
                ages = self._store.evicted_age_s
                numbers |= histogram_numbers("storage_evicted_age_seconds", ages)
            counts = asdict(self._store.counts())
            numbers |= {f"storage_{key.removeprefix('num_')}": v for key, v in counts.items()}
        return {key.replace("num_", ""): value for key, value in numbers.items()}


def _span(place: Place) -> wire.Span:
    return place.offset, place.size, place.generation
