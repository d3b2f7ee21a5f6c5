"""Goal: whatever goes wrong (a limit reached, a client gone, a reader stalled, the device lost, the
server stopping), no request hangs, no block stays held and no client goes without a reason.

Method: real HTTP over loopback against scripted executors that stall and fail on command.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import openai
import pytest

import serving.frontend.answers as answers_module
from serving.config import ServerOptions
from serving.core.request import TokenDelta
from serving.frontend.app import make_app
from serving.frontend.conversion import ServedModel
from serving.frontend.gateway import Gateway
from serving.frontend.text import TextCodec
from serving.nodes import messages
from serving.nodes.node import NodeId, Send
from serving.observe import ServiceMetrics
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import (
    CODEC,
    LETTERS,
    chat,
    completion,
    events_of,
    is_idle,
    letter_at,
    letters,
    metric,
    post,
    wait_for,
)
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running:
        yield running


def test_body_over_the_limit_is_refused() -> None:
    with RunningService(ScriptedExecutor(letter_at), {"server.body_bytes_max": 1000}) as running:
        declared = post(running.url, chat(user="x" * 1000))
        parts = (b"x" * 600 for _ in range(2))
        undeclared = httpx.post(f"{running.url}/v1/completions", content=parts)
        assert declared.status_code == undeclared.status_code == 413
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
            connection.sendall(head)
            assert b" 413 " in connection.recv(100), "refused before the body has come"
        assert "1000" in declared.json()["error"]["message"]
        assert post(running.url, chat()).status_code == 200


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> object:
        raise AssertionError("encoded")

    # The longest of its tokens stands for 21 characters, and 512 tokens are the context.
    text = "x" * (511 * 21 + 1)
    monkeypatch.setattr(TextCodec, "encode_text", encode)
    monkeypatch.setattr(TextCodec, "encode_chat", encode)
    answers = [
        post(service.url, completion(prompt=text), "completions"),
        post(service.url, chat(messages=[{"role": "user", "content": text}])),
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "at least 512 tokens" in error["message"]


def test_body_that_comes_too_slowly_is_refused() -> None:
    with RunningService(ScriptedExecutor(letter_at), {"server.body_s": 0.1}) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            connection.sendall(head)
            assert b" 408 " in connection.recv(100)


def test_full_queue_is_a_429_with_retry_after() -> None:
    gate = threading.Event()
    options = {"engine.waiting_max": 1, "engine.decode_rows": [1], "engine.prefill_rows": 1}
    with (
        RunningService(ScriptedExecutor(letter_at, gate=gate), options) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        held = [pool.submit(post, running.url, completion(), "completions")]
        wait_for(lambda: len(running.executor.plans) > 0, "the first step")
        held.append(pool.submit(post, running.url, completion(), "completions"))
        wait_for(lambda: metric(running.url, "deepinfer_num_requests_waiting") == 1, "a full queue")
        bodies = {
            "completions": completion(),
            "chat/completions": chat(),
            "responses": {"model": "tiny-v41", "input": "x"},
            "messages": chat(),
        }
        refused = [
            post(running.url, body | {"stream": stream}, path)
            for path, body in bodies.items()
            for stream in (False, True)
        ]
        gate.set()
        assert [task.result().status_code for task in held] == [200, 200]
    for answer in refused:
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_samples_without_room_are_refused_together() -> None:
    options = {"engine.waiting_max": 2, "engine.decode_rows": [1], "engine.prefill_rows": 1}
    with RunningService(ScriptedExecutor(letter_at), options) as running:
        body = completion(prompt=[3] * 200, n=9)
        refused = post(running.url, body, "completions")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        wait_for(lambda: is_idle(running.url), "freeing the blocks")
        assert metric(running.url, "deepinfer_num_requests_waiting") == 0
        answer = post(running.url, body | {"n": 3}, "completions").json()
    assert [choice["text"] for choice in answer["choices"]] == [letters(200, 4)] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_blocks(service: RunningService, stream: bool) -> None:
    body = json.dumps(completion(max_tokens=480, stream=stream)).encode()
    address = service.url.removeprefix("http://").split(":")
    aborts = 'deepinfer_requests_finished_total{reason="abort"}'
    before = metric(service.url, aborts)
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: not is_idle(service.url), "the start of the request")
    wait_for(lambda: is_idle(service.url), "freeing the blocks")
    assert metric(service.url, aborts) == before + 1


@pytest.mark.parametrize("reads_on", [False, True])
def test_slow_reader_is_cut_off(reads_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "CUT_OFF_S", 5.0 if reads_on else 0.05)
    worker = NodeId("mesh_worker", "0")
    gateway = Gateway(NodeId("frontend", "0"), worker, SystemClock(), ServiceMetrics(), 10)
    model = ServedModel("tiny-v41", CODEC, 320, 512, 1)
    app: Any = make_app(gateway, model, ServerOptions(), SystemClock())
    body = json.dumps(completion(max_tokens=100, stream=True)).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Future()

    reading, received = asyncio.Event(), []

    async def send(message: Any) -> None:
        if message.get("body"):
            await reading.wait()  # The reader takes the headers and nothing more.
            received.append(message)

    async def run() -> None:
        answer = asyncio.create_task(app(scope, receive, send))
        while not gateway.outbox._effects:
            await asyncio.sleep(0)
        (submit,) = cast(list[Any], gateway.outbox.take())
        request_id = submit.message.request.request_id
        gateway.on_message(worker, messages.Admitted(request_id))
        for count in range(12):
            assert gateway.outbox.take() == [], f"aborted after {count} tokens of 10 that may wait"
            delta = TokenDelta(request_id, (LETTERS[0],))
            gateway.on_message(worker, messages.Tokens((delta,)))
            await asyncio.sleep(0.01)
        assert gateway.outbox.take() == [Send(worker, messages.Abort(request_id))]
        if reads_on:
            reading.set()
        await asyncio.wait_for(answer, 5)

    asyncio.run(run())
    assert len(received) == reads_on
    for message in received:
        assert not message["more_body"]
        error, done = events_of(message["body"].decode())
        assert "10 tokens waited" in error and done == "[DONE]"


def test_failing_step_ends_streams_with_an_error_and_health_with_503() -> None:
    executor = ScriptedExecutor(letter_at, failing_step=5, step_s=0.001)
    with RunningService(executor) as running:
        response = post(running.url, completion(max_tokens=100, stream=True), "completions")
        events = events_of(response.text)
        assert "event: error\n" in response.text
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert (
            error["type"] == "server_error" and "the log has more under cmpl-" in error["message"]
        )
        assert "the device is on fire" not in response.text
        for path in ("health", "ready"):
            answer = httpx.get(f"{running.url}/{path}")
            assert answer.status_code == 503
            assert "the log has more" in answer.json()["error"]["message"]
            assert "the device is on fire" not in answer.text
        refused = post(running.url, completion(), "completions")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "the device is on fire" not in refused.text
        assert metric(running.url, "deepinfer_engine_up") == 0


def test_failing_step_is_a_500_for_whole_answers_and_an_exception_for_clients() -> None:
    with RunningService(ScriptedExecutor(letter_at, failing_step=5)) as running:
        response = post(running.url, completion(max_tokens=100), "completions")
        assert response.status_code == 500
        assert "the log has more under cmpl-" in response.json()["error"]["message"]
    with (
        RunningService(ScriptedExecutor(letter_at, failing_step=5)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="the log has more under cmpl-"),
    ):
        for _ in client.completions.create(
            model="tiny-v41", prompt="x", max_tokens=100, stream=True
        ):
            pass


def test_step_that_never_returns_is_noticed() -> None:
    gate = threading.Event()
    options = {"engine.step_timeout_s": 0.2}
    with RunningService(ScriptedExecutor(letter_at, gate=gate), options) as running:
        response = post(running.url, completion(), "completions")
        assert response.status_code == 500
        assert "the log has more under cmpl-" in response.json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == 503
        gate.set()


def test_draining_finishes_streams_and_refuses_new_ones() -> None:
    gate = threading.Event()
    with (
        RunningService(ScriptedExecutor(letter_at, gate=gate)) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(post, running.url, completion(stream=True), "completions")
        wait_for(lambda: len(running.executor.plans) > 0, "the first step")
        running.drain(20)
        wait_for(
            lambda: httpx.get(f"{running.url}/ready").status_code == 503, "readiness going off"
        )
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert post(running.url, completion(), "completions").status_code == 503
        gate.set()
        assert events_of(held.result().text)[-1] == "[DONE]"
        assert "error" not in held.result().text


def test_draining_ends_what_outlasts_the_limit() -> None:
    gate = threading.Event()
    with (
        RunningService(ScriptedExecutor(letter_at, gate=gate)) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(post, running.url, completion(stream=True), "completions")
        wait_for(lambda: len(running.executor.plans) > 0, "the first step")
        running.drain(0.05)
        events = events_of(held.result().text)
        gate.set()
    assert "shut down" in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"
