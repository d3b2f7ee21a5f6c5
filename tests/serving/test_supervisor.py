"""Goal: processes of a cluster are started in their order, started anew when they end, and stopped
together; one whose input is wrong ends all of it; and what was made for them is removed.

Method: real processes of a few lines, which note that they were started.
"""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from serving.config import ClusterOptions, NodeOptions, ServingConfig
from serving.kv_config import ErasureOptions, KVOptions
from serving.supervisor import meeting_place, run_cluster
from sharding.config_file import override_from_text

# Says that it is up, notes its start and ends as the file `code` of its name says, if there is one.
NODE = """
import pathlib, signal, sys, time
folder, flags = pathlib.Path(sys.argv[1]), sys.argv[2:]
name = flags[flags.index("--name") + 1]
is_busy = (folder / f"{name}.busy").exists()
signal.signal(signal.SIGTERM, signal.SIG_IGN if is_busy else lambda *_: sys.exit(0))
with (folder / "starts").open("a") as file:
    file.write(name + " " + " ".join(flags) + "\\n")
code = folder / f"{name}.code"
if code.exists():
    text = code.read_text()
    code.unlink()
    sys.exit(int(text))
print("node ready" if name != "router" else "Serving here", flush=True)
time.sleep(60)
"""
NODES = {"d": NodeOptions("decode"), "p": NodeOptions("prefill"), "q": NodeOptions("prefill")}
TIERS = {name: NodeOptions("storage") for name in "st"} | {"m": NodeOptions("metadata")}


class Run:
    """A cluster on a thread that is stopped by `condition`."""

    def __init__(self, folder: Path, directory: str = "", has_tiers: bool = False) -> None:
        self.folder = folder
        self.lines: list[str] = []
        nodes = NODES | (TIERS if has_tiers else {})
        erasure = ErasureOptions(data_fragments=1, parity_fragments=1)
        kv = KVOptions("erasure", erasure=erasure) if has_tiers else KVOptions()
        self.config = ServingConfig(cluster=ClusterOptions(nodes, directory=directory), kv=kv)

    @property
    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def is_ready(self, name: str) -> bool:
        return any(line.startswith(f"{name} ") and " ready " in line for line in self.lines)

    def last_line_of(self, name: str) -> str:
        return [line for line in self.lines if line.startswith(f"{name} ")][-1]

    def until(self, condition: Callable[[], bool] | None) -> int:
        """Run until `condition`, then send SIGTERM; or until it ends by itself. The exit code."""
        command = [sys.executable, "-c", NODE, str(self.folder)]

        async def run() -> int:
            stopping = asyncio.create_task(self._stop(condition)) if condition else None
            with meeting_place(self.config.cluster) as changes:
                flags = ["--flag", *changes]
                config = override_from_text(self.config, changes)
                code = await run_cluster(config, flags, self.lines.append, command)
            assert stopping is None or stopping.done(), self.lines
            return code

        return asyncio.run(run())

    async def _stop(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


def test_one_worker_comes_before_the_others_and_all_are_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.until(lambda: all(map(run.is_ready, ("router", *NODES)))) == 0
    assert sorted(run.starts[:2]) == ["p", "router"] and sorted(run.starts[2:]) == ["d", "q"]
    stopped = [line for line in run.lines if " stopped " in line]
    assert len(stopped) == 4 and stopped[0].startswith("router")
    flags = (tmp_path / "starts").read_text()
    assert "--flag" in flags and f"--parent {os.getpid()}" in flags
    (directory,) = {part for part in flags.split() if part.startswith("cluster.directory=")}
    assert not Path(directory.partition("=")[2]).exists()


def test_a_second_signal_ends_what_is_still_busy(tmp_path: Path) -> None:
    (tmp_path / "router.busy").touch()
    run = Run(tmp_path)

    def is_draining() -> bool:
        if not all(map(run.is_ready, NODES)):
            return False
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    assert run.until(is_draining) == 0
    assert all(" stopped " in run.last_line_of(name) for name in ("router", *NODES)), run.lines


def test_tiers_and_their_cache_process_are_stopped_last(tmp_path: Path) -> None:
    (tmp_path / "s.code").write_text("3")
    run = Run(tmp_path, str(tmp_path / "run"), has_tiers=True)
    names = ("router", "cache", *NODES, *TIERS)
    assert run.until(lambda: all(map(run.is_ready, names))) == 0
    assert sorted(run.starts)[:-1] == sorted([*names, "s"])[:-1]
    assert any("storage  waiting" in line and "again in 0.5 s" in line for line in run.lines)
    stopped = [line.split()[0] for line in run.lines if " stopped " in line]
    assert stopped[0] == "router" and stopped[4] == "cache"
    assert set(stopped[1:4]) == set(NODES) and set(stopped[5:]) == set(TIERS)
    starts = (tmp_path / "starts").read_text().splitlines()
    (told,) = {part for line in starts for part in line.split() if part.startswith("kv.address=")}
    assert told == f"kv.address=ipc://{tmp_path}/run/cache.sock"


def test_what_ends_is_started_anew_after_a_while(tmp_path: Path) -> None:
    (tmp_path / "q.code").write_text("3")
    run = Run(tmp_path)
    assert run.until(lambda: run.is_ready("q")) == 0
    assert run.starts.count("q") == 2 and run.starts.count("p") == 1
    assert any(
        "waiting" in line and "ended with code 3; again in 0.5 s" in line for line in run.lines
    )


def test_what_was_told_to_leave_comes_back_at_once(tmp_path: Path) -> None:
    (tmp_path / "q.code").write_text("0")
    run = Run(tmp_path)
    assert run.until(lambda: run.is_ready("q")) == 0
    assert run.starts.count("q") == 2 and not any("waiting" in line for line in run.lines)


def test_wrong_input_ends_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "p.code").write_text("2")
    run = Run(tmp_path)
    assert run.until(None) == 2
    assert run.starts.count("p") == 1 and "q" not in run.starts


def test_a_directory_of_ones_own_stays_and_its_key_is_kept_from_others(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run = Run(tmp_path, str(directory))
    for name in ("key", "key1"):
        assert run.until(lambda: run.is_ready("d")) == 0
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
        run.lines.clear()
