"""Pools worked out by hand, and descriptions that cannot be."""

import pytest

from serving.core.pool_sizing import PoolSizes, Traffic, size_pools

_TRAFFIC = Traffic(
    requests_per_s=10,
    prompt_tokens=1000,
    output_tokens=200,
    hit_ratio=0.6,
    image_tokens=500,
    kept_s=100,
    image_tokens_per_s=2000,
    headroom=0.5,
)


def _sized(traffic: Traffic) -> PoolSizes:
    return size_pools(
        traffic,
        prefill_tokens_per_s=1000,
        users_per_worker=16,
        decode_step_s=0.02,
        cache_bytes_per_token=100,
    )


def test_pools_follow_from_means() -> None:
    pools = _sized(_TRAFFIC)
    # 4,000 tokens a second that no cache holds, at half of 1,000 for each worker.
    assert pools.prefill_workers == 8
    # A request runs for 4 s, so 40 run at once, at half of 16 for each worker.
    assert (pools.running_requests, pools.decode_workers) == (40, 5)
    assert pools.vision_workers == 5
    assert pools.storage_read_bytes_per_s == pytest.approx(100 * 6000)
    assert pools.storage_write_bytes_per_s == pytest.approx(100 * (4000 + 2000))
    assert pools.storage_bytes == pytest.approx(100 * 100 * 6000)
    assert "prefill : decode = 1.60" in pools.text()


def test_without_images_there_is_no_vision_worker() -> None:
    assert _sized(Traffic(1, 10, 10)).vision_workers == 0
    assert _sized(Traffic(1, 10, 10)).prefill_workers == 1


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("requests_per_s", 0.0, "expected more than 0"),
        ("image_tokens", -1.0, "expected 0 or more"),
        ("hit_ratio", 1.0, "expected 0 to below 1"),
    ],
)
def test_numbers_out_of_range_are_refused(field: str, value: float, expected: str) -> None:
    fields = {"requests_per_s": 1.0, "prompt_tokens": 1.0, "output_tokens": 1.0, field: value}
    with pytest.raises(ValueError, match=f"{field} is {value}; {expected}"):
        Traffic(**fields)
