"""Lists of keys as one string of bytes, so that thousands of them are one value of a message."""

from collections.abc import Iterable

import numpy as np

KEY_SIZE = 16
"""Bytes of a key."""


class KeysError(ValueError):
    """Bytes that are no keys."""


def join_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as one string of bytes."""
    return b"".join(keys)


def split_keys(data: bytes) -> list[bytes]:
    """The keys of `join_keys`.

    Raises:
        KeysError: no whole number of keys.
    """
    if len(data) % KEY_SIZE:
        raise KeysError(f"{len(data)} bytes of keys; expected a multiple of {KEY_SIZE}")
    keys: list[bytes] = np.frombuffer(data, f"V{KEY_SIZE}").tolist()
    return keys
