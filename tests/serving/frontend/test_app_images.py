"""Goal: images of a chat reach the engine as the client sent them, and bad ones are a 400 that
says which image it is, after which the service goes on.

Method: real HTTP against a scripted executor; the plans it receives are looked at.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.serving import running_service
from tests.serving.frontend.alphabet import CODEC, letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

LIMITS = {"images.per_request_max": 2, "images.bytes_max": 20_000, "images.pixels_max": 10_000}


def png(width: int, height: int, value: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def part(data: bytes) -> Any:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": "Look:"}, *parts]}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at), LIMITS) as running:
        yield running


def post(service: RunningService, *messages: Any) -> httpx.Response:
    body = {"model": "tiny-v41", "messages": list(messages), "max_tokens": 3}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_images_reach_the_engine(service: RunningService, is_streamed: bool) -> None:
    num_before = len(service.executor.plans)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client:
        answer: Any = client.chat.completions.create(
            model="tiny-v41",
            messages=[user(part(png(42, 42)), part(png(80, 42, 10)))],
            max_tokens=3,
            stream=is_streamed,
        )
        if is_streamed:
            assert list(answer)
    (plan,) = [p for p in service.executor.plans[num_before:] if p.images]
    first, second = plan.images
    assert (first.image.patch_rows, first.image.patch_cols, first.image.num_tokens) == (3, 3, 4)
    assert (second.image.patch_rows, second.image.patch_cols, second.image.num_tokens) == (3, 6, 5)
    assert (first.image.pixels == 90).all()
    assert set(np.unique(second.image.pixels)) <= set(range(9, 128)), "grey borders"
    for place in plan.images:
        span = plan.token_ids[place.token_index :][: place.image.num_tokens]
        assert (span == 318).all()
    if not is_streamed:
        assert answer.usage.prompt_tokens == len(plan.token_ids)


GOOD = part(png(10, 10))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(GOOD, part(b"no image"))], "Image 2 (messages[0]) cannot be decoded"),
        ([user(GOOD), user(part(png(99, 99)[:-30]))], "Image 2 (messages[1]) cannot be decoded"),
        ([user(part(png(101, 100)))], "Image 1 (messages[0]) has 101 x 100 pixels"),
        ([user(part(png(1, 1) + bytes(20_000)))], "Image 1 (messages[0]) has 20069 bytes"),
        ([user(GOOD, GOOD, GOOD)], "Image 3 (messages[0]) is one too many"),
        (
            [user(GOOD, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}})],
            "Image 2 (messages[0]) is a URL, and this server does not fetch images",
        ),
        (
            [user({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}})],
            "Image 1 (messages[0].content[1]) is not valid base64",
        ),
        (
            [user({"type": "image_url", "image_url": "data:image/png;base64,AAAA"})],
            "Image 1 (messages[0].content[1]) has no usable url",
        ),
    ],
)
def test_bad_images_are_named(service: RunningService, messages: list[Any], expected: str) -> None:
    response = post(service, *messages)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error" and error["param"] == "messages"
    assert error["message"].startswith(expected), error
    assert post(service, user(GOOD)).status_code == 200


def test_images_count_towards_the_context(service: RunningService) -> None:
    response = post(service, user({"type": "text", "text": "x" * 300}))
    assert response.status_code == 200
    num_free = 512 - response.json()["usage"]["prompt_tokens"]
    text = {"type": "text", "text": "x" * (300 + num_free - 20)}
    assert post(service, user(text)).status_code == 200
    # Two spans of 14 tokens each.
    response = post(service, user(text, part(png(100, 100)), part(png(100, 100))))
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded", error


def test_an_image_larger_than_a_prefill_step_is_refused() -> None:
    options = {"engine.prefill_tokens": [8]}
    with RunningService(ScriptedExecutor(letter_at), options) as service:
        response = post(service, user(part(png(100, 100))))
        assert response.status_code == 400
        assert "image 1 has 14 tokens; expected at most 8" in response.json()["error"]["message"]
        assert post(service, user(GOOD)).status_code == 200


@pytest.mark.parametrize("prompt", [[5, 318, 6], "a" + CODEC.decode([318]), ["a", [318]]])
def test_raw_prompts_cannot_hold_what_stands_for_an_image(
    service: RunningService, prompt: object
) -> None:
    body = {"model": "tiny-v41", "prompt": prompt, "max_tokens": 3}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=30)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "prompt"
    assert "is 318, which stands for an image" in error["message"]


def test_a_model_without_an_encoder_takes_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_service, "FACTS", replace(running_service.FACTS, images=None))
    with RunningService(ScriptedExecutor(letter_at)) as service:
        response = post(service, user(GOOD))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            "Image 1 (messages[0]): this model has no image encoder; send text only"
        )
        assert post(service, user()).status_code == 200
