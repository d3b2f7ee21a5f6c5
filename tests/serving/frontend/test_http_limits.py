"""Goal: a head that is too large or too slow is given up with a reason; others are served, also
several on one connection.

Method: sockets against a service with small limits.
"""

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.serving.frontend.alphabet import letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    options = {"server.head_bytes_max": 1000, "server.head_s": 0.3}
    with RunningService(ScriptedExecutor(letter_at), options) as running:
        yield running


def connect(service: RunningService) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_large_head_that_has_arrived(service: RunningService) -> None:
    answer = httpx.get(f"{service.url}/health", headers={"x-much": "y" * 1000})
    assert (
        answer.status_code == 431 and "expected at most 1000" in answer.json()["error"]["message"]
    )
    assert httpx.get(f"{service.url}/health?{'q' * 1000}").status_code == 431
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_bodies_are_not_counted(service: RunningService) -> None:
    with httpx.Client() as client:
        for _ in range(2):
            answer = client.post(f"{service.url}/tokenize", content=b" " * 5000)
            assert answer.status_code == 400


def test_large_head_that_does_not_end(service: RunningService) -> None:
    with connect(service) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-much: " + b"y" * 2000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")
        assert connection.recv(100) == b""


@pytest.mark.parametrize("beginning", [b"", b"GET /health HTTP/1.1\r\nHost: "])
def test_slow_head(service: RunningService, beginning: bytes) -> None:
    with connect(service) as connection:
        connection.sendall(beginning)
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert connection.recv(100) == b""


def test_requests_on_one_connection_each_have_their_time(service: RunningService) -> None:
    with connect(service) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            data = b""
            while b'{"status":"ok"}' not in data:
                data += connection.recv(1000)
        connection.sendall(b"GET /hea")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
