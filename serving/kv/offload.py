"""What an engine's worker asks of the tiers, what it is told, and when it asks at all.

Everything here is plain data and arithmetic. A worker asks for the stored part of a prompt before
it admits the request, and goes on without it when nothing is stored, when the answer takes longer
than the wait budget, or when the tiers have failed so often that they are left alone for a while.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from serving.core.kv_transfer import KVRead
from serving.core.prefix import PrefixKey
from serving.core.prefix_transfer import StagedPrefix


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Bring the longest stored prefix of `keys` into host memory; `PrefixFetched` follows.

    `first` blocks are present and need not be brought; a prefix of `num_usable` blocks or fewer is
    of no use. With `has_state` only a prefix whose state is stored is.
    """

    request_id: str
    keys: tuple[PrefixKey, ...]
    first: int
    num_usable: int
    salt: str
    has_state: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFetched:
    """What was found: None if nothing of use is stored, or if it could not be read.

    `error` says why, where it is a fault.
    """

    request_id: str
    prefix: StagedPrefix | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """A prefix could be stored: which of it is wanted? `PrefixWanted` follows."""

    offer_id: int
    keys: tuple[PrefixKey, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class PrefixWanted:
    """What is to be stored of an offer: blocks by their keys, and the state at the end or not."""

    offer_id: int
    blocks: tuple[PrefixKey, ...]
    has_state: bool


@dataclass(frozen=True, slots=True, eq=False)
class StorePrefix:
    """Store what was read from the device: blocks under `blocks`, the state under `state`."""

    blocks: tuple[PrefixKey, ...]
    state: PrefixKey | None
    read: KVRead
    salt: str


CacheCall = FetchPrefix | OfferPrefix | StorePrefix
CacheReply = PrefixFetched | PrefixWanted


class CachePort(Protocol):
    """Where a worker's calls go."""

    def call(self, call: CacheCall, reply: Callable[[CacheReply], None]) -> None:
        """Make a call without waiting; `reply` gets the answer on any thread, later or never."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """How far a worker goes with the tiers.

    Attributes:
        wait_ns: time that a request waits for its stored prefix.
        fetching_max: requests that may wait at one time; more go on without.
        faults_max: faults in a row after which the tiers are left alone.
        retry_ns: time until they are asked again.
        offers_max: offers that may be open at one time; more are dropped.
        sightings_min: how often a prefix must have been computed to be offered.
        staged_bytes_max: of fetched prefixes whose requests have not started; more are written to
            the device at once, where others may push them out again.
    """

    wait_ns: int
    fetching_max: int = 256
    faults_max: int = 3
    retry_ns: int = 10_000_000_000
    offers_max: int = 64
    sightings_min: int = 1
    staged_bytes_max: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """Counts since the start, and whether the tiers are left alone now.

    A request is counted once: `num_hits`, `num_misses`, `num_faults`, `num_late` (the wait budget
    was over) and `num_skipped` (not asked). `num_unused` of the hits found no room on the device.
    `swap_in_ns` is how long blocks were copied to the device, and `swap_in_hidden_ns` for how much
    of it the device computed.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_faults: int = 0
    num_late: int = 0
    num_skipped: int = 0
    num_unused: int = 0
    num_fetched_blocks: int = 0
    num_offered: int = 0
    num_stored_blocks: int = 0
    swap_in_ns: int = 0
    swap_in_hidden_ns: int = 0
    num_waiting: int = 0
    num_opened: int = 0
    is_open: bool = False


class Breaker:
    """Opens after faults in a row; then one call is let through now and then, to see.

    It knows no time: whoever owns it calls `probe` when it is time to try again.
    """

    def __init__(self, faults_max: int) -> None:
        self._faults_max = faults_max
        self._num_faults = 0
        self._may_probe = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        return self._num_faults >= self._faults_max

    def allow(self) -> bool:
        """Whether a call may be made now."""
        if not self.is_open:
            return True
        allowed, self._may_probe = self._may_probe, False
        return allowed

    def probe(self) -> None:
        """Let the next call through."""
        self._may_probe = True

    def succeed(self) -> None:
        """A call was answered."""
        self._num_faults = 0

    def fail(self) -> bool:
        """A call was not answered, or with a fault; whether the breaker is open now."""
        if not self.is_open and self._num_faults + 1 >= self._faults_max:
            self.num_opened += 1
        self._num_faults += 1
        return self.is_open


class Sightings:
    """How often things were seen, of the last `size` different ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def see(self, thing: Hashable) -> int:
        """Count one more sighting; how many there are now."""
        count = self._counts.pop(thing, 0) + 1
        self._counts[thing] = count
        if len(self._counts) > self._size:
            self._counts.popitem(last=False)
        return count
