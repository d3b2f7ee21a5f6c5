"""Goal: the HTTP surface is what clients of the public protocols expect, for good and bad input,
and no fault of client or device leaves a request hanging or a block held.

Method: real HTTP over loopback against a scripted executor, whose answers are known by hand.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import openai
import pytest

from serving.config import ServerOptions
from serving.core.request import TokenDelta
from serving.frontend.app import make_app
from serving.frontend.gateway import Gateway
from serving.frontend.protocols import ServedModel
from serving.frontend.text import TextCodec
from serving.nodes import messages
from serving.nodes.node import NodeId, Send
from serving.observe import ServiceMetrics
from serving.transport.driver import SystemClock
from tests.serving.running_service import FACTS, MODEL_DIR, RunningService
from tests.serving.scripted import ScriptedExecutor

CODEC = TextCodec.load(MODEL_DIR)
LETTERS = [CODEC.encode_text(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
THINK_END = CODEC.encode_text("</think>")[0]
HELLO: Any = [{"role": "user", "content": "Hello"}]
PLAIN = {"thinking": {"type": "disabled"}}


def letter_at(position: int) -> int:
    """The alphabet, over and over: position 0 is `a`."""
    return LETTERS[position % 26]


def letters(start: int, count: int) -> str:
    """What the scripted executor writes after a prompt of `start` tokens."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[(start + i) % 26] for i in range(count))


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return next(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name} ")
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within 10 s"
        time.sleep(0.01)


def is_idle(url: str) -> bool:
    return metric(url, "deepinfer_kv_blocks_free") == metric(url, "deepinfer_kv_blocks")


def events_of(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n"), f"the stream ends inside an event: {text[-80:]!r}"
    return [block.split("data: ", 1)[1] for block in text[:-2].split("\n\n")]


def post(url: str, body: object, path: str = "chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v1/{path}", content=content, timeout=20)


def chat(**changes: object) -> dict[str, object]:
    return {"model": "tiny-v41", "messages": HELLO, "max_tokens": 4} | changes


def test_chat_answer_is_the_scripted_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-v41", messages=HELLO, max_tokens=7, extra_body=PLAIN
    )
    assert answer.usage is not None
    assert answer.choices[0].message.content == letters(answer.usage.prompt_tokens, 7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_chat_stream_has_role_text_finish_usage_in_order(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny-v41",
        messages=HELLO,
        max_completion_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=PLAIN,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert all(texts), f"empty deltas in {texts}"
    usage = chunks[-1].usage
    assert usage is not None and chunks[-1].choices == []
    assert "".join(filter(None, texts)) == letters(usage.prompt_tokens, 7)
    assert usage.completion_tokens == 7
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-2].choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_stream_without_usage_option_ends_with_done(service: RunningService) -> None:
    response = post(service.url, chat(stream=True) | PLAIN)
    events = events_of(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["delta"] == {}


def test_reasoning_is_split_from_content(service: RunningService) -> None:
    prompt = len(CODEC.encode_text("x"))  # Any number: the script below finds the prompt itself.
    length = post(service.url, chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert length > prompt

    def thinking(position: int) -> int:
        return THINK_END if position == length + 3 else letter_at(position)

    with RunningService(ScriptedExecutor(thinking)) as running:
        message = post(running.url, chat(max_tokens=6)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == letters(length, 3)
        assert message["content"] == letters(length + 4, 2)


def test_eos_ends_an_answer_and_is_not_shown() -> None:
    def script(position: int) -> int:
        return 1 if position == 5 else letter_at(position)

    body = {"model": "tiny-v41", "prompt": [3, 4], "max_tokens": 9}
    with RunningService(ScriptedExecutor(script)) as running:
        answer = post(running.url, body, "completions").json()
        ignored = post(running.url, body | {"ignore_eos": True}, "completions").json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "cde",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] == 4
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["choices"][0]["text"] == "cde<｜end▁of▁sentence｜>ghijk"


def test_stop_string_ends_text_and_frees_the_request(service: RunningService) -> None:
    for stream in (False, True):
        body = chat(stop=["fgh"], max_tokens=300, stream=stream) | PLAIN
        response = post(service.url, body)
        if stream:
            chunks = [json.loads(text) for text in events_of(response.text)[:-1]]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            text = "".join(delta.get("content") or "" for delta in deltas)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            text = response.json()["choices"][0]["message"]["content"]
            reason = response.json()["choices"][0]["finish_reason"]
        assert text.endswith("e") and "fgh" not in text
        assert reason == "stop"
        wait_for(lambda: is_idle(service.url), "freeing the blocks")


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["aa", "b", "cccc"]
    answer = client.completions.create(model="tiny-v41", prompt=prompts, max_tokens=5)
    starts = [len(CODEC.encode_text(prompt)) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [letters(n, 5) for n in starts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(starts)
    assert answer.usage.completion_tokens == 15


def test_completions_stream_interleaves_prompts(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny-v41",
        prompt=[[5, 6], [7]],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"echo": True},
    )
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    chunks = list(stream)
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [CODEC.decode([5, 6]) + letters(2, 5), CODEC.decode([7]) + letters(1, 5)]
    assert reasons == ["length", "length"]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 13


def test_eight_at_once(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[str, int]:
        text = ""
        for chunk in client.completions.create(
            model="tiny-v41", prompt=[3] * number, max_tokens=20 + number, stream=True
        ):
            text += chunk.choices[0].text
        return text, number

    with ThreadPoolExecutor(8) as pool:
        for text, number in pool.map(ask, range(1, 9)):
            assert text == letters(number, 20 + number)


def test_models_health_ready(service: RunningService, client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny-v41"]
    assert client.models.retrieve("tiny-v41").id == "tiny-v41"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{service.url}/ready").json() == {"status": "ready"}


def test_unknown_route_and_method_have_error_bodies(service: RunningService) -> None:
    for response, status in (
        (httpx.get(f"{service.url}/v1/nothing"), 404),
        (httpx.get(f"{service.url}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


BAD_CHATS: list[tuple[Any, str | None]] = [
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"\xff", None),
    (b"[" * 100_000, None),
    ({}, "model"),
    ({"model": "tiny-v41"}, "messages"),
    (chat(model="other"), "model"),
    (chat(model=3), "model"),
    (chat(messages=[]), "messages"),
    (chat(messages="Hello"), "messages"),
    (chat(messages=[{"role": "king", "content": "x"}]), None),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=2**31), "max_tokens"),
    (chat(max_tokens=2**70), "max_tokens"),
    (chat(max_tokens="5"), "max_tokens"),
    (chat(max_completion_tokens="5"), "max_completion_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(temperature=3), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(seed=-1), "seed"),
    (chat(seed=2**64), "seed"),
    (chat(stop=""), "stop"),
    (chat(stop=7), "stop"),
    (chat(n=2), "n"),
    (chat(logprobs=True), "logprobs"),
    (chat(logit_bias={"5": 1}), "logit_bias"),
    (chat(presence_penalty=0.5), "presence_penalty"),
    (chat(min_p=0.1), "min_p"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stop_token_ids=[320]), "stop_token_ids"),
    (chat(ignore_eos=1), "ignore_eos"),
    (chat(messages=[{"role": "user", "content": "x" * 600}]), "messages"),
    (chat(max_tokens=510), "max_tokens"),
    (chat(messages=[{"role": "user", "content": "\ud800"}]), None),
    (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]), "tools"),
    (
        chat(
            tools=[
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            ]
        ),
        "tools",
    ),
    (
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
                    ],
                }
            ]
        ),
        "messages",
    ),
    (
        chat(
            messages=[{"role": "user", "content": "json"}],
            response_format={"type": "json_object"},
        ),
        "response_format",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_bad_chat_is_a_400_that_names_the_field(
    service: RunningService, body: object, param: str | None
) -> None:
    response = post(service.url, body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error" and error["message"]


def completion(**changes: object) -> dict[str, object]:
    return {"model": "tiny-v41", "prompt": "x", "max_tokens": 4} | changes


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        ({"prompt": "x"}, "model"),
        (completion(model="other"), "model"),
        ({"model": "tiny-v41"}, "prompt"),
        (completion(prompt=""), "prompt"),
        (completion(prompt=[]), "prompt"),
        (completion(prompt=[[]]), "prompt"),
        (completion(prompt=[3, 320]), "prompt"),
        (completion(prompt=[3, -1]), "prompt"),
        (completion(prompt=[3, 2**70]), "prompt"),
        (completion(prompt=[3, True]), "prompt"),
        (completion(prompt=["x", 3]), "prompt"),
        (completion(prompt={"text": "x"}), "prompt"),
        (completion(prompt="\ud800"), None),
        (completion(prompt=["x"] * 65), "prompt"),
        (completion(prompt=[3] * 512), "prompt"),
        (completion(max_tokens=0), "max_tokens"),
        (completion(max_tokens=-1), "max_tokens"),
        (completion(max_tokens=2**31), "max_tokens"),
        (completion(max_tokens="5"), "max_tokens"),
        (completion(max_tokens=True), "max_tokens"),
        (completion(temperature=3), "temperature"),
        (completion(temperature="hot"), "temperature"),
        (completion(seed=2**63), "seed"),
        (completion(stop=[""]), "stop"),
        (completion(stop=["x"] * 17), "stop"),
        (completion(n=2), "n"),
        (completion(best_of=2), "best_of"),
        (completion(logprobs=0), "logprobs"),
        (completion(suffix="x"), "suffix"),
        (completion(stream=1), "stream"),
        (completion(echo="yes"), "echo"),
        (completion(stream=True, stream_options=3), "stream_options"),
    ],
)
def test_bad_completion_is_a_400_that_names_the_field(
    service: RunningService, body: object, param: str | None
) -> None:
    response = post(service.url, body, "completions")
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == param, error


def test_defaults_spelled_out_are_accepted(service: RunningService) -> None:
    body = chat(
        n=1,
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        user="somebody",
        metadata={"a": "b"},
        stop=None,
        top_k=-1,
        seed=7,
    )
    assert post(service.url, body).status_code == 200


def test_sampling_fields_reach_the_engine(service: RunningService) -> None:
    service.executor.plans.clear()
    service.executor._collected = 0
    body = completion(temperature=0.25, top_p=0.5, top_k=3, seed=11)
    assert post(service.url, body, "completions").status_code == 200
    plan = service.executor.plans[0]
    assert plan.temperatures.tolist() == [0.25] and plan.top_ps.tolist() == [0.5]
    assert plan.top_ks.tolist() == [3] and plan.seeds.tolist() == [11]


def test_body_over_the_limit_is_refused() -> None:
    with RunningService(ScriptedExecutor(letter_at), {"server.body_bytes_max": 1000}) as running:
        declared = post(running.url, chat(user="x" * 1000))
        parts = (b"x" * 600 for _ in range(2))
        undeclared = httpx.post(f"{running.url}/v1/completions", content=parts)
        assert declared.status_code == undeclared.status_code == 413
        assert "1000" in declared.json()["error"]["message"]
        assert post(running.url, chat()).status_code == 200


def test_full_queue_is_a_429_with_retry_after() -> None:
    gate = threading.Event()
    options = {"engine.waiting_max": 1, "engine.decode_rows": [1], "engine.prefill_rows": 1}
    with (
        RunningService(ScriptedExecutor(letter_at, gate=gate), options) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        held = [pool.submit(post, running.url, completion(), "completions")]
        wait_for(lambda: len(running.executor.plans) == 1, "the first step")
        held.append(pool.submit(post, running.url, completion(), "completions"))
        wait_for(lambda: metric(running.url, "deepinfer_num_requests_waiting") == 1, "a full queue")
        refused = post(running.url, completion(), "completions")
        gate.set()
        assert [task.result().status_code for task in held] == [200, 200]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_blocks(service: RunningService, stream: bool) -> None:
    body = json.dumps(completion(max_tokens=480, stream=stream)).encode()
    address = service.url.removeprefix("http://").split(":")
    aborts = 'deepinfer_requests_finished_total{reason="abort"}'
    page = httpx.get(f"{service.url}/metrics").text
    before = metric(service.url, aborts) if aborts in page else 0
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: not is_idle(service.url), "the start of the request")
    wait_for(lambda: is_idle(service.url), "freeing the blocks")
    assert metric(service.url, aborts) == before + 1


def test_slow_reader_is_cut_off() -> None:
    worker = NodeId("mesh_worker", "0")
    gateway = Gateway(NodeId("frontend", "0"), worker, SystemClock(), ServiceMetrics(), 10)
    model = ServedModel("tiny-v41", CODEC, 320, 512, 1)
    app = make_app(gateway, model, ServerOptions(), SystemClock())
    body = json.dumps(completion(max_tokens=100, stream=True)).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Future()

    async def send(message: Any) -> None:
        if message.get("body"):
            await asyncio.Future()  # The reader takes the headers and nothing more.

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
        await asyncio.wait_for(answer, 5)

    asyncio.run(run())


def test_failing_step_ends_streams_with_an_error_and_health_with_503() -> None:
    executor = ScriptedExecutor(letter_at, failing_step=5, step_s=0.001)
    with RunningService(executor) as running:
        response = post(running.url, completion(max_tokens=100, stream=True), "completions")
        events = events_of(response.text)
        assert "event: error\n" in response.text
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["type"] == "server_error" and "the device is on fire" in error["message"]
        for path in ("health", "ready"):
            answer = httpx.get(f"{running.url}/{path}")
            assert answer.status_code == 503
            assert "the device is on fire" in answer.json()["error"]["message"]
        refused = post(running.url, completion(), "completions")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert metric(running.url, "deepinfer_engine_up") == 0


def test_failing_step_is_a_500_for_whole_answers_and_an_exception_for_clients() -> None:
    with RunningService(ScriptedExecutor(letter_at, failing_step=5)) as running:
        response = post(running.url, completion(max_tokens=100), "completions")
        assert response.status_code == 500
        assert "the device is on fire" in response.json()["error"]["message"]
    with (
        RunningService(ScriptedExecutor(letter_at, failing_step=5)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="the device is on fire"),
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
        assert "did not finish within 0.2 s" in response.json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == 503
        gate.set()


def test_draining_finishes_streams_and_refuses_new_ones() -> None:
    gate = threading.Event()
    with (
        RunningService(ScriptedExecutor(letter_at, gate=gate)) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(post, running.url, completion(stream=True), "completions")
        wait_for(lambda: len(running.executor.plans) == 1, "the first step")
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
        wait_for(lambda: len(running.executor.plans) == 1, "the first step")
        running.drain(0.05)
        events = events_of(held.result().text)
        gate.set()
    assert "shut down" in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"


def test_large_prompt_is_parsed_beside_the_loop() -> None:
    # Larger than what is parsed on the event loop, and within the context.
    text = "a b " * 10_000
    num_tokens = len(CODEC.encode_text(text))
    options = {"engine.max_context": 65536, "engine.num_blocks": 1025}
    with RunningService(ScriptedExecutor(letter_at), options) as running:
        answer = post(running.url, completion(prompt=text), "completions").json()
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["choices"][0]["text"] == letters(num_tokens, 4)
    assert num_tokens < FACTS.max_position_embeddings
