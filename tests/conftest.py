"""What every test may rely on: eight CPU devices, fixed seeds, golden data, and no network.

The settings of jax stand in the environment rather than in code so that a test of a pure module
never imports jax, and so that processes started by tests have the same devices.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT_DEVICES}".strip()

# Same examples on every run and every machine, and no verdict that depends on a machine's speed.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept beside pytest's other notes: several tests and the processes that
    they start compile the same steps, and so does the next run.
    """
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("compiled")))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same ones in every run."""
    return np.random.default_rng(20261)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data; its README says what is in it."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Connecting to anything but this machine fails the test that tries."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _checked(getattr(socket.socket, name)))
        yield


def _checked(connect: Any) -> Any:
    def checked(self: socket.socket, address: Any) -> Any:
        is_internet = self.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and not _is_this_machine(str(address[0])):
            raise AssertionError(f"a test tried to connect to {address}; tests use no network")
        return connect(self, address)

    return checked


def _is_this_machine(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
