"""Which payloads of a tier go when there is no room: the order of `replacement`, within limits.

Within a prefix the end goes first: a block without those before it is of no use. So whoever uses or
adds a prefix does so from its last block to its first, and says with `chain` which payloads stand
behind which.

Limits, in the order in which they act:

1. a payload older than its time to live goes whatever it is used for;
2. a tenant above its share makes room from its own payloads, so that none pushes out another;
3. the tier as a whole stays within its bytes.

What is pinned does not go, and what others stand behind goes after them.
"""

import itertools
import sys
from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from serving.kv.replacement import Entry, S3Fifo
from serving.kv.store import Name
from serving.kv.tier_metrics import AGE_BOUNDS_S
from serving.observe import Histogram


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have in a tier: so many bytes, for so many seconds; 0 is no limit."""

    bytes_max: int = 0
    ttl_s: int = 0


@runtime_checkable
class LimitedTier(Protocol):
    """A tier whose tenants may have limits of their own."""

    def limit(self, tenant: bytes, limits: TenantLimits) -> None:
        """Give a tenant limits of its own."""
        ...


@dataclass(slots=True, eq=False)
class _Item(Entry):
    tenant: bytes = b""
    written_s: int = 0
    value: object = None
    own: Entry | None = None
    num_pins: int = 0
    num_behind: int = 0
    before: "_Item | None" = None


class EvictionQueue:
    """The payloads of one tier in the order in which they go, each with a value of the tier's.

    Args:
        bytes_max: of the tier.
        tenant_bytes_max: of each tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept after it was written; 0 is no limit.
    """

    def __init__(self, bytes_max: int, tenant_bytes_max: int = 0, ttl_s: int = 0) -> None:
        self.bytes_max = bytes_max
        self._limits = TenantLimits(tenant_bytes_max, ttl_s)
        # Of tenants that have others than those.
        self._own_limits: dict[bytes, TenantLimits] = {}
        self._items: dict[Name, _Item] = {}
        self._order: S3Fifo[_Item] = S3Fifo()
        # An order of its own for each tenant, if there is a limit that needs it.
        self._by_tenant: dict[bytes, S3Fifo[Entry]] = {}
        self._tenant_bytes: dict[bytes, int] = {}
        self._tenants: dict[bytes, bytes] = {}
        self._victim: Name | None = None
        self._now_s = 0
        self.evicted_age_s = Histogram(AGE_BOUNDS_S)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    @property
    def names(self) -> KeysView[Name]:
        """The payloads, as they came."""
        return self._items.keys()

    @property
    def has_ttl(self) -> bool:
        """Whether payloads grow too old at all."""
        return any(limits.ttl_s for limits in (self._limits, *self._own_limits.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return self._order.num_bytes

    @property
    def tenant_bytes(self) -> dict[bytes, int]:
        """Bytes of each tenant that has any."""
        return dict(self._tenant_bytes)

    def of_tenant(self, tenant: bytes | None) -> list[Name]:
        """The payloads of a tenant, or those of all for None, as they came."""
        return [name for name, item in self._items.items() if tenant in (None, item.tenant)]

    def add(
        self, name: Name, size: int, tenant: bytes, written_s: int, value: object = None
    ) -> None:
        """A payload that was not there."""
        assert name not in self._items, f"{name} is added twice"
        # One object for equal names of tenants, of which there are many.
        tenant = self._tenants.setdefault(tenant, tenant)
        item = self._items[name] = _Item(name, size, 0, tenant, written_s, value)
        self._order.add(item)
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        if self._limits_of(tenant).bytes_max:
            self._add_own(item)

    def limit(self, tenant: bytes, limits: TenantLimits) -> None:
        """Give a tenant limits of its own; what it has beyond them goes with its next payload."""
        self._own_limits[tenant] = limits
        if limits.bytes_max:
            for item in self._items.values():
                if item.tenant == tenant and item.own is None:
                    self._add_own(item)

    def _limits_of(self, tenant: bytes) -> TenantLimits:
        return self._own_limits.get(tenant, self._limits)

    def _add_own(self, item: _Item) -> None:
        item.own = Entry(item.name, item.size)
        self._by_tenant.setdefault(item.tenant, S3Fifo()).add(item.own)

    def value(self, name: Name) -> object:
        """What was given for a payload; None if it is not there."""
        item = self._items.get(name)
        return None if item is None else item.value

    def touch(self, name: Name) -> None:
        """The payload is used."""
        item = self._items[name]
        self._order.touch(item)
        if item.own is not None:
            self._by_tenant[item.tenant].touch(item.own)

    def chain(self, names: Sequence[Name]) -> None:
        """Payloads of one prefix, in order; those that are not here are passed over."""
        items = [item for name in names if (item := self._items.get(name)) is not None]
        for before, item in itertools.pairwise(items):
            if item.before is not before:
                _part(item)
                item.before = before
                before.num_behind += 1

    def pin(self, name: Name) -> None:
        """Keep a payload until it is unpinned as often."""
        self._items[name].num_pins += 1

    def unpin(self, name: Name) -> None:
        """Take back one pin."""
        item = self._items[name]
        assert item.num_pins > 0, f"{name} is not pinned"
        item.num_pins -= 1

    def is_pinned(self, name: Name) -> bool:
        """Whether the payload must stay."""
        return self._items[name].num_pins > 0

    def is_expired(self, name: Name, now_s: int) -> bool:
        """Whether the payload is older than its time to live."""
        self._now_s = max(self._now_s, now_s)
        item = self._items[name]
        ttl_s = self._limits_of(item.tenant).ttl_s
        return bool(ttl_s) and now_s - item.written_s > ttl_s

    def remove(self, name: Name) -> None:
        """The payload is gone."""
        item = self._items.pop(name)
        _part(item)
        if name == self._victim:
            # As far as this queue has been told how late it is.
            self.evicted_age_s.observe(max(0, self._now_s - item.written_s))
        self._order.remove(item)
        if item.own is not None:
            self._by_tenant[item.tenant].remove(item.own)
        self._tenant_bytes[item.tenant] -= item.size
        if not self._tenant_bytes[item.tenant]:
            del self._tenant_bytes[item.tenant]

    def fits(self, size: int, tenant: bytes) -> bool:
        """Whether so many bytes of a tenant would be within the limits."""
        return self._fits_tenant(size, tenant) and self.num_bytes + size <= self.bytes_max

    def victim(self, size: int, tenant: bytes) -> Name | None:
        """The next payload to go, so that `size` bytes of a tenant fit; None if none may go."""
        if self._fits_tenant(size, tenant):
            entry = self._order.victim(_may_go)
        else:
            own = self._by_tenant.get(tenant)
            entry = None if own is None else own.victim(self._may_own_go)
        self._victim = None if entry is None else cast("Name", entry.name)
        return self._victim

    def expired(self, now_s: int) -> list[Name]:
        """Payloads that are too old and not pinned."""
        if not self.has_ttl:
            return []
        return [
            name
            for name, item in self._items.items()
            if not item.num_pins and self.is_expired(name, now_s)
        ]

    def _fits_tenant(self, size: int, tenant: bytes) -> bool:
        bytes_max = self._limits_of(tenant).bytes_max or sys.maxsize
        return self._tenant_bytes.get(tenant, 0) + size <= bytes_max

    def _may_own_go(self, own: Entry) -> bool:
        return _may_go(self._items[cast("Name", own.name)])


def _may_go(item: _Item) -> bool:
    return not (item.num_pins or item.num_behind)


def _part(item: _Item) -> None:
    """The payload stands behind nothing any more."""
    if item.before is not None:
        item.before.num_behind -= 1
        item.before = None
