"""The port of a server: who may listen where, and a socket that keeps all others away."""

import errno
import ipaddress
import socket
from collections.abc import Callable

from sharding.config_file import ConfigError


def check_openness(host: str, needs_keys: bool, say: Callable[[str], None]) -> None:
    """Raises ConfigError where everybody on a network could use a server without keys."""
    if needs_keys:
        return
    try:
        is_this_machine = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_this_machine = False
    if not is_this_machine:
        raise ConfigError(
            f"server.host is {host} and there are no API keys; make one first: "
            "python -m serving keys add TENANT"
        )
    say("No API keys: this machine alone is served; python -m serving keys add TENANT makes one")


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else can listen in place of, though it does not listen yet.

    Two sockets may bind one port if both may reuse the address, so that is asked for only where
    connections of an earlier server are still being closed; then the socket listens at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listen(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(_listen_problem(host, port, error)) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Connections made from now on do not keep the next server from binding the port."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen()


def _listen_problem(host: str, port: int, error: OSError) -> str:
    return f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
