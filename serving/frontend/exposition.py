"""The metrics page: our plain numbers in the text format that Prometheus scrapes.

Our own names begin with `deepinfer_`. What operators know from vLLM is there under vLLM's names
and with its labels as well, so that dashboards made for it show this server.
"""

from collections.abc import Iterator, Mapping

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

from serving.frontend.kv_exposition import tier_metrics
from serving.kv.offload import OffloadStatus
from serving.nodes.messages import WorkerStatus
from serving.nodes.values import VisionStatus
from serving.observe import Histogram, ServiceMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(
    metrics: ServiceMetrics,
    status: WorkerStatus | None,
    model: str = "",
    num_queued: int = 0,
    tiers: Mapping[str, float | int] | None = None,
) -> bytes:
    """The page. Without a worker's answer its gauges are left out rather than invented.

    `num_queued` requests wait in front of the engine; `tiers` are numbers of the KV tiers.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics, status, num_queued))
    registry.register(_Familiar(metrics, status, num_queued, model))
    registry.register(_Tiers(tiers or {}))
    return generate_latest(registry)


class _Tiers(Collector):
    def __init__(self, numbers: Mapping[str, float | int]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        return tier_metrics(self._numbers)


class _Snapshot(Collector):
    def __init__(
        self, metrics: ServiceMetrics, status: WorkerStatus | None, num_queued: int
    ) -> None:
        self._metrics = metrics
        self._status = status
        self._num_queued = num_queued

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
        yield _histogram("queue_time_seconds", "Waiting for a turn", metrics.queue_s)
        yield GaugeMetricFamily(
            "deepinfer_num_requests_queued", "Waiting for a turn", value=self._num_queued
        )
        yield from _of_tenants(metrics)
        if self._status is not None:
            yield from _gauges(self._status)


class _Familiar(Collector):
    """What there is under vLLM's names."""

    def __init__(
        self,
        metrics: ServiceMetrics,
        status: WorkerStatus | None,
        num_queued: int,
        model: str,
    ) -> None:
        self._metrics = metrics
        self._status = status
        self._num_queued = num_queued
        self._model = model

    def collect(self) -> Iterator[Metric]:
        metrics, model = self._metrics, self._model
        counters = {
            "prompt_tokens": metrics.num_prompt_tokens,
            "generation_tokens": metrics.num_generated_tokens,
            "prefix_cache_queries": metrics.num_prompt_tokens,
            "prefix_cache_hits": metrics.num_cached_tokens,
        }
        gauges: dict[str, float] = {}
        if self._status is not None:
            engine = self._status.engine
            counters["num_preemptions"] = engine.num_preemptions
            counters["spec_decode_num_draft_tokens"] = sum(engine.num_verified)
            counters["spec_decode_num_accepted_tokens"] = sum(engine.num_accepted)
            num_used = engine.num_blocks - engine.num_free_blocks
            gauges = {
                "num_requests_running": engine.num_running,
                "num_requests_waiting": engine.num_waiting + self._num_queued,
                "kv_cache_usage_perc": num_used / engine.num_blocks,
            }
        for name, value in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", name, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests ended", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(metrics.num_finished.items()):
            finished.add_metric([model, reason], count)
        yield finished
        histograms = {
            "time_to_first_token_seconds": metrics.first_token_s,
            "inter_token_latency_seconds": metrics.inter_token_s,
            "e2e_request_latency_seconds": metrics.request_s,
            "request_queue_time_seconds": metrics.queue_s,
        }
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", name, labels=["model_name"])
            family.add_metric([model], _buckets(histogram), histogram.total)
            yield family


def _of_tenants(metrics: ServiceMetrics) -> Iterator[Metric]:
    texts = {
        "calls": "Calls that have ended",
        "refused": "Calls beyond a quota",
        "prompt_tokens": "Prompt tokens",
        "cached_tokens": "Prompt tokens not computed anew",
        "generated_tokens": "Tokens generated",
    }
    for name, text in texts.items():
        family = CounterMetricFamily(f"deepinfer_tenant_{name}", text, labels=["tenant"])
        for tenant, counters in sorted(metrics.tenants.items()):
            family.add_metric([tenant], getattr(counters, f"num_{name}"))
        yield family


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
    yield from _vision_metrics(status.vision)
    if status.offload is not None:
        yield from _offload_metrics(status.offload)
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


def _vision_metrics(workers: Mapping[str, VisionStatus]) -> Iterator[Metric]:
    """What each vision worker of a cluster has, and has done."""
    counters = {
        "encoded": "Images encoded",
        "hits": "Images that were encoded before",
        "sent": "Images whose features were sent to others",
        "missing": "Images whose features were asked for and gone",
        "evicted": "Images whose features had to go",
    }
    gauges = {
        "num_waiting": "Images waiting to be encoded",
        "num_waiting_tokens": "Image tokens waiting to be encoded",
        "num_encoding": "Images being encoded",
        "num_kept": "Images whose features are kept",
        "kept_bytes": "Bytes of the features that are kept",
    }
    if not workers:
        return
    for name, text in counters.items():
        counter = CounterMetricFamily(f"deepinfer_vision_{name}", text, labels=["node"])
        for node, status in sorted(workers.items()):
            counter.add_metric([node], getattr(status, f"num_{name}"))
        yield counter
    for name, text in gauges.items():
        gauge = GaugeMetricFamily(f"deepinfer_vision_{name}", text, labels=["node"])
        for node, status in sorted(workers.items()):
            gauge.add_metric([node], getattr(status, name))
        yield gauge


def _offload_metrics(offload: OffloadStatus) -> Iterator[Metric]:
    """What the worker's use of the KV tiers has come to. Each request counts once."""
    counters = {
        "hits": ("Requests whose prefix was fetched from the tiers", offload.num_hits),
        "misses": ("Requests for which nothing of use was stored", offload.num_misses),
        "faults": ("Requests whose stored prefix could not be read", offload.num_faults),
        "late": ("Requests that waited in vain for their prefix", offload.num_late),
        "skipped": ("Requests for which the tiers were not asked", offload.num_skipped),
        "unused": ("Fetched prefixes without room on the device", offload.num_unused),
        "fetched_blocks": ("KV blocks written to the device", offload.num_fetched_blocks),
        "stored_blocks": ("KV blocks handed to the tiers", offload.num_stored_blocks),
        "breaker_opened": ("Times the tiers were left alone", offload.num_opened),
        "swap_in_seconds": ("Time of copies to the device", offload.swap_in_ns / 1e9),
        "swap_in_hidden_seconds": (
            "Time of copies to the device while it computed",
            offload.swap_in_hidden_ns / 1e9,
        ),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"deepinfer_kv_offload_{name}", text, value=value)
    gauges = {
        "waiting": ("Requests that wait for their prefix", offload.num_waiting),
        "breaker_open": ("1 while the tiers are left alone", float(offload.is_open)),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"deepinfer_kv_offload_{name}", text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"deepinfer_{name}", text, buckets=_buckets(histogram), sum_value=histogram.total
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
