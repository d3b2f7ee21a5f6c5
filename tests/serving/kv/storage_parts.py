"""Storage nodes for tests, in threads of this process or in processes of their own."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.kv.cluster_key import ClusterKey
from serving.kv.erasure_tier import ErasureTier, ErasureTimes
from serving.kv.fragment_directory import FragmentDirectory
from serving.kv.node_links import LinkTimes
from serving.kv.storage_node import StorageNode
from serving.kv.store import Header, Name, PayloadKind, encode, layout_id, tenant_id
from serving.kv.stripe_repair import RepairOptions
from serving.kv.stripes import Coding
from serving.transport.driver import SystemClock

TENANT = tenant_id("a")
TIMES = ErasureTimes(
    start_s=20.0, read_s=2.0, write_s=3.0, grace_s=0.3, link=LinkTimes(every_s=0.05, silent_s=1.5)
)
PATIENT = RepairOptions(every_s=1000.0, after_s=1000.0, settle_s=0.0)
"""Repairs when it is asked to, and waits for nodes that are away."""


def name(number: int) -> Name:
    """What a test stores payload `number` under."""
    return Name(PayloadKind.BLOCK, number.to_bytes(16))


def names(*numbers: int) -> list[Name]:
    """What a test stores payloads under."""
    return [name(number) for number in numbers]


def payload(number: int, size: int = 5000, tenant: bytes = TENANT) -> bytes:
    """A payload with bytes of its own."""
    header = Header(name(number), layout_id(b""), tenant, 1000, size)
    return bytes(encode(header, [random.Random(number).randbytes(size)]))


def check_payloads(found: Sequence[object], numbers: Sequence[int]) -> None:
    """Each is the payload of its number."""
    for data, number in zip(found, numbers, strict=True):
        assert data is not None, f"payload {number} is a miss"
        assert bytes(data) == payload(number)  # pyright: ignore[reportArgumentType]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Return when the condition holds."""
    pause = threading.Event()
    for _ in range(round(timeout_s / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of a few bytes at `path`; the test is skipped where that may not be."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def make_read_only(path: Path) -> None:
    """Let a small disk take nothing more."""
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)


class Nodes:
    """Storage nodes in threads, which can be ended and started anew."""

    def __init__(self, path: Path, count: int, key: ClusterKey | None = None) -> None:
        self.path = path
        self.key = key
        self.addresses: dict[str, str] = {}
        self.running: dict[str, tuple[StorageNode, threading.Thread]] = {}
        for number in range(count):
            self.start(f"n{number:02d}")

    def start(self, node: str) -> StorageNode:
        """Start a node with what its directory holds."""
        address = self.addresses[node] = f"ipc://{self.path}/{node}.s"
        directory = FragmentDirectory(self.path / node)
        clock, source = SystemClock(), random.SystemRandom()
        made = StorageNode(node, address, directory, self.key, clock, source)
        thread = threading.Thread(target=made.run)
        thread.start()
        self.running[node] = made, thread
        return made

    def stop(self, node: str) -> None:
        """End a node; its directory stays."""
        made, thread = self.running.pop(node)
        made.stop()
        thread.join(20)
        assert not thread.is_alive()

    def files(self, node: str) -> list[Path]:
        """The fragments on a node's disk."""
        return sorted((self.path / node / "fragments").glob("*/*"))


@contextmanager
def running_nodes(path: Path, count: int, key: ClusterKey | None = None) -> Iterator[Nodes]:
    """Nodes in threads of this process."""
    nodes = Nodes(path, count, key)
    try:
        yield nodes
    finally:
        for node in list(nodes.running):
            nodes.stop(node)


@contextmanager
def opened(
    nodes: Nodes,
    coding: Coding | None = None,
    bytes_max: int = 1 << 30,
    repair: RepairOptions = PATIENT,
    times: ErasureTimes = TIMES,
    tenant_bytes_max: int = 0,
) -> Iterator[ErasureTier]:
    """A tier over nodes."""
    tier = ErasureTier(
        nodes.addresses,
        coding or Coding(3, 2),
        bytes_max,
        nodes.key,
        SystemClock(),
        random.SystemRandom(),
        tenant_bytes_max=tenant_bytes_max,
        times=times,
        repair=repair,
    )
    try:
        yield tier
    finally:
        tier.close()


class NodeProcesses:
    """Storage nodes as processes of their own, with what they are told on the command line."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.addresses = {f"n{n:02d}": f"ipc://{path}/n{n:02d}.s" for n in range(count)}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for node in self.addresses:
            self.start(node)
        for node in self.addresses:
            self.wait(node)

    def options(self) -> list[str]:
        """The flags that tell where the nodes are."""
        changes = [f"kv.directory='{self.path}'"]
        changes += [f"kv.erasure.nodes.{node}='{at}'" for node, at in self.addresses.items()]
        return [part for change in changes for part in ("--set", change)]

    def start(self, node: str) -> None:
        """Start a node; `wait` waits until it answers."""
        command = [sys.executable, "-m", "serving", "node", "--role", "storage", "--name", node]
        self._processes[node] = subprocess.Popen(
            [*command, *self.options()], stdout=subprocess.PIPE, text=True
        )

    def wait(self, node: str) -> None:
        """Return when a node answers."""
        stdout = self._processes[node].stdout
        assert stdout is not None and "storage ready" in stdout.readline()

    def signal(self, node: str, number: signal.Signals) -> None:
        """Send a signal to a node; return when it has ended, if it ends by that."""
        process = self._processes[node]
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(20)
            if process.stdout is not None:
                process.stdout.close()
