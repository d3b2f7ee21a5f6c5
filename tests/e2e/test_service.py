"""Goal: an unmodified OpenAI client is answered by the real model through the real process, alone
and in company, and no client, however it behaves, leaves anything behind.

Method: one server process for all tests of this file, with the checkpoint that the repository
carries; greedy answers are compared with the golden continuation and with each other.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from serving.frontend.text import TextCodec
from tests.e2e.server import ServerProcess

MODEL = "tiny-v41"
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess()
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def greedy(golden: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "greedy.npz"))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within 30 s"
        time.sleep(0.05)


def is_idle(server: ServerProcess) -> bool:
    return server.metric("deepinfer_kv_blocks_free") == server.metric(
        "deepinfer_kv_blocks"
    ) and server.metric("deepinfer_state_slots_free") == server.metric("deepinfer_state_slots")


def test_start_up_reports_model_progress_and_a_command(server: ServerProcess) -> None:
    text = "\n".join(server.lines)
    # Two steps, three image sizes, and what moves images, counts and states.
    assert "compiling: 8 of 8 programs" in text and "loading tiny-v41" in text
    assert f"Serving {server.url}/v1" in text and f"curl {server.url}/v1/chat/completions" in text


def test_greedy_completion_is_the_golden_continuation(
    client: openai.OpenAI, greedy: dict[str, np.ndarray], golden: Path
) -> None:
    expected = greedy["tokens_kvq"].tolist()
    codec = TextCodec.load(golden / "tiny-v41")
    answer = client.completions.create(
        model=MODEL,
        prompt=greedy["prompt"].tolist(),
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    # A character that is cut off at the end is not shown.
    assert codec.decode(expected).startswith(answer.choices[0].text.rstrip("\ufffd"))
    assert len(answer.choices[0].text) > 20
    assert answer.usage is not None and answer.usage.completion_tokens == 40


def test_chat_streamed_equals_whole(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 48,
        "seed": 7,
        "extra_body": {"ignore_eos": True, "thinking": {"type": "disabled"}},
    }
    whole = client.chat.completions.create(**arguments)
    stream = client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and len(text) > 10
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 48
    assert chunks[0].choices[0].delta.role == "assistant"


def test_eight_at_once_equal_the_same_alone(client: openai.OpenAI, server: ServerProcess) -> None:
    def ask(number: int) -> str:
        text = ""
        for chunk in client.completions.create(
            model=MODEL,
            prompt=[10 + number] * (5 + 30 * number),
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            text += chunk.choices[0].text
        return text

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert len(set(together)) > 1
    assert together[0] == ask(0) and together[7] == ask(7)
    wait_for(lambda: is_idle(server), "freeing the blocks")


def test_seed_repeats_and_temperature_varies(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=24,
            temperature=1.5,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(1, 5)}) > 1


def test_cancelled_half_way_frees_its_blocks(client: openai.OpenAI, server: ServerProcess) -> None:
    wait_for(lambda: is_idle(server), "an idle start")
    before = server.metric('deepinfer_requests_finished_total{reason="abort"}')
    stream = client.completions.create(
        model=MODEL,
        prompt=[3] * 200,
        max_tokens=800,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, _ in enumerate(stream):
        if number == 5:
            break
    assert server.metric("deepinfer_kv_blocks_free") < server.metric("deepinfer_kv_blocks")
    stream.close()
    wait_for(lambda: is_idle(server), "freeing the blocks")
    assert server.metric('deepinfer_requests_finished_total{reason="abort"}') == before + 1
    assert server.metric("deepinfer_generation_tokens_total") > 5


def test_stop_string_ends_the_answer(client: openai.OpenAI, server: ServerProcess) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "temperature": 0}
    body = {"ignore_eos": True}
    free = client.completions.create(**arguments, max_tokens=60, extra_body=body)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.completions.create(**arguments, max_tokens=60, stop=stop, extra_body=body)
    assert stopped.choices[0].text == text.split(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    wait_for(lambda: is_idle(server), "freeing the blocks")


def chat(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 2} | changes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", b"{"),
        ("chat/completions", chat(model="other")),
        ("chat/completions", chat(messages=[])),
        ("chat/completions", chat(max_tokens=0)),
        ("chat/completions", chat(max_tokens=-1)),
        ("chat/completions", chat(max_tokens=2**31)),
        ("chat/completions", chat(max_tokens="5")),
        ("chat/completions", chat(temperature=3)),
        ("chat/completions", chat(messages=[{"role": "user", "content": "x y " * 800}])),
        ("completions", b"nonsense"),
        ("completions", {"model": "other", "prompt": "x"}),
        ("completions", {"model": MODEL, "prompt": [5, 320]}),
        ("completions", {"model": MODEL, "prompt": [3] * 1024}),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 2**31}),
    ],
)
def test_bad_input_is_a_400_and_the_server_goes_on(
    server: ServerProcess, path: str, body: object
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/v1/{path}", content=content)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_errors_are_exceptions_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_port_in_use_is_one_line_and_exit_code_2(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match="did not start") as caught:
        ServerProcess(["--port", port])
    assert f"port {port}: Address already in use" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_sigterm_finishes_the_running_answer_and_exits_0(server: ServerProcess) -> None:
    """The last test of the file: it ends the server."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop)
            rest = list(lines)
            assert rest[-2] == "data: [DONE]"
            assert json.loads(rest[-4].removeprefix("data: "))["choices"][0]["finish_reason"]
            assert stopping.result() == 0
    assert server.errors == ""
