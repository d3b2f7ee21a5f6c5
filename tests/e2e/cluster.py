"""A whole cluster of processes around simulated devices, and clients that stream from it."""

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import httpx

from serving.core.request import Request, SamplingParams
from serving.frontend.images import ImageReader
from serving.frontend.text import PlainDecoder, TextCodec
from serving.frontend.usage import UsageRecord, read_records
from serving.kv.cluster_key import ClusterKey
from serving.kv_process import ask
from sharding.config_file import ConfigError
from tests.e2e.pictures import chat, picture
from tests.serving.engine.simulated_device import expected_tokens
from tests.serving.scripted_node import GEOMETRY, NODE_COMMAND

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "tests" / "golden" / "tiny-v41"
CONTEXT_MAX = 1024
CONFIG = """
[model]
path = "{model}"
[server]
port = {port}
database = "{folder}/service.sqlite3"
drain_s = 20
[engine]
max_context = 1024
num_blocks = 41
prefill_tokens = [64]
decode_rows = [2]
[kv]
storage = "erasure"
host_bytes = 1048576
disk_bytes = 16777216
flush_s = 0.1
[kv.erasure]
data_fragments = 2
parity_fragments = 1
[cluster]
directory = "{folder}"
heartbeat_s = 0.2
lost_s = 1.6
stranded_s = 3.0
answer_s = 3.0
lease_s = 4.0
[tracing]
endpoint = "{tracing}"
sample_ratio = 0.0
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
[cluster.nodes.v1]
role = "vision"
[cluster.nodes.m0]
role = "metadata"
[cluster.nodes.s0]
role = "storage"
[cluster.nodes.s1]
role = "storage"
[cluster.nodes.s2]
role = "storage"
[cluster.nodes.s3]
role = "storage"
"""
NODES = ("prefill/p0", "prefill/p1", "decode/d0", "decode/d1")
VISION_NODES = ("vision/v0", "vision/v1")
TIER_NODES = ("metadata/m0", "storage/s0", "storage/s1", "storage/s2", "storage/s3")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Poll until something is true, and give what it was."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)
    return found


class Cluster:
    """The supervisor and what it has started, ready when the constructor returns."""

    def __init__(self, folder: Path, port: int, tracing: str = "") -> None:
        """`tracing` is where the spans of those calls go whose clients ask for it."""
        path = folder / "cluster.toml"
        self._folder = folder
        path.write_text(CONFIG.format(model=MODEL_DIR, folder=folder, port=port, tracing=tracing))
        self.database = folder / "service.sqlite3"
        self.streams: list[Stream] = []
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._client = httpx.Client(base_url=self.url, timeout=10)
        self._process = subprocess.Popen(
            [*NODE_COMMAND, "--config", str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            # A dozen processes start.
            self.settle(180)
        except AssertionError:
            self.stop()
            raise

    def overview(self) -> dict[str, Any]:
        """`GET /cluster`; nothing while nobody answers."""
        try:
            return self._client.get("/cluster").raise_for_status().json()
        except httpx.HTTPError:
            return {}

    def node(self, name: str) -> dict[str, Any]:
        """What the cluster says of a node; nothing if it is not there."""
        overview = self.overview()
        nodes = [*overview.get("nodes", []), *overview.get("tier_nodes", [])]
        return next((node for node in nodes if node["node"] == name), {})

    def slow_down(self, name: str, seconds: float) -> None:
        """From now on parts of contexts that a worker sends arrive so much later; 0: at once.

        An image takes a vision worker so long.
        """
        path = self._folder / f"slow-{name}"
        if seconds:
            path.write_text(str(seconds))
        else:
            path.unlink(missing_ok=True)

    def ask_cache(self, what: str) -> dict[str, float | int]:
        """Ask the cache process of all workers; nothing while it does not answer."""
        try:
            key = ClusterKey.read(self._folder / "key")
            return ask(f"ipc://{self._folder}/cache.sock", what, timeout_s=5, key=key)
        except ConfigError:
            return {}

    def settle(self, seconds: float = 40.0) -> dict[str, Any]:
        """Wait until all nodes are there and none of them holds anything."""

        def is_settled() -> dict[str, Any] | None:
            overview = self.overview()
            statuses = [
                node["status"]
                for node in overview.get("nodes", [])
                if node["state"] == "available" and node["status"] is not None
            ]
            known = {node["node"] for node in overview.get("tier_nodes", [])}
            is_whole = len(statuses) == len((*NODES, *VISION_NODES)) and known == set(TIER_NODES)
            at_rest = all(is_at_rest(status) for status in statuses)
            return overview if is_whole and at_rest and not overview["requests"] else None

        return wait_for(is_settled, f"a cluster at rest\n{self.text()}", seconds)

    def check_usage(self) -> None:
        """Every accepted call since the last look has one record, of what its client has got."""
        found: dict[str, list[UsageRecord]] = {}
        for record in read_records(self.database):
            found.setdefault(record.request_id, []).append(record)
        assert all(len(records) == 1 for records in found.values())
        streams, self.streams = self.streams, []
        for stream in streams:
            if stream.call_id:
                stream.check_record(found[stream.call_id][0])

    def signal(self, name: str, number: int) -> int:
        """Send a signal to the process of a node; its number."""
        pid = self.node(name)["pid"]
        os.kill(pid, number)
        return pid

    def pid_of(self, name: str) -> int:
        """Of a process that is nobody's member: its number stands in what the supervisor says."""
        lines = [line for line in self.lines if line.startswith(f"{name} ") and " pid " in line]
        return int(lines[-1].split(" pid ")[1].split()[0])

    def text(self) -> str:
        """What the processes have said last."""
        return "\n".join(self.lines[-30:])

    def stop(self) -> int:
        """Tell the supervisor to end, and wait."""
        self._process.terminate()
        try:
            return self._process.wait(40)
        finally:
            self._process.kill()
            self._reader.join(5)
            self._client.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self.lines.append(line.rstrip("\n"))


def is_at_rest(status: dict[str, Any]) -> bool:
    """Whether a worker holds no memory, context, reservation or request, and no image waits."""
    engine, hand_offs = status["engine"], status["hand_offs"]
    if status["vision"] is not None:
        return not status["vision"]["num_waiting"] and not status["vision"]["num_encoding"]
    if status["features"]["num_pulling"] or status["features"]["held_bytes"]:
        return False
    return (
        engine["num_free_blocks"] == engine["num_blocks"]
        and engine["num_free_slots"] == engine["num_slots"]
        and not engine["num_waiting"]
        and not any(hand_offs[f"num_{what}"] for what in ("held", "reserved", "pulling", "ready"))
    )


class Stream:
    """A client that reads one streamed completion on a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        length: int = 40,
        salt: int = 0,
        max_tokens: int = 60,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        # Each salt has a prompt that begins like no other.
        self.prompt = random.Random(salt).choices(range(3, 300), k=length)
        self.max_tokens = max_tokens
        self.text = ""
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.ended_s = 0.0
        self.num_cached = -1
        body = {
            "model": "tiny-v41",
            "prompt": self.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 3,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        self.call_id = ""
        self._headers = headers
        cluster.streams.append(self)
        self._url = f"{cluster.url}/v1/completions"
        self._thread = threading.Thread(target=self._read, args=(body,), daemon=True)
        self._thread.start()

    def expected(self) -> str:
        """The text that it must have in the end."""
        return TextCodec.load(MODEL_DIR).decode(self._tokens())

    def wait_for_text(self, num_characters: int = 5) -> None:
        """Return when something has come, but not all."""
        wait_for(lambda: len(self.text) >= num_characters or self.ended_s, "text")

    def join(self, seconds: float = 60.0) -> "Stream":
        """Wait for the end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no end within {seconds:g} s; got {self.text!r}"
        return self

    def check(self) -> None:
        """All tokens came, each once and in order."""
        self.join()
        assert self.error is None and self.finish_reason == "length", self.error
        assert self.text == self.expected()

    def check_record(self, record: UsageRecord) -> None:
        """What is billed is what has come; of a server that died, no more than that."""
        decoder = PlainDecoder(TextCodec.load(MODEL_DIR))
        texts = [""]
        for token in self._tokens():
            texts.append(texts[-1] + decoder.push([token])[0])
        texts[-1] = self.expected()
        # Several, if the last tokens make no whole character.
        counts = [count for count, text in enumerate(texts) if text == self.text]
        assert counts and record.num_prompt_tokens == len(self.prompt)
        if record.finish_reason == "crash":
            assert self.error is not None and record.num_generated_tokens <= max(counts)
        else:
            assert record.finish_reason == ("error" if self.error else "length")
            assert record.num_generated_tokens in counts, record

    def _tokens(self) -> list[int]:
        sampling = SamplingParams(self.max_tokens, temperature=0, seed=3, ignore_eos=True)
        request = Request("a", tuple(self.prompt), sampling)
        return expected_tokens(request, 3, CONTEXT_MAX)

    def _read(self, body: dict[str, Any]) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=body, headers=self._headers, timeout=60
            ) as answer:
                if answer.status_code != 200:
                    self.error = f"{answer.status_code}: {answer.read().decode()}"
                    return
                self.call_id = answer.headers["x-request-id"]
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.ended_s = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            assert self.error is None, "a second error"
            self.error = event["error"]["message"]
            return
        if event.get("usage"):
            self.num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in event.get("choices", []):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


class Asking(threading.Thread):
    """A client that asks about pictures, which differ by their seeds."""

    def __init__(self, cluster: Cluster, *seeds: int) -> None:
        super().__init__(daemon=True)
        self._answer: httpx.Response | None = None
        self._url = f"{cluster.url}/v1/chat/completions"
        self._chat = chat(*(picture(seed, 42 + seed, 60) for seed in seeds))
        self.start()

    def run(self) -> None:
        body = {"model": "tiny-v41", "messages": self._chat, "max_tokens": 20, "temperature": 0}
        body |= {"seed": 3, "ignore_eos": True}
        self._answer = httpx.post(self._url, json=body, timeout=60)

    def check(self) -> None:
        """It got the answer to these pictures."""
        self.join(60)
        assert self._answer is not None and self._answer.status_code == 200, self._answer
        message = self._answer.json()["choices"][0]["message"]
        said = (message.get("reasoning_content") or "") + (message.get("content") or "")
        assert said.rstrip("\ufffd") == self._expected()

    def _expected(self) -> str:
        codec = TextCodec.load(MODEL_DIR).with_image_token(GEOMETRY.token_id)
        options = (
            recipe.ConversionOptions()
            .with_special_tokens(codec.special_tokens)
            .with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
        )
        body = {"model": "m", "messages": self._chat}
        converted = recipe.ChatCompletionRequest(body).convert(options)
        prompt = ImageReader(GEOMETRY).encode(converted.conversation, codec)
        sampling = SamplingParams(20, temperature=0, seed=3, ignore_eos=True)
        request = Request("a", prompt.token_ids, sampling, images=prompt.images)
        return codec.decode(expected_tokens(request, 3, CONTEXT_MAX)).rstrip("\ufffd")
