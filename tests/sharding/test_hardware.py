"""The table of devices: names find their figures, and an unknown name is refused with the known."""

import pytest

from sharding.config_file import ConfigError
from sharding.hardware import HARDWARE, hardware


def test_names_find_their_figures() -> None:
    assert hardware("h200").memory_bytes == 141e9
    assert all(name == kind.name for name, kind in HARDWARE.items())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a100' is unknown; expected one of h100, h200, b200"):
        hardware("a100")
