"""The numbers of the KV tiers' process as metrics: `deepinfer_kv_` and the names it gives them."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

_BUCKET = re.compile(r'(.+)_bucket\{le="([^"]+)"\}')
_GAUGES = frozenset(
    {
        "host_payloads",
        "host_bytes",
        "host_bytes_max",
        "host_pinned",
        "host_pinned_by_operators",
        "leases",
        "writes",
        "unwritten",
        "storage_payloads",
        "storage_bytes",
        "storage_missing",
    }
)
"""What goes down again; everything else only grows."""


def tier_metrics(numbers: Mapping[str, float | int]) -> Iterator[Metric]:
    """Counters, gauges and histograms of what `cache stats` shows."""
    buckets: dict[str, list[tuple[str, float]]] = {}
    for name, value in numbers.items():
        bucket = _BUCKET.fullmatch(name)
        if bucket is not None:
            bound = "+Inf" if bucket[2] == "inf" else bucket[2]
            buckets.setdefault(bucket[1], []).append((bound, value))
    parts = {f"{name}_{part}" for name in buckets for part in ("sum", "count")}
    for name, value in numbers.items():
        if name in parts or _BUCKET.fullmatch(name):
            continue
        text = f"KV tiers: {name.replace('_', ' ')}"
        family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
        yield family(f"deepinfer_kv_{name}", text, value=value)
    for name, pairs in buckets.items():
        text = f"KV tiers: {name.replace('_', ' ')}"
        total = numbers.get(f"{name}_sum", 0.0)
        yield HistogramMetricFamily(f"deepinfer_kv_{name}", text, buckets=pairs, sum_value=total)
