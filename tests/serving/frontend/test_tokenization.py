"""Goal: clients see the very tokens that the model would, and get their text back.

Method: HTTP against the encoder itself and against the counts of answers.
"""

from collections.abc import Iterator

import httpx
import pytest

from tests.serving.frontend.alphabet import CODEC, HELLO, PLAIN, chat, letter_at, post
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at)) as running:
        yield running


def call(service: RunningService, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{service.url}/{path}", json={"model": "tiny-v41"} | body, timeout=20)


def test_prompt_and_back(service: RunningService) -> None:
    answer = call(service, "tokenize", prompt="Hällo <think>", return_token_strs=True).json()
    assert answer["tokens"] == list(CODEC.encode_text("Hällo <think>"))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512 and answer["token_strs"][0] == "H"
    back = call(service, "detokenize", tokens=answer["tokens"]).json()
    assert back == {"prompt": "Hällo <think>"}


def test_messages_count_as_in_an_answer(service: RunningService) -> None:
    tokens = call(service, "tokenize", messages=HELLO, **PLAIN).json()
    usage = post(service.url, chat() | PLAIN).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"messages": "x"}, "messages"),
        ("detokenize", {"tokens": [0, 320]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_refusals(service: RunningService, path: str, body: dict[str, object], param: str) -> None:
    answer = call(service, path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
