"""What tests of HTTP share: an alphabet as the answer of every prompt, calls, and waiting."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from serving.frontend.text import TextCodec
from tests.serving.running_service import MODEL_DIR

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


def metric(url: str, name: str) -> float:
    """A value of the metrics page; 0 for a counter that has not begun."""
    page = httpx.get(f"{url}/metrics").text
    lines = (line for line in page.splitlines() if line.startswith(f"{name} "))
    return next((float(line.split()[-1]) for line in lines), 0.0)


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


def completion(**changes: object) -> dict[str, object]:
    return {"model": "tiny-v41", "prompt": "x", "max_tokens": 4} | changes
