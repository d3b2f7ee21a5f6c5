"""Goal: a key file is made for its owner alone, read back, and refused with a reason if it cannot
be one. What keys are for is tested where sockets are (`transport/test_zeromq.py`).

Method: files in a folder of the test.
"""

from pathlib import Path

import pytest

from serving.kv.cluster_key import ClusterKey
from sharding.config_file import ConfigError


def test_a_fresh_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ClusterKey.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key, again = ClusterKey.read(path), ClusterKey.read(path)
    other = tmp_path / "other"
    ClusterKey.write(other)
    assert again.is_own(key._public)
    assert not ClusterKey.read(other).is_own(key._public)
    with pytest.raises(FileExistsError):
        ClusterKey.write(path)


def test_line_ends_are_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("s" * 20)
    (tmp_path / "b").write_text("s" * 20 + "\n")
    a, b = (ClusterKey.read(tmp_path / name) for name in "ab")
    assert a.is_own(b._public)


def test_what_can_be_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(ConfigError, match=r"short: a cluster key of 6 bytes; expected at least 16"):
        ClusterKey.read(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file"):
        ClusterKey.read(tmp_path / "none")
