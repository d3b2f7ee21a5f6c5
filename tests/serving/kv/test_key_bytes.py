"""Goal: keys come back as they were joined, and what is none is refused. Method: by hand."""

import pytest

from serving.kv.key_bytes import KeysError, join_keys, split_keys


def test_keys_are_joined_and_split() -> None:
    keys = [bytes([n]) * 16 for n in range(3)]
    assert split_keys(join_keys(keys)) == keys and split_keys(b"") == []
    with pytest.raises(KeysError, match="17 bytes of keys; expected a multiple of 16"):
        split_keys(bytes(17))
