"""Goal: what a server has computed serves the next server, and every answer stays the same: over
HTTP, with real processes, whatever happens to the stored bytes or to the process that keeps them.

Method: one server after the other over one directory of the disk tier. Under the second one a
segment is damaged, and the cache process is stopped and killed; then the server itself is killed.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from serving.kv_process import ask
from tests.e2e.server import SMALL_ENGINE, ServerProcess

NUM_CACHED = 512
"""The last whole block of a prompt that leaves a token to compute."""


def prompt_of(number: int) -> list[int]:
    """600 tokens."""
    return [(7 * i * i + (3 + number) * i) % 290 + 5 for i in range(600)]


def arguments(directory: Path) -> list[str]:
    changes = [
        "kv.storage='disk'",
        f"kv.directory='{directory}'",
        "kv.host_bytes=8388608",
        # Longer than a start: what is written is written when it is asked for, or at the end.
        "kv.flush_s=600",
        "kv.wait_s=4",
        "kv.retry_s=0.2",
        "kv.model_revision='golden'",
    ]
    return [*SMALL_ENGINE, *(part for change in changes for part in ("--set", change))]


def answer(server: ServerProcess, number: int) -> tuple[str, int]:
    """The text that follows a prompt, and how many tokens of the prompt were not computed."""
    body = {
        "model": "tiny-v41",
        "prompt": prompt_of(number),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    reply.raise_for_status()
    usage = reply.json()["usage"]
    return reply.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def cache_pid(server: ServerProcess) -> int:
    """The process that the server has started for itself."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    (pid,) = " ".join(path.read_text() for path in tasks).split()
    return int(pid)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within 120 s"
        time.sleep(0.05)


def at_rest(address: str) -> bool:
    ask(address, "flush")
    numbers = ask(address, "stats")
    return not (numbers["unwritten"] or numbers["host_pinned"] or numbers["leases"])


def is_idle(server: ServerProcess) -> bool:
    return server.metric("deepinfer_kv_blocks_free") == server.metric("deepinfer_kv_blocks")


@pytest.mark.timeout(900)
def test_a_server_goes_on_from_what_another_has_computed(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/cache.sock"
    server = ServerProcess(arguments(tmp_path))
    try:
        assert any(line == f"Cache   disk at {address}" for line in server.lines)
        cold = [answer(server, number) for number in range(3)]
        assert [cached for _, cached in cold] == [0, 0, 0]
        assert len({text for text, _ in cold}) == 3
    finally:
        # Everything is written before it ends.
        assert server.stop() == 0
    (segment,) = tmp_path.glob("segments/*/payloads.bin")
    server = ServerProcess(arguments(tmp_path))
    try:
        assert answer(server, 0) == (cold[0][0], NUM_CACHED)
        assert server.metric("deepinfer_kv_offload_hits_total") == 1
        wait_for(lambda: at_rest(address), "rest")
        _damage(segment)
        # Damaged in the middle: computed again, and the same.
        assert answer(server, 1) == (cold[1][0], 0)
        assert is_idle(server)
        computed = _do_without_cache_process(server, address)
        assert "Traceback" not in server.errors
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
    finally:
        server.stop()
    # What was committed outlives the server that was killed.
    server = ServerProcess(arguments(tmp_path))
    try:
        for number, text in computed.items():
            assert answer(server, number) == (text, NUM_CACHED)
        assert server.metric("deepinfer_kv_offload_hits_total") == len(computed)
        wait_for(lambda: at_rest(address), "rest")
        assert is_idle(server)
    finally:
        assert server.stop() == 0
    assert "Traceback" not in server.errors


def _do_without_cache_process(server: ServerProcess, address: str) -> dict[int, str]:
    """Stop and kill the cache process of a server; the texts of two prompts, which are committed
    when there is a new one.
    """
    pid = cache_pid(server)
    os.kill(pid, signal.SIGSTOP)
    late, cached = answer(server, 3)
    assert cached == 0
    assert server.metric("deepinfer_kv_offload_late_total") == 1
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    text, cached = answer(server, 4)
    assert cached == 0
    wait_for(lambda: cache_pid(server) != pid and at_rest(address), "a new cache process")
    assert answer(server, 3) == (late, NUM_CACHED)
    assert answer(server, 4) == (text, NUM_CACHED)
    # Only what is computed from here on reaches the new one.
    computed = {number: answer(server, number)[0] for number in (5, 6)}
    # Blocks of two prompts, and a state for each.
    num_payloads = 2 * (NUM_CACHED // 128 + 1)

    def is_committed() -> bool:
        return at_rest(address) and ask(address, "stats")["storage_written"] >= num_payloads

    wait_for(is_committed, "a commit")
    assert is_idle(server)
    return computed


def _damage(segment: Path) -> None:
    """Flip a bit in every payload of the segment but those of the first prompt."""
    data = bytearray(segment.read_bytes())
    starts = [at for at in range(len(data)) if data.startswith(b"DJKV\x01\x00", at)]
    for start in starts[len(starts) // 3 :]:
        data[start + 100] ^= 1
    segment.write_bytes(data)
