"""Goal: bodies are read whole within limits of size and time, and given up when the server drains.

Method: the reader alone, in front of bodies whose parts come when the test lets them.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest
from starlette.requests import Request

from serving.frontend.body import BodyReader
from serving.frontend.errors import ApiError


def request(
    parts: Iterable[bytes], *, stalls: bool = False, hangs_up: bool = False, **headers: str
) -> Request:
    """A request whose body comes in parts, after which it may stall or be cut off."""
    events: list[Any] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if hangs_up:
        events.append({"type": "http.disconnect"})
    elif not stalls:
        events.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return events.pop(0) if events else await asyncio.Future()

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": pairs}, receive)


def run(test: Coroutine[Any, Any, bytes]) -> bytes:
    return asyncio.run(asyncio.wait_for(test, 5))


def status_of(test: Coroutine[Any, Any, bytes]) -> int:
    with pytest.raises(ApiError) as caught:
        run(test)
    return caught.value.status


def test_parts_are_joined() -> None:
    assert run(BodyReader(5, 1.0).read(request([b"ab", b"", b"cde"]))) == b"abcde"


def test_limits() -> None:
    reader = BodyReader(5, 0.02)
    assert status_of(reader.read(request([b"abc", b"def"], stalls=True))) == 413
    assert status_of(reader.read(request([], stalls=True, content_length="6"))) == 413
    assert status_of(reader.read(request([b"ab"], stalls=True))) == 408
    assert status_of(reader.read(request([b"ab"], hangs_up=True))) == 400


def test_draining_gives_up_what_is_on_its_way_and_what_comes_later() -> None:
    async def test() -> bytes:
        reader = BodyReader(5, 60.0)
        reading = asyncio.create_task(reader.read(request([b"ab"], stalls=True)))
        await asyncio.sleep(0)
        reader.drain()
        with pytest.raises(ApiError) as caught:
            await reading
        assert caught.value.status == 503
        return await reader.read(request([b"ab"]))

    assert status_of(test()) == 503
