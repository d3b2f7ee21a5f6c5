"""The secret that the processes of a cluster share, and sockets that speak to nobody else.

Sockets use CURVE, ZeroMQ's own encryption: all processes have one pair of keys, made from the
secret, and a listening socket answers only those that prove to have it.

*Why one pair for all*: whoever has the secret is part of the cluster and may do everything in it,
so telling its members apart would protect nothing.
"""

import hashlib
import secrets
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from sharding.config_file import ConfigError

_SECRET_BYTES_MIN = 16


class ClusterKey:
    """A pair of keys made from `secret`, of at least 16 bytes.

    Raises:
        ValueError: the secret is shorter.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES_MIN:
            raise ValueError(
                f"a cluster key of {len(secret)} bytes; expected at least {_SECRET_BYTES_MIN}"
            )
        self._secret = z85.encode(hashlib.sha256(b"cluster" + secret).digest())
        self._public = zmq.curve_public(self._secret)

    @classmethod
    def read(cls, path: Path) -> "ClusterKey":
        """The key in a file; blanks around it do not count.

        Raises:
            ConfigError: it cannot be read, or holds too little.
        """
        try:
            return cls(path.read_bytes().strip())
        except OSError as error:
            raise ConfigError(
                f"cluster.key_file: {path}: cannot be read: {error.strerror}; expected a file "
                "with a secret that all nodes share"
            ) from None
        except ValueError as error:
            raise ConfigError(f"cluster.key_file: {path}: {error}") from None

    @staticmethod
    def write(path: Path) -> None:
        """Make a file with a fresh secret, which only its owner may read."""
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32), encoding="ascii")

    def connect(self, socket: "zmq.Socket[Any]") -> None:
        """Let a socket, before it connects, speak only to processes with this key."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_serverkey = self._public

    def listen(self, socket: "zmq.Socket[Any]") -> None:
        """Let a socket, before it binds, listen only to processes with this key.

        A `Doorkeeper` of its context has to run.
        """
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True

    def is_own(self, public: bytes) -> bool:
        """Whether a public key, in Z85, is that of this pair."""
        return secrets.compare_digest(public, self._public)


class Doorkeeper:
    """Decides who may speak to the listening sockets of a context; on a thread of its own.

    Attributes:
        num_refused: who did not have the key.
    """

    def __init__(self, context: "zmq.Context[Any]", key: ClusterKey) -> None:
        self.num_refused = 0
        self._key = key
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with the public key of whoever knocks."""
        is_known = self._key.is_own(key)
        self.num_refused += not is_known
        return is_known

    def close(self) -> None:
        """Before the context ends."""
        self._authenticator.stop()
