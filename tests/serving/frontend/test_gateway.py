"""Goal: streams deliver everything in order, merged when the reader is slow, with one end each;
what is given up is aborted at the worker; waits end.

Method: the gateway alone, fed with messages by hand, under a clock that only moves when told.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from serving.core.request import FinishReason, Request, SamplingParams, TokenDelta
from serving.engine.engine import EngineStatus
from serving.frontend import gateway as gateway_module
from serving.frontend.errors import ApiError
from serving.frontend.gateway import Gateway, TokenStream, Update
from serving.nodes import messages
from serving.nodes.messages import RefusalReason
from serving.nodes.node import NodeId, Send
from serving.observe import ServiceMetrics

WORKER = NodeId("mesh_worker", "0")


class HandClock:
    """Stands still unless a test moves it."""

    time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns

    def unix_s(self) -> int:
        return 0


def make_gateway(backlog_tokens_max: int = 100) -> tuple[Gateway, HandClock]:
    clock = HandClock()
    gateway = Gateway(NodeId("frontend", "0"), WORKER, clock, ServiceMetrics(), backlog_tokens_max)
    return gateway, clock


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), SamplingParams())


def sent(gateway: Gateway) -> list[Any]:
    return [effect.message for effect in gateway.outbox.take() if isinstance(effect, Send)]


def tokens(gateway: Gateway, name: str, *ids: int, reason: FinishReason | None = None) -> None:
    gateway.on_message(WORKER, messages.Tokens((TokenDelta(name, ids, reason, 3, 2),)))


def opened(gateway: Gateway, *names: str) -> TokenStream:
    stream = gateway.open([request(name) for name in names])
    assert sent(gateway) == [messages.Submit(request(name)) for name in names]
    for name in names:
        gateway.on_message(WORKER, messages.Admitted(name))
    return stream


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await test

    asyncio.run(limited())


def test_deltas_are_merged_until_they_are_read() -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = opened(gateway, "a", "b")
        await stream.admitted()
        tokens(gateway, "a", 5)
        tokens(gateway, "b", 6)
        tokens(gateway, "a", 7, reason=FinishReason.LENGTH)
        assert await stream.next() == [
            Update(0, [5, 7], FinishReason.LENGTH, 2),
            Update(1, [6], None, 2),
        ]
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert not reader.done()
        tokens(gateway, "b", 8, reason=FinishReason.STOP)
        assert await reader == [Update(1, [8], FinishReason.STOP, 2)]

    run(test())


def test_each_end_is_told_once_whatever_the_reader_has_read() -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream, ends = opened(gateway, "a", "b", "c", "d"), list[int]()
        stream.on_end = lambda: ends.append(gateway.num_open)
        tokens(gateway, "a", 7)
        assert not ends
        tokens(gateway, "a", 8, reason=FinishReason.STOP)
        assert ends == [3], "by the worker"
        stream.end(0)
        stream.end(1)
        assert ends == [3, 2], "by the reader"
        gateway.on_message(WORKER, messages.Failed("c", "lost"))
        assert ends == [3, 2, 1], "by a fault"
        stream.close()
        stream.close()
        assert ends == [3, 2, 1, 0]

    run(test())


def test_admission_waits_for_every_request() -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = gateway.open([request("a"), request("b")])
        waiting = asyncio.create_task(stream.admitted())
        gateway.on_message(WORKER, messages.Admitted("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        gateway.on_message(WORKER, messages.Admitted("b"))
        await waiting
        assert gateway.metrics.num_requests == 2

    run(test())


@pytest.mark.parametrize(
    ("reason", "status", "shown"),
    [
        (RefusalReason.INVALID, 400, "because"),
        (RefusalReason.BUSY, 429, "because"),
        (RefusalReason.UNAVAILABLE, 503, "the log has more"),
    ],
)
def test_refusals_become_status_codes(reason: RefusalReason, status: int, shown: str) -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = gateway.open([request("a")])
        gateway.on_message(WORKER, messages.Refused("a", reason, "because", "prompt"))
        with pytest.raises(ApiError, match=shown) as caught:
            await stream.admitted()
        assert caught.value.status == status
        assert gateway.metrics.num_refused == 1 and gateway.metrics.num_requests == 0

    run(test())


def test_worker_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "ADMISSION_TIMEOUT_S", 0.01)
    monkeypatch.setattr(gateway_module, "STATUS_TIMEOUT_S", 0.01)

    async def test() -> None:
        gateway, _ = make_gateway()
        stream = gateway.open([request("a")])
        with pytest.raises(ApiError) as caught:
            await stream.admitted()
        assert caught.value.status == 503
        assert await gateway.status() is None

    run(test())


def test_failure_comes_after_the_tokens_before_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = opened(gateway, "a")
        tokens(gateway, "a", 5)
        gateway.on_message(WORKER, messages.Failed("a", "lost"))
        assert await stream.next() == [Update(0, [5], None, 2)]
        for _ in range(2):
            with pytest.raises(ApiError, match="the log has more under a$"):
                await stream.next()
        assert "request a ended by a fault: lost" in caplog.text
        assert gateway.metrics.num_finished == {"error": 1}

    run(test())


def test_closing_aborts_what_still_runs_and_only_that() -> None:
    gateway, _ = make_gateway()
    stream = opened(gateway, "a", "b")
    tokens(gateway, "a", 5, reason=FinishReason.STOP)
    stream.close()
    assert sent(gateway) == [messages.Abort("b")]
    stream.close()
    assert sent(gateway) == []
    tokens(gateway, "b", 9)  # On its way when the abort was sent.
    assert gateway.metrics.num_finished == {"stop": 1, "abort": 1}


def test_stop_string_ends_a_request_as_stopped() -> None:
    gateway, _ = make_gateway()
    stream = opened(gateway, "a")
    stream.end(0)
    assert sent(gateway) == [messages.Abort("a")]
    assert gateway.metrics.num_finished == {"stop": 1}


def test_reader_too_far_behind_is_cut_off() -> None:
    async def test() -> None:
        gateway, _ = make_gateway(backlog_tokens_max=3)
        stream = opened(gateway, "a", "b")
        cut: list[bool] = []
        stream.on_cut_off = lambda: cut.append(True)
        tokens(gateway, "a", 1, 2)
        tokens(gateway, "b", 1)
        assert sent(gateway) == [] and not cut
        tokens(gateway, "b", 2)
        assert sent(gateway) == [messages.Abort("a"), messages.Abort("b")]
        assert cut == [True]
        await stream.next()
        with pytest.raises(ApiError, match="More than 3 tokens"):
            await stream.next()

    run(test())


def test_latencies_are_measured_from_arrival_and_between_tokens() -> None:
    gateway, clock = make_gateway()
    opened(gateway, "a")
    clock.time_ns = 2_000_000_000
    tokens(gateway, "a", 1)
    clock.time_ns = 5_000_000_000
    tokens(gateway, "a", 2, 3, 4, reason=FinishReason.STOP)
    metrics = gateway.metrics
    assert (metrics.first_token_s.total, metrics.first_token_s.count) == (2.0, 1)
    assert (metrics.inter_token_s.total, metrics.inter_token_s.count) == (3.0, 3)
    assert (metrics.request_s.total, metrics.request_s.count) == (5.0, 1)
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (3, 2)
    assert metrics.num_generated_tokens == 4


def test_draining_waits_for_open_requests_and_refuses_new_ones() -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = opened(gateway, "a")
        drained = asyncio.create_task(gateway.drain(5))
        await asyncio.sleep(0.01)
        assert not drained.done()
        with pytest.raises(ApiError) as caught:
            gateway.open([request("b")])
        assert caught.value.status == 503
        tokens(gateway, "a", 1, reason=FinishReason.STOP)
        await drained
        assert (await stream.next())[0].token_ids == [1]

    run(test())


def test_draining_past_its_limit_fails_the_rest() -> None:
    async def test() -> None:
        gateway, _ = make_gateway()
        stream = opened(gateway, "a")
        await gateway.drain(0)
        assert sent(gateway) == [messages.Abort("a")]
        with pytest.raises(ApiError, match="shut down"):
            await stream.next()

    run(test())


def test_status_is_matched_to_its_query() -> None:
    engine = EngineStatus(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)

    async def test() -> None:
        gateway, _ = make_gateway()
        first, second = (asyncio.create_task(gateway.status()) for _ in range(2))
        await asyncio.sleep(0)
        assert sent(gateway) == [messages.QueryStatus(1), messages.QueryStatus(2)]
        for query_id, failure in ((2, "two"), (1, "one"), (1, "again"), (9, "stranger")):
            gateway.on_message(WORKER, messages.WorkerStatus(query_id, failure, engine))
        answers = await first, await second
        assert [answer.failure for answer in answers if answer] == ["one", "two"]

    run(test())


def test_messages_for_nobody_are_ignored() -> None:
    gateway, _ = make_gateway()
    for message in (
        messages.Admitted("x"),
        messages.Refused("x", RefusalReason.BUSY, "no"),
        messages.Failed("x", "no"),
        messages.Submit(request("x")),
    ):
        gateway.on_message(WORKER, message)
    tokens(gateway, "x", 1)
    gateway.on_timer("any")
    assert gateway.outbox.take() == [] and gateway.metrics == ServiceMetrics(
        first_token_s=gateway.metrics.first_token_s,
        inter_token_s=gateway.metrics.inter_token_s,
        request_s=gateway.metrics.request_s,
        queue_s=gateway.metrics.queue_s,
    )
