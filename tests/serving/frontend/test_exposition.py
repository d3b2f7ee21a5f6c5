"""Goal: the metrics page is valid and shows what was counted.

Method: a page with known numbers, read back by the parser of the metrics library.
"""

from prometheus_client.parser import text_string_to_metric_families

from serving.engine.engine import EngineStatus
from serving.frontend.exposition import render
from serving.nodes.messages import WorkerStatus
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


def samples(metrics: ServiceMetrics, status: WorkerStatus | None) -> dict[str, float]:
    page = render(metrics, status).decode()
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
