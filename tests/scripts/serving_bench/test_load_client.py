"""Goal: the clients of the benchmark tell whole answers from others, and count events.

Method: real HTTP against a scripted executor.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest

from scripts.serving_bench.load_client import (
    StreamResult,
    at_a_pace,
    call,
    open_idle,
    request_bytes,
)
from tests.serving.frontend.alphabet import completion, is_idle, letter_at, wait_for
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running:
        yield running


def send(service: RunningService, **changes: object) -> StreamResult:
    body = json.dumps(completion(**changes)).encode()
    port = int(service.url.rsplit(":", 1)[1])
    return asyncio.run(call(port, request_bytes("/v1/completions", body, "none")))


def test_results(service: RunningService) -> None:
    streamed = send(service, stream=True, max_tokens=6)
    assert streamed.is_whole and 2 <= streamed.num_events <= 7
    assert streamed.start_s < streamed.first_s <= streamed.last_s
    whole = send(service)
    assert whole.is_whole and whole.num_events == 0
    refused = send(service, max_tokens=0)
    assert not refused.is_whole and refused.head.startswith(b"HTTP/1.1 400")


def test_idle_streams_are_closed_by_the_client(service: RunningService) -> None:
    port = int(service.url.rsplit(":", 1)[1])
    body = json.dumps(completion(stream=True, max_tokens=400)).encode()

    async def run() -> None:
        (await open_idle(port, request_bytes("/v1/completions", body, "none")))()

    asyncio.run(run())
    wait_for(lambda: is_idle(service.url), "the end of the stream")


def test_calls_start_at_their_time_whatever_becomes_of_them() -> None:
    async def run() -> list[int]:
        numbers = iter(range(5))

        async def one(number: int) -> int:
            await asyncio.sleep(0.01 * (5 - number))
            return number

        return await at_a_pace(1000.0, 5, lambda: asyncio.ensure_future(one(next(numbers))))

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]
