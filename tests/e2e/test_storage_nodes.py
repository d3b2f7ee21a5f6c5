"""Goal: whatever happens to storage nodes and to the cache process, a prefix comes back as it was
or is a miss, and nothing stays pinned.

Method: six storage nodes and a cache process, all processes of their own, with a code of three and
two; nodes are killed, stopped and continued during reads and writes, their files damaged and cut.
Every prefix is read for the first time from storage, because the cache process was killed after it
was written.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.__main__ import main
from serving.kv.link import CacheLink
from serving.kv.offload import CacheReply, FetchPrefix, PrefixFetched, StorePrefix
from serving.kv_config import ErasureOptions, KVOptions
from serving.kv_process import CacheProcess, ask
from serving.transport.driver import SystemClock
from tests.serving.kv.cache_parts import FORM, check_prefix, keys_of, read_of
from tests.serving.kv.storage_parts import NodeProcesses, wait_until

NUM_NODES = 6
LENGTH = 8


class Cluster:
    """The processes, and a worker's line to them."""

    def __init__(self, nodes: NodeProcesses, cache: CacheProcess, link: CacheLink) -> None:
        self.nodes = nodes
        self.cache = cache
        self.link = link

    def numbers(self) -> dict[str, float | int]:
        return ask(self.cache.address, "stats")

    def put(self, prefix: int) -> None:
        keys = keys_of(LENGTH, 1000 * prefix)
        self.link.call(StorePrefix(tuple(keys), keys[-1], read_of(keys), ""), lambda _: None)

    def fetch(self, prefix: int) -> PrefixFetched:
        keys = keys_of(LENGTH, 1000 * prefix)
        replies: list[CacheReply] = []
        arrived = threading.Event()

        def take(reply: CacheReply) -> None:
            replies.append(reply)
            arrived.set()

        self.link.call(FetchPrefix("r", tuple(keys), 0, 0, ""), take)
        assert arrived.wait(30), f"prefix {prefix}: no answer"
        (reply,) = replies
        assert isinstance(reply, PrefixFetched)
        if reply.prefix is not None:
            check_prefix(reply, keys)
        return reply

    def is_hit(self, prefix: int) -> bool:
        return self.fetch(prefix).prefix is not None

    def wait_for_nodes(self, num_away: int) -> None:
        wait_until(
            lambda: self.numbers()["storage_nodes_away"] == num_away, f"{num_away} nodes are away"
        )

    def check_at_rest(self) -> None:
        names = ("leases", "writes", "host_pinned", "unwritten")
        wait_until(lambda: not any(self.numbers()[name] for name in names), "all is let go of")


@contextmanager
def running(path: Path) -> Iterator[Cluster]:
    nodes = NodeProcesses(path, NUM_NODES)
    changes = ("kv.storage='erasure'", "kv.host_bytes=1048576", "kv.flush_s=0.1")
    changes += (f"kv.memory_directory='{path}'",)
    changes += ("kv.erasure.data_fragments=3", "kv.erasure.parity_fragments=2")
    arguments = [part for change in changes for part in ("--set", change)] + nodes.options()
    options = KVOptions(
        storage="erasure", directory=str(path), erasure=ErasureOptions(nodes.addresses)
    )
    cache = CacheProcess(options, arguments)
    try:
        cache.wait_until_ready()
        link = CacheLink(cache.address, FORM, SystemClock())
        link.start()
        try:
            yield Cluster(nodes, cache, link)
        finally:
            link.close()
    finally:
        cache.stop()
        nodes.close()


def holds(path: Path, node: str, prefix: int) -> bool:
    """Whether a node has a fragment with a prefix; its index tells the keys."""
    (key,) = keys_of(1, 1000 * prefix)
    return any(key in file.read_bytes() for file in path.glob(f"{node}/fragments/*/*"))


def asked(cluster: Cluster, what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    assert main(["cache", what, "--address", cluster.cache.address]) == 0
    return json.loads(capsys.readouterr().out)


def test_nothing_that_happens_to_nodes_gives_wrong_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"n{number:02d}" for number in range(NUM_NODES)]
    with running(tmp_path) as cluster:
        for prefix in range(8):
            cluster.put(prefix)
            # A stripe for each, all of which lie on five of six nodes.
            wait_until(
                lambda prefix=prefix: cluster.numbers()["storage_payloads"] == 9 * (prefix + 1),
                "it is stored",
            )
        cluster.check_at_rest()

        # The cache process is killed: what was committed is found by the next one.
        os.kill(cluster.cache.pid, signal.SIGKILL)
        assert cluster.numbers()["storage_payloads"] == 8 * 9
        assert cluster.is_hit(0) and cluster.numbers()["fetch_from_storage"] == 9

        # Two nodes are stopped, then a third; then they go on.
        for name in names[:2]:
            cluster.nodes.signal(name, signal.SIGSTOP)
        assert cluster.is_hit(1)
        cluster.nodes.signal(names[2], signal.SIGSTOP)
        # One of six holds nothing of a stripe, so two of its fragments or three are missing.
        for prefix in (2, 3, 4):
            num_missing = sum(holds(tmp_path, name, prefix) for name in names[:3])
            assert cluster.is_hit(prefix) == (num_missing == 2)
        cluster.wait_for_nodes(3)
        cluster.put(50)
        cluster.check_at_rest()
        for name in names[:3]:
            cluster.nodes.signal(name, signal.SIGCONT)
        cluster.wait_for_nodes(0)
        assert all(cluster.is_hit(prefix) for prefix in (2, 3, 4))
        # What could not be written is in memory, and at most there.
        assert cluster.is_hit(50)

        # Two are killed while reads and writes run, and started anew.
        for step in range(12):
            cluster.put(100 + step)
            if step == 4:
                cluster.nodes.signal(names[3], signal.SIGKILL)
                cluster.nodes.signal(names[4], signal.SIGKILL)
            cluster.fetch(100 + step)
            assert cluster.is_hit(5)
        cluster.wait_for_nodes(2)
        for name in names[3:5]:
            cluster.nodes.start(name)
        cluster.wait_for_nodes(0)
        assert cluster.is_hit(6)
        cluster.check_at_rest()

        # Fragments of one node are damaged in every region, those of another are cut.
        for number, file in enumerate(sorted(tmp_path.glob("n00/fragments/*/*"))):
            data = bytearray(file.read_bytes())
            data[len(data) * number // 8 % len(data)] ^= 1
            file.write_bytes(data)
        for file in tmp_path.glob("n01/fragments/*/*"):
            os.truncate(file, file.stat().st_size // 2)
        assert cluster.is_hit(7)
        assert asked(cluster, "verify", capsys) == {"corrupt": 0}
        assert cluster.numbers()["storage_corrupt"] > 8
        cluster.check_at_rest()
        (error,) = {main(["cache", "drain", "--node", "n9", "--address", cluster.cache.address])}
        assert error == 2 and "no storage node is called 'n9'" in capsys.readouterr().err
        assert asked(cluster, "repair", capsys).keys() == {"repaired"}
