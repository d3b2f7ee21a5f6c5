"""Goal: whoever starts a server is told where it is, in a way that can be tried at once. What it
serves, and how it stops, is tested where whole servers run (`tests/e2e`).

Method: sockets of this machine.
"""

import socket

import pytest

from serving import http_service
from serving.config import ServingConfig
from serving.listening import bind


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")]
)
def test_the_message_at_the_start_can_be_tried(host: str, shown: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        text = http_service._ready_message(ServingConfig(), listener)
    assert f"Serving http://{shown}:{port}/v1\n" in text
    assert f"curl http://{shown}:{port}/v1/chat/completions" in text and "small-v41" in text
