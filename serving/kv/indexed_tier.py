"""What storage tiers with an index of their own do alike."""

import threading
from collections.abc import Mapping, Sequence

from serving.kv.eviction import TenantLimits
from serving.kv.segment_index import SegmentIndex
from serving.kv.store import Name
from serving.observe import Histogram


class IndexedTier:
    """A tier whose payloads are in a `SegmentIndex`, which the lock guards."""

    def __init__(self, index: SegmentIndex) -> None:
        self._index = index
        self._lock = threading.RLock()

    def pin(self, names: Sequence[Name], is_pinned: bool) -> int:
        """Keep payloads from being evicted, or no longer; how many of them there are."""
        with self._lock:
            return self._index.keep(names, is_pinned)

    def limit(self, tenant: bytes, limits: TenantLimits) -> None:
        """Give a tenant limits of its own."""
        with self._lock:
            self._index.limit(tenant, limits)

    @property
    def evicted_age_s(self) -> Histogram:
        """How old was what made room for others."""
        return self._index.evicted_age_s

    def sizes(self) -> Mapping[bytes, int]:
        """Bytes of the payloads of each tenant."""
        with self._lock:
            return self._index.tenant_bytes
