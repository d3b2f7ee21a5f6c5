"""Which payloads of a tier go when there is no room: least recently used first, within limits.

The order of use is given by the caller. Whoever uses a prefix touches its blocks from the last to
the first, so that within a prefix the end goes first: a block without those before it is of no use.

Limits, in the order in which they act:

1. a payload older than its time to live goes whatever it is used for;
2. a tenant above its share makes room from its own payloads, so that none pushes out another;
3. the tier as a whole stays within its bytes.

What is pinned does not go.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serving.kv.store import Name


@dataclass(slots=True)
class _Item:
    size: int
    tenant: bytes
    written_s: int
    num_pins: int = 0


class EvictionQueue:
    """The payloads of one tier in the order of their use.

    Args:
        bytes_max: of the tier.
        tenant_bytes_max: of each tenant; 0 is no limit.
        ttl_s: seconds that a payload is kept after it was written; 0 is no limit.
    """

    def __init__(self, bytes_max: int, tenant_bytes_max: int = 0, ttl_s: int = 0) -> None:
        self.bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max or sys.maxsize
        self._ttl_s = ttl_s
        self._items: OrderedDict[Name, _Item] = OrderedDict()
        self._by_tenant: dict[bytes, OrderedDict[Name, None]] = {}
        self._tenant_bytes: dict[bytes, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[Name]:
        return iter(self._items)

    @property
    def tenant_bytes(self) -> dict[bytes, int]:
        """Bytes of each tenant that has any."""
        return dict(self._tenant_bytes)

    def of_tenant(self, tenant: bytes | None) -> list[Name]:
        """The payloads of a tenant, least recently used first; those of all for None."""
        return list(self._items if tenant is None else self._by_tenant.get(tenant, ()))

    def add(self, name: Name, size: int, tenant: bytes, written_s: int) -> None:
        """A payload that was not there, as the one used last."""
        assert name not in self._items, f"{name} is added twice"
        self._items[name] = _Item(size, tenant, written_s)
        self._by_tenant.setdefault(tenant, OrderedDict())[name] = None
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        self.num_bytes += size

    def touch(self, name: Name) -> None:
        """The payload is used."""
        self._items.move_to_end(name)
        self._by_tenant[self._items[name].tenant].move_to_end(name)

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
        return bool(self._ttl_s) and now_s - self._items[name].written_s > self._ttl_s

    def remove(self, name: Name) -> None:
        """The payload is gone."""
        item = self._items.pop(name)
        names = self._by_tenant[item.tenant]
        del names[name]
        self.num_bytes -= item.size
        self._tenant_bytes[item.tenant] -= item.size
        if not names:
            del self._by_tenant[item.tenant], self._tenant_bytes[item.tenant]

    def fits(self, size: int, tenant: bytes) -> bool:
        """Whether so many bytes of a tenant would be within the limits."""
        within = self._tenant_bytes.get(tenant, 0) + size <= self._tenant_bytes_max
        return within and self.num_bytes + size <= self.bytes_max

    def victim(self, size: int, tenant: bytes) -> Name | None:
        """The next payload to go, so that `size` bytes of a tenant fit; None if none may go."""
        if self._tenant_bytes.get(tenant, 0) + size > self._tenant_bytes_max:
            return self._first_unpinned(self._by_tenant.get(tenant, ()))
        return self._first_unpinned(self._items)

    def expired(self, now_s: int) -> list[Name]:
        """Payloads that are too old and not pinned."""
        if not self._ttl_s:
            return []
        return [
            name
            for name, item in self._items.items()
            if not item.num_pins and now_s - item.written_s > self._ttl_s
        ]

    def _first_unpinned(self, names: Iterable[Name]) -> Name | None:
        return next((name for name in names if not self._items[name].num_pins), None)
