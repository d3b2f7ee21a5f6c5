"""The server as its users start it: a process with the default checkpoint and real compilation."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "tests" / "golden" / "tiny-v41"

# A small engine: two shapes instead of the default five, since compiling is most of the time.
# Every test of this folder uses these, so that what one process compiled is there for the next.
SMALL_ENGINE = (
    "--set",
    "engine.max_context=1024",
    "--set",
    "engine.num_blocks=65",
    "--set",
    "engine.prefill_tokens=[64]",
    "--set",
    "engine.decode_rows=[8]",
)


class ServerProcess:
    """`python -m serving` on a free port, ready when the constructor returns.

    `url` is the address without a path. `stop` ends it and returns its exit code.
    """

    def __init__(self, arguments: Sequence[str] = SMALL_ENGINE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serving", "--port", "0", "--model", str(MODEL_DIR), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors = ""
        self._error_reader = threading.Thread(target=self._read_errors)
        self._error_reader.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Try "):
                break
        else:
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.lines}\n{self.errors}")
        (serving,) = (line for line in self.lines if line.startswith("Serving "))
        self.url = serving.split()[1].removesuffix("/v1")

    def metric(self, name: str) -> float:
        """One value of the metrics page, by its name with labels."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return 0.0

    def stop(self) -> int:
        """Asks the process to end; kills it when it does not within 60 s."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._error_reader.join()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            self.errors = pipe.read()
