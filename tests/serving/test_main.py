"""Goal: the command line turns flags into a configuration, and every wrong input into one line on
stderr and exit code 2, without a traceback and before anything expensive.

Method: `main` called in this process with bad input of each kind; subprocesses where it matters
that a module is not imported, or that signals arrive. The server itself is a scripted one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import serving.__main__ as command_line
from serving.config import ServingConfig
from serving.engine.jax_executor import JaxExecutor
from serving.listening import bind
from tests.serving.frontend.alphabet import wait_for
from tests.serving.running_service import MODEL_DIR

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings that the command line makes for its process end with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
    ):
        monkeypatch.setenv(name, "set")
        monkeypatch.delenv(name)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an expected failure."""
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("serving: "), captured.err
    return lines[0]


def test_port_in_use(taken_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_main(["--port", str(taken_port)], capsys)
    assert f"port {taken_port}" in line and "in use" in line and "--port" in line


def test_two_servers_that_start_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    # The first one does not listen yet: it is loading its model.
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert "in use" in run_main(["--port", str(port), "--model", "/no/where"], capsys)


def test_bad_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert "256.1.1.1" in run_main(["--host", "256.1.1.1", "--port", "0"], capsys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "/no/such.toml"], "/no/such.toml: no such file"),
        (["--set", "server.prot=1"], "unknown key (did you mean port?)"),
        (["--set", "engine.num_blocks"], "expected key=value"),
        (["--port", "70000"], "port: received 70000; expected 0 to 65535"),
        (["--model", "/no/where", "--port", "0"], "/no/where: no such directory"),
        (["--set", "engine.max_context=100", "--port", "0"], "a multiple of 128"),
        (["--set", "engine.num_blocks=2", "--port", "0"], "expected at least 33"),
        (["--set", "sharding=none", "--port", "0"], "sharding none"),
        (["run", "--set", "model.cache_format=int4"], "cache_format"),
    ],
)
def test_bad_settings(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in run_main(arguments, capsys)


def test_config_file_with_an_unknown_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[engine]\nmax_contxt = 5\n")
    line = run_main(["--config", str(path)], capsys)
    assert "engine.max_contxt: unknown key" in line and "bad.toml" in line


def test_truncated_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in MODEL_DIR.iterdir():
        content = file.read_bytes()
        cut = len(content) // 2 if file.name == "model.safetensors" else len(content)
        (model / file.name).write_bytes(content[:cut])
    assert "model.safetensors" in run_main(["--model", str(model), "--port", "0"], capsys)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        (
            "model.safetensors",
            b'"layers.0.attn.wo_a.scale":{"dtype":"F8_E8M0","shape":[2,4]',
            b'"layers.0.attn.wo_a.scale":{"dtype":"F8_E8M0","shape":[4,2]',
            "layers.0.attn.wo_a.scale is F8_E8M0 [4, 2], expected F8_E8M0 [2, 4]",
        ),
        (
            "model.safetensors",
            b'"norm.weight":{"dtype":"BF16"',
            b'"norm.weight":{"dtype":"FP16"',
            "tensor norm.weight has dtype 'FP16'; expected one of",
        ),
        (
            "config.json",
            b'"engram_compressed_vocab_size": 272',
            b'"engram_compressed_vocab_size": 273',
            "the tokenizer has 272 token classes; expected 273",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_before_anything_is_allocated(
    name: str,
    old: bytes,
    new: bytes,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for file in MODEL_DIR.iterdir():
        content = file.read_bytes()
        assert file.name != name or content.count(old) == 1
        (tmp_path / file.name).write_bytes(content.replace(old, new))

    def allocate(*arguments: object) -> None:
        raise AssertionError("something is put on a device although the checkpoint is bad")

    monkeypatch.setattr(JaxExecutor, "_allocate", allocate)
    monkeypatch.setattr(JaxExecutor, "_place", allocate)
    assert words in run_main(["--model", str(tmp_path), "--port", "0"], capsys)


def test_replay_that_the_model_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "engine.replay=compact", "--set", "engine.replay_keep=13", "--port", "0"]
    line = run_main(["--model", str(MODEL_DIR), *options], capsys)
    assert "engine.replay_keep 13: replay keeps the last 13 tokens" in line
    assert "expected at least 14: a window of 8 and the 6" in line


def test_generate_with_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", str(tmp_path / "out.jsonl")
    rows.write_text('{"prompt": "x"}\n{"promt": "y"}\n')
    line = run_main(["generate", "--prompts", str(rows), "--out", out], capsys)
    assert f"{rows}:2:" in line
    line = run_main(["generate", "--prompts", str(tmp_path / "no"), "--out", out], capsys)
    assert "cannot be read" in line
    rows.write_text('{"prompt": "x"}\n')
    line = run_main(["generate", "--prompts", str(rows), "--out", "/no/where/out"], capsys)
    assert "/no/where: no such directory" in line


def test_generate_that_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is loaded."""
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "Hi"}\n')
    for out, expected in (
        (tmp_path, "cannot be written: Is a directory"),
        (rows, "file of prompts"),
    ):
        arguments = ["generate", "--prompts", str(rows), "--out", str(out)]
        assert expected in run_main(arguments, capsys)
    assert rows.read_text() == '{"prompt": "Hi"}\n'


def test_plan_counts_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert command_line.main(["plan", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["total_bytes"] == 510_286_023_000
    assert "510,286,023,000 bytes" in capsys.readouterr().out
    arguments = ["plan", "--model", str(MODEL_DIR), "--cache-format", "noq"]
    assert command_line.main([*arguments, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert (figures["num_tensors"], figures["cache_format"]) == (1823, "noq")
    assert str(MODEL_DIR) in capsys.readouterr().out


def test_plan_on_a_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", "--sharding", "serve_h200x8", "--users", "64", "--json", str(out)]
    assert command_line.main(arguments) == 0
    assert "Fits: " in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert (figures["fits"], figures["users"], figures["context"]) == (True, 64, 8192)
    assert command_line.main(["plan", "--sharding", "single"]) == 1
    assert "Does not fit, by " in capsys.readouterr().out


def test_plan_on_a_mesh_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_main(["plan", "--users", "64"], capsys)
    assert "--users was given without --sharding" in line
    line = run_main(["plan", "--sharding", "single", "--hardware", "abacus"], capsys)
    assert "'abacus' is unknown" in line
    line = run_main(["plan", "--sharding", "single", "--json", str(tmp_path / "no" / "a")], capsys)
    assert "cannot be written" in line


def test_plan_with_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_main(["plan", "--model", str(tmp_path)], capsys)
    assert f"{tmp_path / 'config.json'}: no such file" in line
    line = run_main(["plan", "--json", "/no/where/plan.json"], capsys)
    assert "/no/where/plan.json: cannot be written" in line


def test_flags_win_over_the_file_and_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[server]\nport = 1\nhost = "127.0.0.2"\n[engine]\nwaiting_max = 7\n')
    options = command_line._parser().parse_args(
        ["run", "--config", str(path), "--set", "server.port=2", "--set", "model.name=x"]
        + ["--port", "3", "--cache-format", "noq", "--model", "some/dir"]
    )
    config = command_line._config_of(options)
    assert (config.server.port, config.server.host) == (3, "127.0.0.2")
    assert (config.engine.waiting_max, config.model.name) == (7, "x")
    assert (config.model.cache_format, config.model.path) == ("noq", "some/dir")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["plan", "--help"]])
def test_help_is_quick_because_it_imports_little(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom serving.__main__ import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as done: assert not done.code\n"
        "heavy = {'jax', 'numpy', 'uvicorn', 'deepseek_recipe', 'grain'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


def test_compiled_steps_are_kept_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command_line._set_process_up(ServingConfig())
    kept = command_line.os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert Path(kept).is_relative_to(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    command_line._set_process_up(ServingConfig())
    assert command_line.os.environ["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"


SCRIPTED_SERVER = """
import sys
import serving.__main__ as m
from pathlib import Path
from serving.frontend.text import TextCodec
from serving.loading import LoadedModel
from tests.serving.running_service import FACTS, MODEL_DIR
from tests.serving.scripted import ScriptedExecutor

executor = ScriptedExecutor(lambda position: 40, step_s=0.02)
m._load = lambda config: LoadedModel(executor, FACTS, TextCodec.load(MODEL_DIR))
sys.exit(m.main(sys.argv[1:]))
"""


class Server:
    """A server process around a scripted executor."""

    def __init__(
        self, *arguments: str, at_line: Callable[[int, str], object] = lambda *_: None
    ) -> None:
        """`at_line` hears of each line until the server is up, with the number of the process."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPTED_SERVER, "--port", "0", "--model", str(MODEL_DIR)]
            + list(arguments),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            at_line(self.process.pid, line)
            if line.startswith("Try "):
                break
        (serving,) = (line for line in self.lines if line.startswith("Serving "))
        self.url = serving.split()[1]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def stream(url: str, num_tokens: int, pieces: list[str]) -> None:
    body = {"model": "tiny-v41", "prompt": "x", "max_tokens": num_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=30) as response:
        pieces.extend(response.iter_lines())


def ready(url: str) -> int:
    return httpx.get(url.replace("/v1", "/ready")).status_code


def test_a_mesh_of_host_devices_gets_as_many_as_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --another=1")
    monkeypatch.setenv("JAX_PLATFORMS", "gpu")
    command_line._set_process_up(ServingConfig())
    environ = command_line.os.environ
    assert "count=2" in environ["XLA_FLAGS"] and environ["JAX_PLATFORMS"] == "gpu"
    command_line._set_process_up(ServingConfig(sharding="cpu8"))
    assert environ["XLA_FLAGS"] == "--another=1 --xla_force_host_platform_device_count=8"
    assert environ["JAX_PLATFORMS"] == "cpu"


def test_start_up_says_what_is_served_and_the_curl_line_works() -> None:
    with Server() as server:
        text = "".join(server.lines)
        assert "tiny-v41" in text and str(MODEL_DIR) in text
        command = next(line for line in server.lines if line.startswith("Try "))
        body = json.loads(command.split("-d '")[1].rstrip("'\n"))
        assert f"{server.url}/chat/completions" in command
        answer = httpx.post(f"{server.url}/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_0(number: signal.Signals) -> None:
    with Server() as server:
        pieces: list[str] = []
        reader = threading.Thread(target=stream, args=(server.url, 300, pieces))
        reader.start()
        wait_for(lambda: len(pieces) > 0, "the first tokens")
        server.process.send_signal(number)
        wait_for(lambda: ready(server.url) == 503, "readiness going off")
        reader.join(20)
        assert server.process.wait(10) == 0
        # Tokens of two steps may share an event; that all 300 came shows in how the stream ended.
        assert pieces[-2] == "data: [DONE]"
        assert any('"finish_reason":"length"' in piece for piece in pieces), pieces[-4:]
        out, err = server.process.communicate()
        assert "Stopping" in out and not err


def test_drain_has_a_limit() -> None:
    with Server("--set", "server.drain_s=0.2") as server:
        pieces: list[str] = []
        reader = threading.Thread(target=stream, args=(server.url, 2000, pieces))
        reader.start()
        wait_for(lambda: len(pieces) > 0, "the first tokens")
        server.process.terminate()
        assert server.process.wait(10) == 0
        reader.join(10)
        assert "event: error" in pieces and pieces[-2] == "data: [DONE]"


def test_half_sent_requests_do_not_hold_the_shutdown_up() -> None:
    with Server() as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n{"
        with (
            socket.create_connection((host, int(port)), timeout=10) as body_missing,
            socket.create_connection((host, int(port)), timeout=10) as head_missing,
        ):
            body_missing.sendall(head)
            head_missing.sendall(head[:30])
            assert httpx.get(server.url.replace("/v1", "/health")).status_code == 200
            server.process.terminate()
            assert b" 503 " in body_missing.recv(100)
            assert head_missing.recv(100) == b""
            assert server.process.wait(10) == 0
        out, err = server.process.communicate()
        assert "Stopping" in out and not err


def test_second_signal_ends_at_once() -> None:
    with Server() as server:
        pieces: list[str] = []
        reader = threading.Thread(target=_ignoring_the_end, args=(server.url, pieces))
        reader.start()
        wait_for(lambda: len(pieces) > 0, "the first tokens")
        server.process.terminate()
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(2) == 128 + signal.SIGTERM
        reader.join(10)


def test_without_keys_only_this_machine_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "some.name"):
        line = run_main(["--host", host, "--port", "0", "--model", "/no/where"], capsys)
        assert host in line and "keys add" in line


def test_keys_made_while_a_model_is_loaded_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", f"server.database={tmp_path / 'db'}"]
    assert command_line.main(["keys", "add", "acme", *settings]) == 0

    def at_line(pid: int, line: str) -> None:
        if line.startswith("Loading "):
            assert command_line.main(["keys", "add", "other", *settings]) == 0
            os.kill(pid, signal.SIGHUP)

    with Server(*settings, at_line=at_line) as server:
        headers = {"x-api-key": capsys.readouterr().out.splitlines()[-1]}
        assert httpx.get(f"{server.url}/models", headers=headers).status_code == 200


def test_keys_usage_and_reload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, settings = tmp_path / "my.toml", ["--config", str(tmp_path / "my.toml")]
    config.write_text(f'[server]\ndatabase = "{tmp_path / "db"}"\n')
    assert command_line.main(["keys", "add", "acme", *settings]) == 0
    head, secret = capsys.readouterr().out.splitlines()
    headers = {"authorization": f"Bearer {secret}"}
    body = {"model": "tiny-v41", "prompt": "x", "max_tokens": 3}
    with Server(*settings) as server:

        def status(**headers: str) -> int:
            url = f"{server.url}/completions"
            return httpx.post(url, json=body, headers=headers, timeout=30).status_code

        assert not any("No API keys" in line for line in server.lines)
        assert (status(), status(**headers)) == (401, 200)
        assert command_line.main(["keys", "revoke", head.split()[1], *settings]) == 0
        config.write_text(config.read_text() + "[quotas.default]\nrequests_per_minute = 1\n")
        assert command_line.main(["keys", "add", "other", *settings]) == 0
        other = {"x-api-key": capsys.readouterr().out.splitlines()[-1]}
        server.process.send_signal(signal.SIGHUP)
        assert server.process.stdout is not None
        assert "Reloaded" in server.process.stdout.readline()
        assert (status(**headers), status(**other), status(**other)) == (401, 200, 429)
        config.write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        assert "Not reloaded: " in server.process.stdout.readline()
        assert status(**headers) == 401
        server.process.kill()
        server.process.wait(10)
    config.write_text(f'[server]\ndatabase = "{tmp_path / "db"}"\n')
    assert command_line.main(["usage", *settings]) == 0
    rows = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["tenant", "calls"], ["acme", "1"], ["other", "1"]]
    assert command_line.main(["keys", "list", *settings]) == 0
    listed = capsys.readouterr().out
    assert "revoked" in listed and "in force" in listed and secret not in listed


def _ignoring_the_end(url: str, pieces: list[str]) -> None:
    with pytest.raises(httpx.HTTPError):
        stream(url, 2000, pieces)
