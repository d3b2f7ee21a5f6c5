"""Goal: constrained and reported answers over HTTP: the text has the wanted form, log probabilities
stand beside the right tokens, and a grammar that fails ends its own call only.

Method: calls to a service whose executor writes the alphabet, obeys masks and makes up log
probabilities that follow from the token.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.frontend.alphabet import (
    CODEC,
    LETTERS,
    PLAIN,
    THINK_END,
    chat,
    completion,
    events_of,
    is_idle,
    letter_at,
    post,
    wait_for,
)
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

EXPLODING = "((a{1,100}){1,100}){1,100}"
JSON_CALL: Any = {
    "messages": [{"role": "user", "content": "as json"}],
    "response_format": {"type": "json_object"},
    "max_tokens": 60,
}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at)) as running:
        yield running


def answer_of(service: RunningService, body: object, path: str = "chat/completions") -> Any:
    response = post(service.url, body, path)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_json_object(service: RunningService) -> None:
    choice = answer_of(service, chat(**JSON_CALL, **PLAIN))
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["finish_reason"] == "stop"


def test_a_json_schema(service: RunningService) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["xy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = chat(max_tokens=280, response_format=wanted, **PLAIN)
    found = json.loads(answer_of(service, body)["message"]["content"])
    assert found.keys() == {"a", "b"} and found["a"] == "xy" and isinstance(found["b"], bool)


def test_the_answer_after_thinking_is_constrained() -> None:
    def token_at(position: int) -> int:
        return THINK_END if position % 5 == 0 else letter_at(position)

    with RunningService(ScriptedExecutor(token_at)) as running:
        message = answer_of(running, chat(guided_regex="[0-9]{3}", max_tokens=20))["message"]
    assert re.fullmatch("[a-z]{0,4}", message["reasoning_content"])
    assert re.fullmatch("[0-9]{3}", message["content"])


def test_a_choice_for_completions(service: RunningService) -> None:
    body = completion(guided_choice=["maybe", "never"], max_tokens=20)
    choice = answer_of(service, body, "completions")
    assert choice["text"] in ("maybe", "never") and choice["finish_reason"] == "stop"


def test_streamed_and_whole_constrained_answers_agree(service: RunningService) -> None:
    body = chat(guided_regex="x[a-f]{4}", max_tokens=20, **PLAIN)
    whole = answer_of(service, body)["message"]["content"]
    chunks = events_of(post(service.url, body | {"stream": True}).text)[:-1]
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == whole and re.fullmatch("x[a-f]{4}", whole)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_grammar_that_explodes_ends_its_own_call(is_streamed: bool) -> None:
    with RunningService(ScriptedExecutor(lambda position: LETTERS[0])) as running:
        check_explosion(running, is_streamed)


def check_explosion(service: RunningService, is_streamed: bool) -> None:
    body = chat(guided_regex=EXPLODING, max_tokens=200, stream=is_streamed, **PLAIN)
    response = post(service.url, body)
    if is_streamed:
        assert "event: error" in response.text
        error = json.loads(events_of(response.text)[-2])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["param"] == "guided_regex" and "too complex" in error["message"]
    wait_for(lambda: is_idle(service.url), "the end of the failed call")
    assert answer_of(service, chat(**PLAIN))["message"]["content"]


def check_entry(entry: Any, letter: str, num_top: int) -> None:
    token = CODEC.encode_text(letter)[0]
    assert entry["token"] == letter and entry["bytes"] == [ord(letter)]
    assert entry["logprob"] == pytest.approx(-token / 100)
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
        [-token / 100 - number for number in range(num_top)]
    )
    assert [CODEC.encode_text(top["token"])[0] for top in entry["top_logprobs"]] == [
        token + number for number in range(num_top)
    ]


def test_logprobs_of_a_chat(service: RunningService) -> None:
    body = chat(logprobs=True, top_logprobs=2, **PLAIN)
    choice = answer_of(service, body)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list(choice["message"]["content"])
    for entry in entries:
        check_entry(entry, entry["token"], 2)
    chunks = events_of(post(service.url, body | {"stream": True}).text)[:-1]
    streamed = [json.loads(chunk)["choices"][0].get("logprobs") for chunk in chunks]
    found = [entry for part in streamed if part for entry in part["content"]]
    assert found == entries


def test_logprobs_without_alternatives_and_without_the_stop_token(service: RunningService) -> None:
    last = LETTERS[0]
    body = chat(logprobs=True, stop_token_ids=[last], max_tokens=60, **PLAIN)
    choice = answer_of(service, body)
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list(choice["message"]["content"])
    for entry in entries:
        check_entry(entry, entry["token"], 0)


def test_logprobs_are_absent_unless_they_are_wanted(service: RunningService) -> None:
    assert answer_of(service, chat(**PLAIN)).get("logprobs") is None
    assert answer_of(service, completion(), "completions")["logprobs"] is None


def test_logprobs_of_completions(service: RunningService) -> None:
    body = completion(logprobs=2)
    choice = answer_of(service, body, "completions")
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(len(choice["text"])))
    for letter, logprob, tops in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        token = CODEC.encode_text(letter)[0]
        assert logprob == pytest.approx(-token / 100)
        assert tops[letter] == pytest.approx(-token / 100) and len(tops) == 2
    chunks = events_of(post(service.url, body | {"stream": True}, "completions").text)[:-1]
    parts = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in chunks]
    merged = [token for part in parts if part for token in part["tokens"]]
    assert merged == found["tokens"]
    assert (
        answer_of(service, completion(logprobs=0), "completions")["logprobs"]["top_logprobs"]
        == [None] * 4
    )
