"""Goal: a worker as a process of its own joins, serves, leaves when it is told to, and ends with a
reason when it cannot go on.

Method: real processes around simulated devices; the router runs in the test.
"""

import asyncio
import contextlib
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from serving.cluster import FRONTEND, ROUTER, build_router
from serving.code_version import code_version
from serving.config import ServingConfig, load_config
from serving.core.request import FinishReason, Request, SamplingParams
from serving.node_process import check_node, cluster_key
from serving.nodes import messages
from serving.transport.driver import Driver, SystemClock
from serving.transport.zeromq import ZeroMQNetwork
from sharding.config_file import ConfigError
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import expected_tokens
from tests.serving.scripted_node import NODE_COMMAND
from tests.serving.transport.test_driver import Recorder

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "tests" / "golden" / "tiny-v41"
CONFIG = """
[engine]
max_context = 512
num_blocks = 33
prefill_tokens = [128]
decode_rows = [4]
[cluster]
directory = "{folder}"
key_file = "{folder}/key"
heartbeat_s = 0.1
lost_s = 2.0
[cluster.nodes.p]
role = "prefill"
[cluster.nodes.d]
role = "decode"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "key").write_text("k" * 32)
    return path


def start(path: Path, role: str, name: str, *more: str) -> "subprocess.Popen[str]":
    flags = ["--role", role, "--name", name, "--config", str(path), *more]
    command = [*NODE_COMMAND, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextlib.asynccontextmanager
async def routing(config: ServingConfig) -> AsyncIterator[tuple[Recorder, Any, Driver]]:
    """A router in this process, and a frontend that keeps what it gets."""
    router = build_router(config, SystemClock(), random.Random(1), code_version())
    frontend = Recorder(FRONTEND)
    async with Driver([router, frontend], {}) as driver:
        address = config.cluster.address_of("router")
        async with ZeroMQNetwork(address, cluster_key(config), driver.deliver) as network:
            driver.remote = network
            router.start()
            driver.perform(ROUTER)
            yield frontend, router, driver


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("way", ["auto", "sockets"])
def test_workers_join_serve_and_leave(path: Path, way: str) -> None:
    memory = path.parent / "memory"
    memory.mkdir()
    before_ns = memory.stat().st_mtime_ns
    text = path.read_text().replace("[cluster]", f'[cluster]\ncontext_transfer = "{way}"')
    path.write_text(f'{text}\n[kv]\nmemory_directory = "{memory}"\n')
    config = load_config(path)
    nodes = [start(path, "prefill", "p"), start(path, "decode", "d")]
    request = Request(
        "a", tuple(prompt_of(460)), SamplingParams(40, temperature=0, seed=1, ignore_eos=True)
    )

    async def run() -> None:
        async with routing(config) as (frontend, router, driver):
            await wait_for(lambda: len(router.registry.members()) == 2)
            frontend.outbox.send(ROUTER, messages.Submit(request))
            driver.perform(FRONTEND)

            def tokens() -> list[Any]:
                told = [m for m in frontend.got if isinstance(m, messages.Tokens)]
                return [delta for message in told for delta in message.deltas]

            await wait_for(lambda: len(tokens()) > 3)
            # Told to leave, they finish first.
            for node in nodes:
                node.send_signal(signal.SIGTERM)
            await wait_for(lambda: tokens()[-1].finish_reason is FinishReason.LENGTH)
            said = [token for delta in tokens() for token in delta.token_ids]
            assert said == expected_tokens(request, 1, 512)
            assert router.num_restarted == 0

    try:
        asyncio.run(run())
        outputs = [node.communicate(timeout=20) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0]
        assert all("node ready" in out and not error for out, error in outputs), outputs
        # The context has passed through the folder, and nothing of it is there.
        assert (memory.stat().st_mtime_ns > before_ns) == (way == "auto")
        assert list(memory.iterdir()) == []
    finally:
        for node in nodes:
            node.kill()


def test_one_that_is_refused_ends_with_the_reason(path: Path) -> None:
    config = load_config(path)
    node = start(path, "prefill", "p", "--code-version", "other")

    async def run() -> None:
        async with routing(config):
            await wait_for(lambda: node.poll() is not None)

    try:
        asyncio.run(run())
        _, error = node.communicate(timeout=20)
        assert node.returncode == 1
        expected = f"prefill/p runs code other and the router {code_version()}; expected the same"
        assert f"the router refuses this node: {expected}" in error
    finally:
        node.kill()


def test_it_ends_with_the_process_that_has_started_it(path: Path) -> None:
    # No process has a parent of that number.
    node = start(path, "decode", "d", "--parent", "-1")
    try:
        _, error = node.communicate(timeout=30)
        assert node.returncode == 1 and "the process that has started it is gone" in error
    finally:
        node.kill()


def test_what_cannot_be_started_is_named(path: Path) -> None:
    config = load_config(path)
    check_node(config, "prefill", "p")
    with pytest.raises(ConfigError, match=r"no prefill node 'd'; expected one of: p"):
        check_node(config, "prefill", "d")
    text = path.read_text()
    path.write_text(text.replace("directory =", "# "))
    with pytest.raises(ConfigError, match=r"nobody says where p listens; .* cluster.directory"):
        check_node(load_config(path), "prefill", "p")
    path.write_text(text.replace("key_file =", "# ") + 'address = "tcp://127.0.0.1:7001"\n')
    with pytest.raises(
        ConfigError, match=r"key_file is empty and d listens at tcp://127.0.0.1:7001"
    ):
        cluster_key(load_config(path))
    path.write_text(text.replace("key_file =", "# "))
    assert cluster_key(load_config(path)) is None
