"""Goal: a worker finds what another worker of the same store has computed, on its own and when that
one is dead, with the tokens of a cold run; an operator warms and pins a prompt before anybody asks.

Method: two servers with a cache process each, over one folder and one metadata node, all of them
real processes; the first is killed.
"""

import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from serving.__main__ import main
from serving.kv_process import ask
from tests.e2e.server import SMALL_ENGINE, ServerProcess
from tests.e2e.test_restart import NUM_CACHED, answer
from tests.serving.node_processes import NodeProcess, nodes


def arguments(directory: Path) -> list[str]:
    changes = [
        "kv.storage='disk'",
        f"kv.directory='{directory}'",
        f"kv.metadata='ipc://{directory}/m'",
        "kv.host_bytes=8388608",
        "kv.wait_s=4",
        "kv.model_revision='golden'",
    ]
    return [*SMALL_ENGINE, *(part for change in changes for part in ("--set", change))]


def cache_address(server: ServerProcess) -> str:
    (line,) = (line for line in server.lines if line.startswith("Cache "))
    return line.split()[-1]


def wait_until_stored(server: ServerProcess, num_payloads: int, directory: Path) -> None:
    deadline = time.monotonic() + 60
    while ask(f"ipc://{directory}/m", "stats")["directory_payloads"] < num_payloads:
        ask(cache_address(server), "flush")
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_any_worker_hits_what_another_has_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[ServerProcess] = []
    with nodes() as running:
        settings = {"directory": str(tmp_path), "disk_bytes": 2**26}
        running.append(NodeProcess("metadata", f"ipc://{tmp_path}/m", settings))
        try:
            servers.append(ServerProcess(arguments(tmp_path)))
            servers.append(ServerProcess(arguments(tmp_path)))
            one, two = servers
            cold = [answer(one, number) for number in range(2)]
            assert [cached for _, cached in cold] == [0, 0]
            # The blocks of two prompts, and a state for each.
            wait_until_stored(one, 2 * (NUM_CACHED // 128 + 1), tmp_path)
            assert answer(two, 0) == (cold[0][0], NUM_CACHED)
            one.process.send_signal(signal.SIGKILL)
            one.process.wait(60)
            assert answer(two, 1) == (cold[1][0], NUM_CACHED)

            # Nobody has asked this yet.
            text = tmp_path / "system.txt"
            text.write_text("You answer questions about the tides. " * 15)
            command = ["--server", two.url, "--prompt-file", str(text)]
            assert main(["cache", "pin", *command]) == 0
            pinned = json.loads(capsys.readouterr().out)
            assert pinned["tokens"] == 128 * pinned["blocks"] > 0
            numbers = httpx.get(f"{two.url}/admin/cache").json()
            assert numbers["host_pinned_by_operators"] > pinned["blocks"]
            assert main(["cache", "unpin", *command]) == 0
            numbers = httpx.get(f"{two.url}/admin/cache").json()
            held = ("host_pinned_by_operators", "leases", "writes")
            assert not any(numbers[name] for name in held)
            assert two.metric("deepinfer_kv_blocks_free") == two.metric("deepinfer_kv_blocks")
        finally:
            for server in servers:
                server.stop()
    assert "Traceback" not in servers[-1].errors
