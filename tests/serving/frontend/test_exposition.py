"""Goal: the metrics page is valid and shows what was counted.

Method: a page with known numbers, read back by the parser of the metrics library.
"""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serving.engine.engine import EngineStatus
from serving.frontend.exposition import render
from serving.kv.offload import OffloadStatus
from serving.nodes.messages import WorkerStatus
from serving.nodes.values import VisionStatus
from serving.observe import ServiceMetrics

ENGINE = EngineStatus(
    num_waiting=3,
    num_prefilling=1,
    num_decoding=2,
    num_steps_in_flight=1,
    num_blocks=10,
    num_free_blocks=4,
    num_slots=5,
    num_free_slots=2,
    num_steps=77,
    num_preemptions=1,
    num_cached_blocks=2,
    num_snapshots=6,
    num_verified=(30, 20),
    num_accepted=(25, 9),
    slope_ms=0.125,
)


DASHBOARD = Path(__file__).parents[3] / "serving" / "dashboards" / "grafana.json"


def samples(
    metrics: ServiceMetrics, status: WorkerStatus | None, num_queued: int = 0
) -> dict[str, float]:
    page = render(metrics, status, "m", num_queued).decode()
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_counters_gauges_and_histograms() -> None:
    metrics = ServiceMetrics(num_requests=6, num_generated_tokens=50, num_cached_tokens=8)
    metrics.add_finished("stop")
    metrics.first_token_s.observe(0.02)
    metrics.first_token_s.observe(0.2)
    found = samples(metrics, WorkerStatus(1, None, ENGINE))
    assert found["deepinfer_requests_total"] == 6
    assert found["deepinfer_generation_tokens_total"] == 50
    assert found["deepinfer_cached_tokens_total"] == 8
    assert found["deepinfer_requests_finished_total{reason=stop}"] == 1
    assert found["deepinfer_time_to_first_token_seconds_bucket{le=0.025}"] == 1
    assert found["deepinfer_time_to_first_token_seconds_bucket{le=+Inf}"] == 2
    assert found["deepinfer_time_to_first_token_seconds_count"] == 2
    assert found["deepinfer_num_requests_running"] == 3
    assert found["deepinfer_num_requests_waiting"] == 3
    assert found["deepinfer_kv_blocks"] == 10 and found["deepinfer_kv_blocks_free"] == 4
    assert found["deepinfer_kv_cache_usage_ratio"] == 0.6
    assert found["deepinfer_state_slots_free"] == 2
    assert found["deepinfer_engine_steps_total"] == 77
    assert found["deepinfer_preemptions_total"] == 1
    assert found["deepinfer_engine_up"] == 1
    assert found["deepinfer_kv_blocks_cached"] == 2 and found["deepinfer_prefix_snapshots"] == 6
    assert found["deepinfer_decode_ms_per_token_over_measured"] == 0.125
    assert found["deepinfer_drafts_verified_total{position=0}"] == 30
    assert found["deepinfer_drafts_accepted_total{position=1}"] == 9


def test_failed_engine_is_down_and_silent_one_has_no_gauges() -> None:
    assert samples(ServiceMetrics(), WorkerStatus(1, "lost", ENGINE))["deepinfer_engine_up"] == 0
    silent = samples(ServiceMetrics(), None)
    assert "deepinfer_engine_up" not in silent and "deepinfer_kv_blocks" not in silent
    assert silent["deepinfer_requests_total"] == 0


def test_familiar_names_hold_the_same_numbers() -> None:
    metrics = ServiceMetrics(num_generated_tokens=50, num_prompt_tokens=20, num_cached_tokens=8)
    metrics.add_finished("length")
    metrics.queue_s.observe(0.2)
    found = samples(metrics, WorkerStatus(1, None, ENGINE), num_queued=4)
    label = "{model_name=m}"
    assert found[f"vllm:generation_tokens_total{label}"] == 50
    assert found[f"vllm:prefix_cache_queries_total{label}"] == 20
    assert found[f"vllm:prefix_cache_hits_total{label}"] == 8
    assert found[f"vllm:num_requests_running{label}"] == 3
    assert found[f"vllm:num_requests_waiting{label}"] == 3 + 4
    assert found[f"vllm:kv_cache_usage_perc{label}"] == 0.6
    assert found[f"vllm:spec_decode_num_draft_tokens_total{label}"] == 50
    assert found[f"vllm:spec_decode_num_accepted_tokens_total{label}"] == 34
    assert found[f"vllm:request_queue_time_seconds_count{label}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}{model_name=m}"] == 1
    assert found["deepinfer_num_requests_queued"] == 4


def test_tenants_have_counters() -> None:
    metrics = ServiceMetrics()
    metrics.tenant("acme").num_generated_tokens += 7
    found = samples(metrics, None)
    assert found["deepinfer_tenant_generated_tokens_total{tenant=acme}"] == 7
    assert found["deepinfer_tenant_refused_total{tenant=acme}"] == 0


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = ServiceMetrics()
    metrics.tenant("acme")
    metrics.add_finished("stop")
    names = {name.split("{")[0] for name in samples(metrics, WorkerStatus(1, None, ENGINE))}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    wanted = set(re.findall(r"(?:vllm:|deepinfer_)[a-z0-9_]+", " ".join(asked)))
    assert len(wanted) > 12 and wanted <= names, wanted - names


def test_use_of_the_kv_tiers() -> None:
    offload = OffloadStatus(
        num_hits=1,
        num_misses=2,
        num_faults=3,
        num_late=4,
        num_skipped=5,
        num_unused=6,
        num_fetched_blocks=7,
        num_stored_blocks=8,
        num_opened=9,
        swap_in_ns=10 * 10**9,
        swap_in_hidden_ns=11 * 10**9,
        num_waiting=10,
        is_open=True,
    )
    found = samples(ServiceMetrics(), WorkerStatus(1, None, ENGINE, offload=offload))
    names = ("hits", "misses", "faults", "late", "skipped", "unused", "fetched_blocks")
    names += ("stored_blocks", "breaker_opened", "swap_in_seconds", "swap_in_hidden_seconds")
    values = [found[f"deepinfer_kv_offload_{name}_total"] for name in names]
    assert values == list(range(1, 12))
    assert found["deepinfer_kv_offload_waiting"] == 10
    assert found["deepinfer_kv_offload_breaker_open"] == 1
    without = samples(ServiceMetrics(), WorkerStatus(1, None, ENGINE))
    assert not any("offload" in name for name in without)


def test_vision_workers_have_their_own_numbers() -> None:
    first = VisionStatus(num_waiting=3, kept_bytes=40, num_encoded=7, num_missing=1)
    status = WorkerStatus(1, None, ENGINE, vision={"v0": first, "v1": VisionStatus()})
    found = samples(ServiceMetrics(), status)
    assert found["deepinfer_vision_encoded_total{node=v0}"] == 7
    assert found["deepinfer_vision_missing_total{node=v0}"] == 1
    assert found["deepinfer_vision_num_waiting{node=v0}"] == 3
    assert found["deepinfer_vision_kept_bytes{node=v0}"] == 40
    assert found["deepinfer_vision_encoded_total{node=v1}"] == 0
    alone = samples(ServiceMetrics(), WorkerStatus(1, None, ENGINE))
    assert not any(name.startswith("deepinfer_vision") for name in alone)
