"""Goal: with the real model, a prompt that one process computes and another goes on with gives the
tokens of a single process: short and in chunks, with a cached prefix, in company, drawn with a
seed, with a grammar, with images, and with penalties; also when the process that generates is
killed. What one prefill worker has computed is stored, and found by others when it is gone.

Method: `python -m serving` with two prefill, two decode and one vision worker around the golden
checkpoint; the expected tokens are those of an engine in this process.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving import LLM
from serving.core.request import SamplingParams
from tests.e2e.cluster import MODEL_DIR, ROOT, wait_for
from tests.e2e.pictures import chat, picture

pytestmark = pytest.mark.slow

CONFIG = """
[model]
path = "{model}"
cache_format = "noq"
[server]
port = 0
database = "{folder}/service.sqlite3"
[engine]
max_context = 1024
num_blocks = 65
prefill_tokens = [64]
decode_rows = [8]
[kv]
storage = "memory"
host_bytes = 67108864
model_revision = "golden"
[cluster]
directory = "{folder}"
[cluster.nodes.p0]
role = "prefill"
[cluster.nodes.p1]
role = "prefill"
[cluster.nodes.d0]
role = "decode"
[cluster.nodes.d1]
role = "decode"
[cluster.nodes.v0]
role = "vision"
"""


class Server:
    """`python -m serving`, ready when the constructor returns."""

    def __init__(self, folder: Path) -> None:
        path = folder / "cluster.toml"
        path.write_text(CONFIG.format(model=MODEL_DIR, folder=folder))
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving", "--config", str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

        def url() -> str | None:
            served = [line for line in self.lines if line.startswith("Serving ")]
            return served[0].split()[1].removesuffix("/v1") if served else None

        try:
            self.url: str = wait_for(url, "a start", 280)
            wait_for(lambda: len(self.nodes()) == 5, "five workers", 200)
        except AssertionError as error:
            self.stop()
            raise AssertionError("\n".join(self.lines)) from error

    def nodes(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/cluster").json()["nodes"]

    def stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()

    def complete(self, prompt: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny-v41", "prompt": prompt, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self.lines.append(line.rstrip("\n"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("disaggregated"))
    try:
        yield made
    finally:
        assert made.stop() == 0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def expected(llm: LLM, prompt: list[int], num_tokens: int, **sampling: Any) -> str:
    params = SamplingParams(num_tokens, **{"temperature": 0, "ignore_eos": True, **sampling})
    (output,) = llm.generate([tuple(prompt)], params)
    return output.text.rstrip("\ufffd")


def text_of(answer: dict[str, Any]) -> str:
    # A character that is cut off at the end is not shown by streams.
    return answer["choices"][0]["text"].rstrip("\ufffd")


@pytest.mark.parametrize("length", [1, 40, 128, 129, 300, 700])
def test_greedy_text_is_that_of_one_process(server: Server, llm: LLM, length: int) -> None:
    """Prompts of more than 64 tokens are computed in chunks; each is sent again, now cached."""
    prompt = prompt_of(length)
    wanted = expected(llm, prompt, 24)
    first, again = (server.complete(prompt, 24) for _ in range(2))
    assert text_of(first) == text_of(again) == wanted
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (length - 1) // 128 * 128
    longer = [*prompt, *prompt_of(50, 1)]
    assert text_of(server.complete(longer, 12)) == expected(llm, longer, 12)


def test_company_changes_nothing(server: Server, llm: LLM) -> None:
    prompts = [prompt_of(20 + 37 * n, n) for n in range(10)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 16), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert text_of(answer) == expected(llm, prompt, 16)


def test_drawn_penalised_and_constrained_text_goes_on_too(server: Server, llm: LLM) -> None:
    prompt = prompt_of(150, 7)
    drawn = {"temperature": 0.8, "seed": 11}
    assert text_of(server.complete(prompt, 20, **drawn)) == expected(llm, prompt, 20, **drawn)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    assert text_of(server.complete(prompt, 20, **penalties)) == expected(
        llm, prompt, 20, **penalties
    )
    answer = server.complete(prompt, 40, ignore_eos=False, guided_regex="[ab]{12}c")
    assert len(text_of(answer)) == 13 and set(text_of(answer)) <= set("abc")


def test_images_are_encoded_elsewhere_and_change_nothing(server: Server, llm: LLM) -> None:
    chats = [
        chat(picture(1, 90, 60), {"type": "text", "text": "or"}, picture(5, 42, 70)),
        chat(picture(3, 60, 90)),
    ]
    sampling = SamplingParams(16, temperature=0, ignore_eos=True)
    for output, messages in zip(llm.generate(chats, sampling), chats, strict=True):
        body = {"model": "tiny-v41", "messages": messages, "max_tokens": 16, "temperature": 0}
        body["ignore_eos"] = True
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        said = answer.raise_for_status().json()["choices"][0]["message"]
        text = (said.get("reasoning_content") or "") + (said.get("content") or "")
        assert text.rstrip("\ufffd") == output.text.rstrip("\ufffd")
    nodes = {node["node"]: node["status"] for node in server.nodes()}
    given = [status["features"]["num_taken"] for name, status in nodes.items() if "p" in name]
    assert sum(given) == 3
    assert nodes["vision/v0"]["vision"]["num_encoded"] == 3


def test_a_decode_worker_that_is_killed_is_not_noticed(server: Server, llm: LLM) -> None:
    prompts = [prompt_of(200, 20 + n) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(server.complete, prompt, 200) for prompt in prompts]

        def running() -> list[dict[str, Any]]:
            nodes = [node for node in server.nodes() if node["node"].startswith("decode")]
            return [n for n in nodes if n["status"]["engine"]["num_decoding"]]

        victim = wait_for(running, "decoding")[0]
        subprocess.run(["kill", f"-{signal.SIGKILL}", str(victim["pid"])], check=True)
        answers = [future.result() for future in futures]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert text_of(answer) == expected(llm, prompt, 200)
    assert json.loads(httpx.get(f"{server.url}/cluster").text)["num_restarted"] >= 1


def test_prompts_of_a_prefill_worker_that_is_gone_are_still_cached(server: Server) -> None:
    prompt = prompt_of(400, 50)

    def stored() -> dict[int, int]:
        nodes = [node for node in server.nodes() if node["node"].startswith("prefill")]
        return {n["pid"]: n["status"]["offload"]["num_stored_blocks"] for n in nodes}

    before = stored()
    first = server.complete(prompt, 16)

    def has_stored() -> list[int]:
        return [pid for pid, count in stored().items() if count >= before.get(pid, 0) + 3]

    (pid,) = wait_for(has_stored, "blocks in shared memory")
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(pid)], check=True)
    again = server.complete(prompt, 16)
    assert text_of(again) == text_of(first)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
