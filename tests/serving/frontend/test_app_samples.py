"""Goal: a call with `n` gets that many choices, each with tokens of its own, and counts its prompt
once.

Method: real HTTP against a scripted executor whose letters depend on the seed of the request.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serving.core.forking import sample_seed
from serving.core.step_plan import StepResult
from tests.serving.frontend.alphabet import (
    LETTERS,
    PLAIN,
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

SEED = 11
SHIFTS = [sample_seed(SEED, index) % 26 for index in range(3)]


class SeededExecutor(ScriptedExecutor):
    """Goes on by as many letters of the alphabet as the seed says; 0 if the request is greedy."""

    def collect(self) -> StepResult:
        plan = self.plans[self._collected]
        result = super().collect()
        shifts = np.where(plan.temperatures > 0, plan.seeds % 26, 0)
        places = [LETTERS.index(token) for token in result.token_ids.tolist()]
        tokens = [letter_at(place + shift) for place, shift in zip(places, shifts, strict=True)]
        return StepResult(plan.step_index, np.array(tokens, np.int32), result.report)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(SeededExecutor(letter_at, step_s=0.001)) as running:
        yield running


def test_choices_of_a_completion_have_an_index_and_a_seed_each(service: RunningService) -> None:
    assert len(set(SHIFTS)) == 3, "the test needs shifts that differ"
    prompts = [[3] * 300, [4, 5]]
    body = completion(prompt=prompts, n=3, seed=SEED, best_of=3)
    before = metric(service.url, "deepinfer_prompt_tokens_total")
    service.executor.plans.clear()
    service.executor._collected = 0
    answer = post(service.url, body, "completions").json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [letters(start + shift, 4) for start in (300, 2) for shift in SHIFTS]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 302,
        "completion_tokens": 24,
        "total_tokens": 326,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    num_fed = sum(int(plan.num_tokens.sum()) for plan in service.executor.plans)
    # Two blocks of 128 are computed for the first sample alone; a last token is never fed.
    assert num_fed == 256 + 3 * 44 + 3 * 2 + 6 * 3
    assert metric(service.url, "deepinfer_prompt_tokens_total") == before + 302
    alone = post(service.url, completion(prompt=prompts, seed=SEED), "completions").json()
    assert [choice["text"] for choice in alone["choices"]] == [texts[0], texts[3]]


def test_choices_of_a_chat(service: RunningService) -> None:
    body = chat(n=3, seed=SEED, logprobs=True) | PLAIN
    answer = post(service.url, body).json()
    start = answer["usage"]["prompt_tokens"]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [letters(start + shift, 4) for shift in SHIFTS]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [4] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == start + 12
    alone = post(service.url, body | {"n": 1}).json()
    assert alone["choices"] == answer["choices"][:1]
    assert alone["usage"]["prompt_tokens"] == start


def test_greedy_choices_are_equal(service: RunningService) -> None:
    choices = post(service.url, chat(n=2, temperature=0) | PLAIN).json()["choices"]
    assert choices[0]["message"] == choices[1]["message"] and len(choices) == 2


def test_reasoning_of_all_choices_is_counted(service: RunningService) -> None:
    def num_reasoning(**changes: object) -> int:
        usage = post(service.url, chat(**changes)).json()["usage"]
        return usage["completion_tokens_details"]["reasoning_tokens"]

    alone = [num_reasoning(seed=sample_seed(SEED, index)) for index in range(3)]
    assert num_reasoning(n=3, seed=SEED) == sum(alone) > 9


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_streams_interleave_choices(
    service: RunningService, path: str, stream_options: dict[str, Any] | None
) -> None:
    body = completion(prompt=[3, 4]) if path == "completions" else chat(**PLAIN)
    body |= {
        "n": 3,
        "seed": SEED,
        "stream": True,
        "max_tokens": 9,
        "stream_options": stream_options,
    }
    events = events_of(post(service.url, body, path).text)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(text) for text in events[:-1]]
    texts, order = ["", "", ""], list[int]()
    reasons: list[list[str]] = [[], [], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if path == "completions" else choice["delta"].get("content")
            texts[choice["index"]] += text or ""
            order.append(choice["index"])
            reasons[choice["index"]] += filter(None, [choice["finish_reason"]])
    counted = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    whole = post(service.url, body | {"n": 1, "stream": False, "stream_options": None}, path)
    start = whole.json()["usage"]["prompt_tokens"]
    assert texts == [letters(start + shift, 9) for shift in SHIFTS]
    assert order != sorted(order), "one choice after another"
    assert reasons == [["length"]] * 3
    if stream_options:
        assert chunks[-1]["choices"] == []
    if stream_options or path != "completions":
        assert [usage["total_tokens"] for usage in counted] == [start + 27]
        assert chunks[-1].get("usage"), "the usage comes last"


def test_a_stop_string_ends_one_choice_alone(service: RunningService) -> None:
    stop = letters(2 + SHIFTS[1] + 2, 2)
    body = completion(prompt=[3, 4], n=3, seed=SEED, stop=stop, max_tokens=5)
    choices = post(service.url, body, "completions").json()["choices"]
    assert choices[1]["text"] == letters(2 + SHIFTS[1], 2)
    assert choices[1]["finish_reason"] == "stop"
    wait_for(lambda: is_idle(service.url), "freeing the blocks")


def test_hanging_up_aborts_all_choices(service: RunningService) -> None:
    aborts = 'deepinfer_requests_finished_total{reason="abort"}'
    before = metric(service.url, aborts)
    body = json.dumps(completion(prompt=[3] * 300, n=20, max_tokens=200)).encode()
    address = service.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: not is_idle(service.url), "the start of the requests")
    wait_for(lambda: is_idle(service.url), "freeing the blocks")
    assert metric(service.url, aborts) == before + 20
    assert metric(service.url, "deepinfer_num_requests_waiting") == 0
