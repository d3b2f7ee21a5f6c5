"""Goal: a tenant gets what its quota allows and no more, and what it did not take comes back.

Method: a clock that moves when told; sums worked out by hand.
"""

import pytest

from serving.clock import ns_of_s
from serving.config import QuotaOptions
from serving.frontend.errors import ApiError
from serving.frontend.quota import Bucket, KVCosts, Quotas
from tests.serving.frontend.test_gateway import HandClock


def make_quotas(**limits: int) -> tuple[Quotas, HandClock]:
    clock = HandClock()
    return Quotas({"default": QuotaOptions(**limits)}, clock), clock


def refused(quotas: Quotas, num_input: int = 1, num_output: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        quotas.reserve("a", num_input, num_output)
    return caught.value


def test_bucket_fills_and_may_be_overdrawn() -> None:
    bucket = Bucket(60, 0)
    bucket.take(90)
    assert bucket.wait_s(0, 0) == 30 and bucket.wait_s(10, 0) == 40
    assert bucket.level(ns_of_s(40)) == 10
    assert bucket.wait_s(1000, ns_of_s(40)) == 50, "more than fits is a full bucket"
    assert bucket.level(ns_of_s(1000)) == 60


def test_requests_a_minute() -> None:
    quotas, clock = make_quotas(requests_per_minute=2)
    for _ in range(2):
        quotas.settle(quotas.reserve("a", 1, 1), 0, 1)
    error = refused(quotas)
    assert (error.status, error.retry_after_s) == (429, 30)
    assert "2 requests a minute" in error.detail
    quotas.reserve("b", 1, 1)
    clock.time_ns = ns_of_s(30)
    quotas.reserve("a", 1, 1)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("tokens_per_minute", 100 - (30 - 20) - 5),
        ("input_tokens_per_minute", 100 - (30 - 20)),
        ("cached_tokens_per_minute", 100 - 20),
        ("output_tokens_per_minute", 100 - 5),
    ],
)
def test_tokens_are_corrected_afterwards(limit: str, left: int) -> None:
    quotas, _ = make_quotas(**{limit: 100})
    reservation = quotas.reserve("a", 30, 60)
    quotas.settle(reservation, 20, 5)
    quotas.settle(reservation, 20, 5)
    name = limit.removesuffix("_per_minute").replace("_", "-").encode()
    headers = dict(quotas.headers("a"))
    assert headers[b"x-ratelimit-remaining-" + name] == str(left).encode()
    assert headers[b"x-ratelimit-limit-" + name] == b"100"
    assert headers[b"x-ratelimit-reset-" + name] == f"{(100 - left) * 0.6:.3f}s".encode()


def test_a_reservation_counts_before_the_work() -> None:
    quotas, _ = make_quotas(output_tokens_per_minute=100)
    first = quotas.reserve("a", 1, 1000)
    assert refused(quotas, 1, 50).retry_after_s == 570, "the reservation overdraws the bucket"
    quotas.settle(first, 0, 10)
    quotas.reserve("a", 1, 50)


def test_concurrency_and_held_tokens() -> None:
    quotas, _ = make_quotas(concurrent_max=2, held_tokens_max=100)
    held = [quotas.reserve("a", 20, 20), quotas.reserve("a", 20, 20)]
    assert "running" in refused(quotas).detail
    quotas.settle(held.pop(), 0, 20)
    assert "40 tokens of a are held" in refused(quotas, 31, 30).detail
    quotas.reserve("a", 30, 30)
    error = refused(quotas, 51, 50)
    assert (error.status, error.param) == (400, "max_tokens")


def test_reload() -> None:
    quotas, _ = make_quotas(concurrent_max=1)
    quotas.reserve("a", 1, 1)
    refused(quotas)
    quotas.reload({"a": QuotaOptions(concurrent_max=2, context_max=9), "default": QuotaOptions()})
    quotas.reserve("a", 1, 1)
    assert refused(quotas).status == 429, "what ran before still counts"
    assert quotas.context_max("a") == 9 and quotas.context_max("b") is None


def test_whether_anything_is_left_is_known_before_a_call_is() -> None:
    quotas, _ = make_quotas(requests_per_minute=9, concurrent_max=1)
    quotas.check("a")
    held = quotas.reserve("a", 1, 1)
    with pytest.raises(ApiError, match="1 calls of a are running"):
        quotas.check("a")
    quotas.settle(held, 0, 1)
    for _ in range(8):
        quotas.check("a")
        quotas.settle(quotas.reserve("a", 1, 1), 0, 1)
    with pytest.raises(ApiError, match="9 requests a minute"):
        quotas.check("a")


@pytest.mark.parametrize(("limit", "left"), [(2, 0), (3, 1), (1, 0)])
def test_a_reload_gives_nobody_another_minute(limit: int, left: int) -> None:
    quotas, _ = make_quotas(requests_per_minute=2)
    for _ in range(2):
        quotas.reserve("a", 1, 1)
    refused(quotas)
    quotas.reload({"default": QuotaOptions(requests_per_minute=limit)})
    for _ in range(left):
        quotas.reserve("a", 1, 1)
    assert refused(quotas).status == 429


def test_a_reload_does_not_forgive_an_overdraft() -> None:
    quotas, clock = make_quotas(cached_tokens_per_minute=60)
    quotas.settle(quotas.reserve("a", 200, 1), 180, 1)
    quotas.reload({"default": QuotaOptions(cached_tokens_per_minute=60)})
    clock.time_ns = ns_of_s(119)
    refused(quotas)


def test_held_bytes_are_those_of_tokens_and_sequences() -> None:
    clock = HandClock()
    options = {"default": QuotaOptions(held_bytes_max=10_000)}
    quotas = Quotas(options, clock, KVCosts(token_bytes=100.5, sequence_bytes=1000))
    held = quotas.reserve("a", 20, 20, 2)
    assert held.num_bytes == 4020 + 2000
    assert "6020 bytes of KV memory of a are held" in refused(quotas, 20, 20).detail
    quotas.settle(held, 0, 1)
    quotas.reserve("a", 20, 20)
    error = refused(quotas, 60, 60)
    assert (error.status, error.param) == (400, "max_tokens")
    quotas.reserve("b", 20, 20)
