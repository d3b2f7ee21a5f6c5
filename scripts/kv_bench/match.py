"""How long it takes to find how much of a prompt is stored, and what the index costs in memory.

A metadata node in a process of its own knows `NUM_BLOCKS` blocks; prompts of 64 blocks and of 1 Mi
tokens are looked up over its socket, the long one with the hashing of its tokens. Figures are the
fastest of many, which tells the work and not what else the machine does; medians stand beside them.
"""

import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np

from serving.core.prefix import iterate_keys, prefix_keys, root_key
from serving.kv import directory_calls as calls
from serving.kv.directory import Directory
from serving.kv.directory_link import DirectoryLink
from serving.kv.segment_index import Row
from serving.kv.store import PayloadKind
from serving.kv_process import ask
from serving.transport.driver import SystemClock

BLOCK_TOKENS = 128
NUM_BLOCKS = 100_000
LONG_BLOCKS = 8192
SEGMENT_BLOCKS = 128
BLOCK_BYTES = 114_000
"""Of a block of the released model."""

ROUNDS = 100


def figures() -> dict[str, float]:
    """`match_64_ms`, `match_1m_ms` and `index_bytes_per_token`."""
    found = {"index_bytes_per_token": index_bytes() / BLOCK_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "serving", "node", "--role", "metadata"]
        address = f"ipc://{folder}/m"
        command += ["--listen", address, "--set", f"kv.directory={folder!r}"]
        command += ["--set", f"kv.disk_bytes={2**50}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline()
            try:
                found |= _match_times(address)
            finally:
                ask(address, "stop")
    return found


def index_bytes() -> float:
    """Bytes of memory that a block takes in a directory, its key included."""
    gc.collect()
    tracemalloc.start()
    directory = Directory(1, 1 << 50)
    for number in range(0, NUM_BLOCKS, SEGMENT_BLOCKS):
        rows = _rows([random.randbytes(16) for _ in range(SEGMENT_BLOCKS)])
        # As they come from a message: no two rows share an object.
        rows = msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=list[Row])
        directory.announce(str(number), rows, SEGMENT_BLOCKS * BLOCK_BYTES)
        directory.take_changes()
        del rows
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(directory)


def _match_times(address: str) -> dict[str, float]:
    tokens = np.arange(LONG_BLOCKS * BLOCK_TOKENS, dtype=np.int32) % 128_000
    root = root_key(bytes(32), "")
    keys = prefix_keys(root, tokens, BLOCK_TOKENS)
    link = DirectoryLink(address, SystemClock(), 60.0)
    link.start()
    try:
        _fill(link, keys)

        def match() -> None:
            assert link.match(keys[:64]) == 64

        def match_long() -> None:
            assert link.match(iterate_keys(root, tokens, BLOCK_TOKENS)) == LONG_BLOCKS

        found: dict[str, float] = {}
        for name, call in (("match_64", match), ("match_1m", match_long)):
            times = _times_ms(call)
            found[f"{name}_ms"], found[f"{name}_median_ms"] = min(times), statistics.median(times)
        hashing = _times_ms(lambda: prefix_keys(root, tokens, BLOCK_TOKENS))
        return {**found, "hash_1m_ms": min(hashing)}
    finally:
        link.close()


def _fill(link: DirectoryLink, keys: list[bytes]) -> None:
    others = [random.randbytes(16) for _ in range(NUM_BLOCKS - len(keys))]
    ends = (keys[63], keys[-1])
    states = [Row(PayloadKind.STATE, key, 1, b"tenant00", 0) for key in ends]
    link.ask(calls.Announced, calls.Announce(0, segments=[("states", 2, states)]))
    everything = keys + others
    for at in range(0, len(everything), SEGMENT_BLOCKS):
        rows = _rows(everything[at : at + SEGMENT_BLOCKS])
        segment = (str(at), len(rows) * BLOCK_BYTES, rows)
        link.ask(calls.Announced, calls.Announce(0, segments=[segment]))


def _rows(keys: list[bytes]) -> list[Row]:
    return [Row(PayloadKind.BLOCK, key, BLOCK_BYTES, b"tenant00", 1_700_000_000) for key in keys]


def _times_ms(call: Callable[[], object]) -> list[float]:
    times: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    return times
