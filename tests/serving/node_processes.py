"""Nodes of the KV tiers as processes of their own, as their users start them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


class NodeProcess:
    """`python -m serving node`, which answers at `address` when the constructor returns."""

    def __init__(self, role: str, address: str, settings: Mapping[str, object], *more: str) -> None:
        command = [sys.executable, "-m", "serving", "node", "--role", role, "--listen", address]
        for name, value in settings.items():
            command += ["--set", f"kv.{name}={value!r}"]
        self.address = address
        self.process = subprocess.Popen(
            [*command, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"{role} ready {address}\n", line

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def nodes() -> Iterator[list[NodeProcess]]:
    """A list for processes, all of which are ended at the end."""
    running: list[NodeProcess] = []
    try:
        yield running
    finally:
        for node in running:
            node.kill()
