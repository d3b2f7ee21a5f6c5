"""The metrics page: our plain numbers in the text format that Prometheus scrapes.

Names follow what operators of other serving engines know, under our own prefix.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.nodes.messages import WorkerStatus
from serving.observe import Histogram, ServiceMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(metrics: ServiceMetrics, status: WorkerStatus | None) -> bytes:
    """The page. Without a worker's answer its gauges are left out rather than invented."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics, status))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, metrics: ServiceMetrics, status: WorkerStatus | None) -> None:
        self._metrics = metrics
        self._status = status

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        counters = {
            "requests": ("Requests admitted", metrics.num_requests),
            "requests_refused": ("Requests refused by the worker", metrics.num_refused),
            "prompt_tokens": ("Prompt tokens of requests that began", metrics.num_prompt_tokens),
            "cached_tokens": ("Prompt tokens not computed anew", metrics.num_cached_tokens),
            "generation_tokens": ("Tokens generated", metrics.num_generated_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"deepinfer_{name}", text, value=value)
        finished = CounterMetricFamily(
            "deepinfer_requests_finished", "Requests ended, by reason", labels=["reason"]
        )
        for reason, count in sorted(metrics.num_finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _histogram(
            "time_to_first_token_seconds", "Arrival to first token", metrics.first_token_s
        )
        yield _histogram("inter_token_latency_seconds", "Between tokens", metrics.inter_token_s)
        yield _histogram("e2e_request_latency_seconds", "Arrival to end", metrics.request_s)
        if self._status is not None:
            yield from _gauges(self._status)


def _gauges(status: WorkerStatus) -> Iterator[Metric]:
    engine, programs = status.engine, status.programs
    num_used = engine.num_blocks - engine.num_free_blocks
    gauges = {
        "engine_up": ("1 while the engine can serve", float(status.failure is None)),
        "num_requests_running": ("Requests holding KV memory", engine.num_running),
        "num_requests_waiting": ("Requests waiting for room", engine.num_waiting),
        "kv_blocks": ("KV blocks in the pool", engine.num_blocks),
        "kv_blocks_free": ("KV blocks nobody holds", engine.num_free_blocks),
        "kv_blocks_cached": ("KV blocks nobody holds, with a prefix", engine.num_cached_blocks),
        "prefix_snapshots": ("Prefixes that can be gone on from", engine.num_snapshots),
        "kv_cache_usage_ratio": ("Share of KV blocks held", num_used / engine.num_blocks),
        "decode_ms_per_token_over_measured": ("Time of steps beyond start-up's", engine.slope_ms),
        "programs": ("Programs compiled at the start", len(programs)),
        "programs_from_cache": (
            "Those that the compilation cache had",
            sum(program.is_from_cache for program in programs),
        ),
        "compile_seconds": (
            "Work of compiling them, over all threads",
            sum(program.seconds for program in programs),
        ),
        "state_slots": ("State slots in the pool", engine.num_slots),
        "state_slots_free": ("State slots nobody holds", engine.num_free_slots),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"deepinfer_{name}", text, value=value)
    counters = {
        "engine_steps": ("Steps planned", engine.num_steps),
        "preemptions": ("Requests put back for want of blocks", engine.num_preemptions),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"deepinfer_{name}", text, value=value)
    drafts = {
        "drafts_verified": ("Drafts verified, by place", engine.num_verified),
        "drafts_accepted": ("Drafts accepted, by place", engine.num_accepted),
    }
    for name, (text, counts) in drafts.items():
        family = CounterMetricFamily(f"deepinfer_{name}", text, labels=["position"])
        for place, count in enumerate(counts):
            family.add_metric([str(place)], count)
        yield family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
    return HistogramMetricFamily(
        f"deepinfer_{name}", text, buckets=buckets, sum_value=histogram.total
    )
