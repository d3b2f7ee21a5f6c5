"""Goal: what the shared test set-up promises is so. Method: look at it from inside a test."""

import socket
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.multi_device
def test_there_are_eight_cpu_devices() -> None:
    import jax

    assert [device.platform for device in jax.devices("cpu")] == ["cpu"] * 8


def test_random_numbers_repeat(rng: np.random.Generator) -> None:
    assert rng.integers(2**32) == np.random.default_rng(20261).integers(2**32)


def test_golden_data_is_there(golden: Path) -> None:
    assert (golden / "README.md").is_file()


def test_a_connection_to_another_machine_fails() -> None:
    # 192.0.2.0/24 is reserved for documentation: nothing is ever there.
    with socket.socket() as outside, pytest.raises(AssertionError, match="no network"):
        outside.connect(("192.0.2.1", 80))
    with socket.socket() as outside, pytest.raises(AssertionError, match="no network"):
        outside.connect_ex(("192.0.2.1", 80))


def test_a_connection_to_this_machine_works() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(b"x")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b"x"
