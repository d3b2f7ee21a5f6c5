"""What the service costs: latency, processor time and memory that it adds to an engine.

The engine is a script (`scripts/serving_bench/scripted_server.py`), so that what is measured is
sockets, keys, quotas, queue, parsing, usage records and writing. Server and clients share the
machine. One figure needs a model: `http_over_offline_32` compares output tokens a second of 32
clients with those of the same prompts offline, in turns.

    python scripts/bench_serving.py [--json FILE] [--only NAME ...] [--rounds N]

| figure | what it is |
| --- | --- |
| `added_p50_ms`, `added_p99_ms` | calls over HTTP at 200 a second, beyond calling the same engine |
| `streams_sustained` | of 500 streams of 20 tokens a second, those that kept the pace |
| `sse_tokens_per_s_core` | streamed tokens for a second of a core of the server, six in a step |
| `sse_tokens_per_s_core_single` | the same, one in a step |
| `sse_bare_tokens_per_s_core_single` | the same by a bare Starlette with the same parser |
| `bytes_per_idle_stream` | what the server's memory grows by for each stream that waits |
| `http_over_offline_32` | output tokens a second over HTTP divided by those offline |
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.serving_bench.load_client import (  # noqa: E402
    StreamResult,
    at_a_pace,
    call,
    open_idle,
    request_bytes,
)
from scripts.serving_bench.scripted_server import MODEL_NAME, TEXT  # noqa: E402

CHAT = "/v1/chat/completions"
RATE = 200.0
NUM_STREAMS = 500
STREAM_STEP_S = 0.05
PACE_SLACK = 0.05
"""A stream has kept the pace if it took at most so much longer than its steps."""


class ScriptedServer:
    """The server process and the key to it."""

    def __init__(self, directory: Path, **options: float) -> None:
        from serving.frontend.auth import Scope, SqliteKeyStore

        database = directory / "service.sqlite3"
        _, self.key = SqliteKeyStore(database).add("bench", [Scope.USE], 0)
        flags = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.serving_bench.scripted_server", *flags]
            + ["--database", str(database)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._read())

    def state(self) -> dict[str, float]:
        """Processor seconds and resident bytes of the server."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def stop(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def chat(self, max_tokens: int, **changes: object) -> bytes:
        """A request for so many tokens, streamed."""
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": TEXT}],
            "thinking": {"type": "disabled"},
            "stream": True,
            "max_tokens": max_tokens,
        }
        return request_bytes(CHAT, json.dumps(body | changes).encode(), self.key)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the scripted server did not start")
        return line


@contextmanager
def scripted_server(**options: float) -> Iterator[ScriptedServer]:
    """A server with a database of its own, ended afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        server = ScriptedServer(Path(directory), **options)
        try:
            yield server
        finally:
            server.stop()


def added_latency() -> dict[str, float]:
    """Whole calls of 8 tokens over HTTP, and by calling the gateway of the same script."""
    num_calls = 1000
    with scripted_server(step_ms=0, tokens=8) as server:
        request = server.chat(8, stream=False)

        def start() -> "asyncio.Future[StreamResult]":
            return asyncio.ensure_future(call(server.port, request))

        asyncio.run(at_a_pace(RATE, 100, start))
        over_http = asyncio.run(at_a_pace(RATE, num_calls, start))
    whole = [result for result in over_http if result.is_whole]
    if len(whole) < num_calls:
        raise SystemExit(f"{num_calls - len(whole)} calls failed: {over_http[0].head!r}")
    http_ms = sorted(1e3 * (result.last_s - result.start_s) for result in whole)
    direct_ms = sorted(asyncio.run(_direct_ms(num_calls)))
    return {
        "added_p50_ms": statistics.median(http_ms) - statistics.median(direct_ms),
        "added_p99_ms": http_ms[num_calls * 99 // 100] - direct_ms[num_calls * 99 // 100],
        "http_p50_ms": statistics.median(http_ms),
        "direct_p50_ms": statistics.median(direct_ms),
    }


async def _direct_ms(num_calls: int) -> list[float]:
    """Milliseconds of each call of the same engine without the service."""
    from scripts.serving_bench.scripted_server import ScriptedWorker
    from serving.cluster import FRONTEND, MESH_WORKER
    from serving.core.request import Request, SamplingParams
    from serving.frontend.gateway import Gateway
    from serving.observe import ServiceMetrics
    from serving.transport.driver import Driver, SystemClock

    clock = SystemClock()
    gateway = Gateway(FRONTEND, MESH_WORKER, clock, ServiceMetrics(), 4096)
    worker = ScriptedWorker((5, 6, 7), 0.0, 8, clock)
    names = iter(range(num_calls))

    async def one() -> float:
        start_s = time.monotonic()
        request = Request(str(next(names)), tuple(range(30)), SamplingParams(max_tokens=8))
        stream = gateway.open([request])
        await stream.admitted()
        await stream.next()
        return 1e3 * (time.monotonic() - start_s)

    async with Driver([worker, gateway], {}) as driver:
        gateway.flush = driver.perform
        return await at_a_pace(RATE, num_calls, lambda: asyncio.ensure_future(one()))


def sustained_streams() -> dict[str, float]:
    """500 streams at once, a token every 50 ms each, for ten seconds."""
    num_tokens = 200
    with scripted_server(step_ms=1e3 * STREAM_STEP_S, tokens=1) as server:
        request = server.chat(num_tokens)

        async def run() -> list[StreamResult]:
            return await at_a_pace(
                250.0, NUM_STREAMS, lambda: asyncio.ensure_future(call(server.port, request))
            )

        before = server.state()
        results = asyncio.run(run())
        after = server.state()
    at_most_s = (num_tokens - 1) * STREAM_STEP_S * (1 + PACE_SLACK)
    kept = [
        result
        for result in results
        # The role, the tokens, the end of the text, the mark of the end.
        if result.is_whole
        and result.num_events >= 3
        and result.last_s - result.first_s <= at_most_s
    ]
    seconds = max(r.last_s for r in results) - min(r.start_s for r in results)
    return {
        "streams_sustained": float(len(kept)),
        "streams_server_load": (after["processor_s"] - before["processor_s"]) / seconds,
    }


def tokens_per_core(num_tokens: int, bare: bool = False) -> float:
    """Streamed tokens for each second of the server's processor time, `num_tokens` a step."""
    num_streams, num_steps = 64, 300
    with scripted_server(step_ms=10, tokens=num_tokens, bare=bare) as server:
        request = server.chat(num_tokens * num_steps)

        async def run() -> list[StreamResult]:
            calls = (call(server.port, request) for _ in range(num_streams))
            return list(await asyncio.gather(*calls))

        asyncio.run(call(server.port, server.chat(4)))
        before = server.state()
        results = asyncio.run(run())
        used_s = server.state()["processor_s"] - before["processor_s"]
    if not all(result.is_whole for result in results):
        raise SystemExit("a stream failed")
    return num_streams * num_steps * num_tokens / used_s


def streamed_tokens() -> dict[str, float]:
    """Both figures of streamed tokens."""
    return {
        "sse_tokens_per_s_core": tokens_per_core(6),
        "sse_tokens_per_s_core_single": tokens_per_core(1),
        "sse_bare_tokens_per_s_core_single": tokens_per_core(1, bare=True),
    }


def idle_memory() -> dict[str, float]:
    """Memory of streams that have their first token and wait for the next."""
    with scripted_server(step_ms=5, tokens=1, steps_max=1) as server:
        request = server.chat(1000)

        async def grown(num_streams: int) -> float:
            before = server.state()["resident_bytes"]
            closes = [await open_idle(server.port, request) for _ in range(num_streams)]
            await asyncio.sleep(0.5)
            after = server.state()["resident_bytes"]
            for close in closes:
                close()
            await asyncio.sleep(0.5)
            return (after - before) / num_streams

        # The first streams also pay for what is made once.
        asyncio.run(grown(50))
        return {"bytes_per_idle_stream": asyncio.run(grown(NUM_STREAMS))}


def http_over_offline(rounds: int) -> dict[str, float]:
    """Tokens a second of 32 prompts with the small model, over HTTP and offline, in turns."""
    from scripts.serving_bench.small_model import ratio_to_offline

    return ratio_to_offline(rounds)


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "added": lambda _: added_latency(),
    "streams": lambda _: sustained_streams(),
    "sse": lambda _: streamed_tokens(),
    "idle": lambda _: idle_memory(),
    "offline": lambda options: http_over_offline(options.rounds),
}


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there, and a table beside it"
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="measure these alone")
    parser.add_argument("--rounds", type=int, default=3, help="turns with the small model")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.only or FIGURES:
        found = FIGURES[name](options)
        figures |= found
        for key, value in found.items():
            print(f"{key:30} {value:12.3f}", flush=True)
    figures["cores"] = os.cpu_count()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        lines = ["# What the service costs", "", "| figure | value |", "| --- | ---: |"]
        lines += [f"| `{key}` | {value:,.3f} |" for key, value in figures.items()]
        options.json.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
