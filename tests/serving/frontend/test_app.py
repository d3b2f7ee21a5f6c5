"""Goal: the HTTP surface is what clients of the public protocols expect, for good and bad input.

Method: real HTTP over loopback against a scripted executor, whose answers are known by hand.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serving.frontend.alphabet import (
    CODEC,
    HELLO,
    PLAIN,
    THINK_END,
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
from tests.serving.running_service import FACTS, RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001)) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as made:
        yield made


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
    stops = 'deepinfer_requests_finished_total{reason="stop"}'
    before = metric(service.url, stops)
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
    assert metric(service.url, stops) == before + 2


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


def test_status_says_what_runs_and_what_was_compiled(service: RunningService) -> None:
    status = httpx.get(f"{service.url}/status").json()
    assert status["failure"] is None
    assert status["engine"]["num_slots"] == 16 and status["engine"]["num_blocks"] == 64
    program = {"name": "decode_r16_t16_b4", "seconds": 1.5, "is_from_cache": True}
    assert status["programs"] == [program]
    assert metric(service.url, "deepinfer_programs_from_cache") == 1
    assert metric(service.url, "deepinfer_compile_seconds") == 1.5


def test_unknown_route_and_method_have_error_bodies(service: RunningService) -> None:
    for response, status in (
        (httpx.get(f"{service.url}/v1/nothing"), 404),
        (httpx.get(f"{service.url}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert response.headers.get("allow") == ("POST" if status == 405 else None)


def test_the_system_may_be_called_developer(service: RunningService) -> None:
    def counts(path: str, role: str) -> object:
        messages = [{"role": role, "content": "Brief."}, {"role": "user", "content": "Hi"}]
        answer = httpx.post(
            f"{service.url}/{path}", json=chat() | {"messages": messages}, timeout=20
        ).json()
        return answer.get("tokens") or answer["usage"]["prompt_tokens"]

    for path in ("v1/chat/completions", "tokenize"):
        assert counts(path, "developer") == counts(path, "system")


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
    (chat(messages=[{"role": "king", "content": "x"}]), "messages"),
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
    (chat(n=0), "n"),
    (chat(n=65), "n"),
    (chat(n="2"), "n"),
    (chat(n=2, best_of=3), "best_of"),
    (chat(priority=1.5), "priority"),
    (chat(priority=2**15), "priority"),
    (chat(logprobs="yes"), "logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logit_bias={"320": 1}), "logit_bias"),
    (chat(logit_bias={"5": 101}), "logit_bias"),
    (chat(presence_penalty=2.5), "presence_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(min_p=1.1), "min_p"),
    (chat(prompt_logprobs=1), "prompt_logprobs"),
    (chat(seed=-1), "seed"),
    (chat(seed=2**64), "seed"),
    (chat(guided_regex="[a-"), "guided_regex"),
    (chat(guided_json={"type": "objectt"}), "guided_json"),
    (chat(guided_regex="a", stop=["a"]), "stop"),
    (chat(guided_regex="a", ignore_eos=True), "ignore_eos"),
    (chat(guided_regex="a", stop_token_ids=[5]), "stop_token_ids"),
    (chat(guided_regex="a", guided_json={}), "guided_regex"),
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
            stop="}",
        ),
        "stop",
    ),
    (
        chat(
            messages=[{"role": "user", "content": "json"}],
            response_format={"type": "json_object"},
            stop_token_ids=[5],
        ),
        "stop_token_ids",
    ),
    (chat(logprobs=False, top_logprobs=2), "top_logprobs"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
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
        (completion(n=0), "n"),
        (completion(n=65), "n"),
        (completion(n=True), "n"),
        (completion(prompt=["x"] * 22, n=3), "n"),
        (completion(n=2, best_of=1), "best_of"),
        (completion(priority=-(2**15)), "priority"),
        (completion(best_of=2), "best_of"),
        (completion(logprobs=21), "logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(logprobs=1, echo=True), "logprobs"),
        (completion(top_logprobs=1), "top_logprobs"),
        (completion(logit_bias={"320": 1}), "logit_bias"),
        (completion(logit_bias={"-1": 1}), "logit_bias"),
        (completion(seed=-1), "seed"),
        (completion(guided_regex="a", stop="a"), "stop"),
        (completion(guided_regex="a", stop_token_ids=[5]), "stop_token_ids"),
        (completion(guided_regex="a", ignore_eos=True), "ignore_eos"),
        (completion(structured_outputs={"json": "{"}), "structured_outputs"),
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
