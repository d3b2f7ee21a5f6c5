"""The small model over HTTP and offline, in turns, at 32 prompts at once."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.serving_bench.load_client import StreamResult, call, request_bytes
from serving.core.request import SamplingParams
from serving.offline import LLM

ROOT = Path(__file__).resolve().parents[2]
NUM_CLIENTS = 32
NUM_TOKENS = 256
PROMPT = "Write down what you see:"
_OPTIONS = {
    "engine.max_context": 512,
    "engine.num_blocks": 161,
    "engine.prefill_tokens": [512],
    "engine.decode_rows": [NUM_CLIENTS],
}


def ratio_to_offline(rounds: int) -> dict[str, float]:
    """Output tokens a second of both, as medians over the rounds, and the median of their ratios.

    The first round of each warms up and does not count.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    llm = LLM(options=_OPTIONS)
    offline: list[float] = []
    over_http: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        process, port, name = _server(Path(directory))
        try:
            for _ in range(rounds + 1):
                offline.append(_offline_rate(llm))
                over_http.append(asyncio.run(_http_rate(port, name)))
        finally:
            process.terminate()
            process.wait(60)
    ratios = [a / b for a, b in zip(over_http[1:], offline[1:], strict=True)]
    return {
        "http_over_offline_32": statistics.median(ratios),
        "http_tokens_per_s": statistics.median(over_http[1:]),
        "offline_tokens_per_s": statistics.median(offline[1:]),
    }


def _offline_rate(llm: LLM) -> float:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    start_s = time.monotonic()
    outputs = llm.generate([PROMPT] * NUM_CLIENTS, sampling)
    return sum(len(output.token_ids) for output in outputs) / (time.monotonic() - start_s)


async def _http_rate(port: int, name: str) -> float:
    body = {
        "model": name,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = request_bytes("/v1/completions", json.dumps(body).encode(), "none")
    start_s = time.monotonic()
    results: list[StreamResult] = await asyncio.gather(
        *(call(port, request) for _ in range(NUM_CLIENTS))
    )
    seconds = time.monotonic() - start_s
    if not all(result.is_whole for result in results):
        raise SystemExit("a stream failed")
    return NUM_CLIENTS * NUM_TOKENS / seconds


def _server(directory: Path) -> tuple[subprocess.Popen[str], int, str]:
    """A server with the same engine; its port and the name of its model."""
    changes = {**_OPTIONS, "server.database": str(directory / "service.sqlite3")}
    flags = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "serving", "--port", "0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = name = ""
    for line in process.stdout:
        if line.startswith("Model "):
            name = line.split()[1]
        if line.startswith("Serving "):
            url = line.split()[1]
        if line.startswith("Try "):
            return process, int(url.removesuffix("/v1").rsplit(":", 1)[1]), name
    raise SystemExit("the server did not start")
