"""Goal: cache processes of several hosts share one store: each finds what the others have stored,
whoever dies, and whatever happens to the metadata node.

Method: real processes over one folder, which are killed; this process plays the workers. Afterwards
leases, writes and pins are where they were.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.__main__ import main
from serving.config import KVOptions
from serving.kv import wire
from serving.kv.directory import Directory
from serving.kv.link import CacheLink
from serving.kv_process import ask, run_cache
from serving.metadata_process import Administration, run_metadata
from serving.nodes.metadata_node import MetadataNode
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError
from tests.serving.kv.cache_parts import FORM, Cache, check_prefix, keys_of
from tests.serving.node_processes import NodeProcess, nodes
from tests.serving.nodes.test_metadata_node import MemoryLog


class Worker(Cache):
    """A line to a cache process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.link = CacheLink(address, FORM, SystemClock())
        self.link.start()

    def settle(self) -> None:
        wait_for(lambda: bool(self.wanted([b"?" * 16]).blocks), "an answer")
        wait_for(lambda: ask(self.address, "flush") == {} and is_at_rest(self.address), "rest")


@contextmanager
def worker(address: str) -> Iterator[Worker]:
    one = Worker(address)
    try:
        yield one
    finally:
        one.link.close()


def is_at_rest(address: str) -> bool:
    numbers = ask(address, "stats")
    return not any(numbers[name] for name in ("leases", "writes", "unwritten", "host_pinned"))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within 60 s"
        time.sleep(0.05)


def metadata_node(path: Path) -> NodeProcess:
    settings = {"directory": str(path), "disk_bytes": 2**24, "lease_s": 5.0}
    return NodeProcess("metadata", f"ipc://{path}/m", settings, "--name", "a")


def cache_node(path: Path, number: int) -> NodeProcess:
    settings: dict[str, Any] = {
        "storage": "disk",
        "directory": str(path),
        "metadata": f"ipc://{path}/m",
        "memory_directory": str(path),
        "host_bytes": 2**20,
        "flush_s": 0.1,
    }
    return NodeProcess("cache", f"ipc://{path}/c{number}", settings)


def check_directory_rest(path: Path) -> None:
    names = ("directory_leases", "directory_writes", "directory_doomed")
    address = f"ipc://{path}/m"
    wait_for(lambda: not any(ask(address, "stats")[name] for name in names), "rest")


@pytest.mark.timeout(240)
def test_hosts_share_a_store_through_all_that_may_happen(tmp_path: Path) -> None:
    first, second, third = keys_of(3), keys_of(3, 10), keys_of(3, 20)
    with nodes() as running:
        metadata = metadata_node(tmp_path)
        running.append(metadata)
        running += [cache_node(tmp_path, 0), cache_node(tmp_path, 1)]
        one, two = running[1:]
        with worker(one.address) as left, worker(two.address) as right:
            left.put(first, salt="a")
            assert left.wanted(first).blocks == () and right.wanted(first).blocks == ()
            check_prefix(right.fetch(first, salt="a"), first)
            # The host that computed it is gone, and with it its memory.
            one.kill()
            wait_for(lambda: is_at_rest(two.address), "rest")
            check_prefix(right.fetch(first, salt="a"), first)
            right.put(second, salt="b")

            # Killed, and started with what it has written down.
            metadata.kill()
            metadata = metadata_node(tmp_path)
            running.append(metadata)
            assert ask(metadata.address, "stats")["directory_payloads"] == 8
            # Killed, and started with nothing: it is told what there is.
            metadata.kill()
            shutil.rmtree(tmp_path / "metadata-a")
            metadata = metadata_node(tmp_path)
            running.append(metadata)
            wait_for(lambda: ask(metadata.address, "stats")["directory_payloads"] == 8, "word")

            # A host that has nothing in memory reads all of it.
            running.append(cache_node(tmp_path, 2))
            with worker(running[-1].address) as new:
                check_prefix(new.fetch(first, salt="a"), first)
                check_prefix(new.fetch(second, salt="b"), second)
                assert ask(running[-1].address, "purge", tenant=None) == {"purged": 8}
            assert ask(metadata.address, "stats")["directory_payloads"] == 0
            check_directory_rest(tmp_path)
            assert list((tmp_path / "segments").iterdir()) == []

            # Stopped: everybody does without it, and goes on when it goes on.
            os.kill(metadata.process.pid, signal.SIGSTOP)
            missed = right.fetch(third)
            assert missed.prefix is None
            os.kill(metadata.process.pid, signal.SIGCONT)
            right.put(third)
            check_prefix(right.fetch(third), third)
            wait_for(lambda: is_at_rest(two.address), "rest")
            check_directory_rest(tmp_path)


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        run_metadata(KVOptions(directory=str(tmp_path)), "a", "tcp://nowhere", lambda _: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv.directory: .*file"):
        run_metadata(KVOptions(directory=f"{tmp_path}/file"), "a", "ipc://x", lambda _: None)
    options = KVOptions(storage="disk", directory=str(tmp_path), metadata="nonsense")
    with pytest.raises(ConfigError, match="kv.metadata: nonsense"):
        run_cache(options, f"ipc://{tmp_path}/c")
    assert main(["node", "--role", "metadata"]) == 2


def test_operators_are_answered() -> None:
    node = MetadataNode(Directory(1, 1000), MemoryLog(), SystemClock())
    administration = Administration(node)
    administration.on_message("me", wire.Ask(7, "dance"))
    ((source, answer),) = administration.take_replies()
    assert isinstance(answer, wire.Answer) and source == "me" and answer.call == 7
    assert answer.error is not None and "expected stats or stop" in answer.error
