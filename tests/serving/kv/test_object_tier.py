"""Goal: an object store is a storage tier like the others, and one that is slow or gone is a miss.

Method: files and memory by TensorStore, an S3 server (moto) in a process of its own, and a proxy in
front of it that delays and refuses.
"""

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.kv.object_tier import ObjectTier, ObjectTimes
from serving.kv.store import StoreError, tenant_id
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import check_payloads, names, payload, wait_until

TIMES = ObjectTimes(read_s=10.0, write_s=10.0, list_s=20.0, refresh_s=1000.0)


def opened(kvstore: str, bytes_max: int = 1 << 30, times: ObjectTimes = TIMES) -> ObjectTier:
    return ObjectTier(kvstore, bytes_max, SystemClock(), random.SystemRandom(), times=times)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    port = free_port()
    code = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def has_bucket() -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait_until(has_bucket, "the S3 server answers", 60.0)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


def s3_spec(port: int, folder: str) -> str:
    spec = {
        "driver": "s3",
        "bucket": "bucket",
        "path": f"{folder}/",
        "endpoint": f"http://127.0.0.1:{port}",
        "aws_region": "us-east-1",
        "context": {"s3_request_retries": {"max_retries": 1}},
    }
    return json.dumps(spec)


@pytest.fixture(params=["file", "s3"])
def kvstore(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/objects/"
    request.getfixturevalue("s3_keys")
    return s3_spec(request.getfixturevalue("s3_port"), tmp_path.name)


def test_what_is_written_is_read_by_others_too(kvstore: str) -> None:
    one, other = opened(kvstore), opened(kvstore)
    one.write([payload(1), payload(2, 100_000)])
    one.write([payload(2, 100_000), payload(3)])
    assert one.counts().num_written == 3
    assert [bytes(data or b"") for data in one.read(names(2, 3))] == [
        payload(2, 100_000),
        payload(3),
    ]
    assert other.contains(names(1)) == [False]
    other.refresh()
    check_payloads(other.read(names(3, 1)), [3, 1])
    assert one.verify() == []
    again = opened(kvstore)
    assert again.contains(names(1, 2, 3, 4)) == [True, True, True, False]
    assert again.purge(tenant_id("a")) == 3
    assert other.read(names(1)) == [None]
    for tier in (one, other, again):
        tier.close()
    last = opened(kvstore)
    assert last.counts().num_bytes == 0
    last.close()


def test_damage_in_any_region_is_a_miss(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    tier = opened(f"file://{folder}/")
    tier.write([payload(n, 200) for n in range(3)])
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for at in range(0, len(whole), 41):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        again = opened(f"file://{folder}/")
        found = again.read(names(0, 1, 2))
        assert None in found or at >= 3 * len(payload(0, 200))
        for number, data in enumerate(found):
            assert data is None or bytes(data) == payload(number, 200)
        again.close()
        path.write_bytes(whole)
    path.write_bytes(whole[: len(whole) // 2])
    assert tier.read(names(2)) == [None]
    tier.close()
    assert opened(f"file://{folder}/").counts().num_payloads == 0


def test_others_are_looked_for_now_and_then(tmp_path: Path) -> None:
    kvstore = f"file://{tmp_path}/objects/"
    one, other = opened(kvstore), opened(kvstore, times=ObjectTimes(refresh_s=0.05))
    one.write([payload(1)])
    wait_until(lambda: other.contains(names(1)) == [True], "the other finds it")
    one.purge(None)
    wait_until(lambda: other.contains(names(1)) == [False], "its end is seen")
    one.close()
    other.close()


class Proxy:
    """Passes bytes on to a port, after a while, or refuses to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.delay = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        pause = threading.Event()
        try:
            while data := source.recv(65536):
                while self.delay.is_set():
                    pause.wait(0.05)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def refuse(self) -> None:
        """From now on."""
        for one in (self._listener, *self._open):
            # Closing alone would not wake whoever waits for it.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.delay.clear()


@pytest.mark.usefixtures("s3_keys")
def test_a_store_that_is_slow_and_then_gone_is_a_miss_in_time(s3_port: int) -> None:
    proxy = Proxy(s3_port)
    times = ObjectTimes(read_s=0.5, write_s=0.5, list_s=5.0, refresh_s=1000.0)
    patient = ObjectTimes(read_s=10.0, write_s=10.0, list_s=20.0, refresh_s=1000.0)
    tier = opened(s3_spec(proxy.port, "slow"), times=patient)
    tier.write([payload(1)])
    tier.close()
    tier = opened(s3_spec(proxy.port, "slow"), times=times)
    for hurdle in (proxy.delay.set, proxy.refuse):
        hurdle()
        began = time.monotonic()
        assert tier.read(names(1)) == [None]
        with pytest.raises(StoreError, match="cannot be written"):
            tier.write([payload(2)])
        assert time.monotonic() - began < 10
        assert tier.contains(names(1, 2)) == [True, False]
    assert tier.counts().num_failed >= 4
    tier.close()
    again = opened(s3_spec(s3_port, "slow"))
    check_payloads(again.read(names(1)), [1])
    again.close()


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for kvstore in ("nonsense://x", "{", '{"driver": "what"}'):
        with pytest.raises(StoreError, match="cannot be used"):
            opened(kvstore)
