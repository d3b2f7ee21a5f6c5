"""Goal: a port is taken by one server at a time, also while connections of an earlier one are being
closed, and nobody is let in from elsewhere without a key.

Method: sockets of this machine.
"""

import socket

import pytest

from serving.listening import bind, check_openness, listen
from sharding.config_file import ConfigError


def test_port_whose_connections_are_still_being_closed() -> None:
    with bind("127.0.0.1", 0) as earlier:
        listen(earlier)
        port = earlier.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = earlier.accept()
            served.close()  # Closed here first, so the connection stays in TIME_WAIT.
            assert client.recv(1) == b""
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", port)


def test_without_keys_this_machine_alone_is_served() -> None:
    said: list[str] = []
    for host in ("127.0.0.1", "localhost", "::1"):
        check_openness(host, False, said.append)
    assert len(said) == 3 and "keys add" in said[0]
    check_openness("0.0.0.0", True, said.append)
    for host in ("0.0.0.0", "example.org"):
        with pytest.raises(ConfigError, match=f"server.host is {host} and there are no API keys"):
            check_openness(host, False, said.append)
    assert len(said) == 3
