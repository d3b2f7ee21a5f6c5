"""Goal: numbers of the tiers become counters, gauges and histograms that a scraper can read.
Method: the page is parsed again.
"""

from prometheus_client.parser import text_string_to_metric_families

from serving.frontend import exposition
from serving.kv.tier_metrics import TierMetrics
from serving.observe import ServiceMetrics


def test_numbers_become_metrics() -> None:
    storage = TierMetrics(num_hits=7, num_misses=2, bytes_hit=9)
    for seconds in (0.003, 0.2, 90.0):
        storage.read_s.observe(seconds)
    numbers = {"host_bytes": 5, "fetch_corrupt": 1, **storage.numbers("storage")}
    page = exposition.render(ServiceMetrics(), None, "tiny", 0, numbers).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["deepinfer_kv_host_bytes"].type == "gauge"
    assert families["deepinfer_kv_fetch_corrupt"].type == "counter"
    assert families["deepinfer_kv_storage_hits"].samples[0].value == 7
    # Nothing was looked up, so nothing is said of it.
    assert "deepinfer_kv_storage_look_up_seconds" not in families
    histogram = families["deepinfer_kv_storage_read_seconds"]
    values = {(one.name, one.labels.get("le")): one.value for one in histogram.samples}
    name = "deepinfer_kv_storage_read_seconds"
    assert values[f"{name}_bucket", "0.005"] == 1 and values[f"{name}_bucket", "+Inf"] == 3
    assert values[f"{name}_count", None] == 3 and 90 < values[f"{name}_sum", None] < 91
