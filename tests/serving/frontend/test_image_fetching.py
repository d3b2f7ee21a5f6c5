"""Goal: images at web addresses are fetched from hosts that everybody can reach and from no other,
whatever names, redirects and spellings say, and within limits of size, time and redirects.

Method: a table of addresses; a web server on this machine, for which the rule is bent; a resolver
that answers as told.
"""

import io
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from PIL import Image

from serving.config import ImageOptions
from serving.frontend import image_fetching
from serving.frontend.image_fetching import FetchError, fetch_images, is_public
from tests.serving.frontend.alphabet import letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

LIMITS = ImageOptions(fetches_urls=True, bytes_max=5000, fetch_s=5.0, fetch_redirects_max=2)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "teal").save(buffer, "PNG")
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    """What the server has, by path."""

    stalling = threading.Event()

    def do_GET(self) -> None:
        path, _, rest = self.path.partition("?")
        if path == "/to":
            self.send_response(302)
            self.send_header("location", rest)
            self.end_headers()
        elif path == "/stall":
            self.send_response(200)
            self.end_headers()
            while not self.stalling.wait(0.05):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
        elif path == "/big":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 6000)
        elif path == "/none":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    Handler.stalling.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def web(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server, at an address that counts as public for once; others of this machine do not."""
    monkeypatch.setattr(image_fetching, "is_public", lambda address: address == "127.0.0.1")
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "168.63.129.16",
        "192.0.2.1", "192.88.99.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::7f00:1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254",
        "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_for_everybody(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "2606:4700::1", "::ffff:8.8.8.8"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "http://localhost:{port}/a.png",
        "http://2130706433:{port}/a.png",
        "http://0x7f.1:{port}/a.png",
        "http://127.1:{port}/a.png",
        "http://[::ffff:127.0.0.1]:{port}/a.png",
        "http://0:{port}/a.png",
    ],
)
def test_this_machine_is_refused_however_it_is_spelled(url: str, port: int) -> None:
    with pytest.raises(FetchError, match="not public|cannot be found"):
        fetch_images([url.format(port=port)], LIMITS)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org/a", "no web address"),
        ("file:///etc/passwd", "no web address"),
        ("http:///a", "no web address"),
        ("http://user:word@example.org/", "has a user"),
        ("http://example.org:99999/", "cannot be fetched"),
    ],
)
def test_addresses_that_are_no_use(url: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        fetch_images([url], LIMITS)


def test_files_in_their_order_and_through_redirects(web: str) -> None:
    urls = [f"{web}/a.png", f"{web}/to?/b.png", f"{web}/to?{web}/to?/c.png"]
    assert fetch_images(urls, LIMITS) == [png()] * 3
    with pytest.raises(FetchError, match="redirected more than 2 times") as caught:
        fetch_images([urls[0], f"{web}/to?{web}/to?{web}/to?/c.png"], LIMITS)
    assert caught.value.index == 1


def test_redirects_are_checked_like_the_first_address(web: str, port: int) -> None:
    for target in (f"http://127.0.0.2:{port}/a", f"http://[::1]:{port}/a"):
        with pytest.raises(FetchError, match="not public|cannot be found"):
            fetch_images([f"{web}/to?{target}"], LIMITS)
    with pytest.raises(FetchError, match="no web address"):
        fetch_images([f"{web}/to?file:///etc/passwd"], LIMITS)


def test_the_connection_goes_to_the_address_that_was_checked(
    web: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        # A name that means something else every time it is asked for.
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(image_fetching.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(image_fetching.socket, "create_connection", _connected)
    assert fetch_images([f"http://pictures.example:{port}/a.png"], LIMITS) == [png()]
    assert asked == ["pictures.example"]


def _connected(address: tuple[str, int], timeout: float) -> socket.socket:
    made = socket.socket()
    made.settimeout(timeout)
    made.connect(address)
    return made


def test_a_host_with_one_address_that_is_not_public_is_refused(
    web: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in ("127.0.0.1", "127.0.0.3")]

    monkeypatch.setattr(image_fetching.socket, "getaddrinfo", resolve)
    with pytest.raises(FetchError, match="not public"):
        fetch_images([f"http://pictures.example:{port}/a.png"], LIMITS)


def test_limits_of_size_and_time(web: str) -> None:
    with pytest.raises(FetchError, match="more than 5000 bytes"):
        fetch_images([f"{web}/big"], LIMITS)
    with pytest.raises(FetchError, match="status 404"):
        fetch_images([f"{web}/none"], LIMITS)
    hasty = ImageOptions(fetches_urls=True, fetch_s=0.3)
    with pytest.raises(FetchError, match=r"did not arrive within 0\.3 s"):
        fetch_images([f"{web}/stall"], hasty)


def chat(service: RunningService, url: str) -> httpx.Response:
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}]
    body = {"model": "tiny-v41", "messages": messages, "max_tokens": 2}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30)


def test_a_fetched_image_reaches_the_engine(web: str) -> None:
    executor = ScriptedExecutor(letter_at)
    with RunningService(executor, {"images.fetches_urls": True}) as service:
        assert chat(service, f"{web}/a.png").status_code == 200
        assert any(plan.images for plan in executor.plans)
        error = chat(service, "http://127.0.0.2/a.png").json()["error"]
    assert error["message"].startswith("Image 1 (") and "not public" in error["message"]
    with RunningService(ScriptedExecutor(letter_at)) as service:
        refused = chat(service, f"{web}/a.png")
    assert refused.status_code == 400 and "does not fetch" in refused.json()["error"]["message"]
