"""A worker of a cluster as a process of its own: how it is run, how it leaves, and why it ends.

    listen -> join -> serve -> SIGTERM: take nothing more, finish what there is -> leave

Exit code 0: it was stopped and has finished, or its time for that was over. 1: it cannot go on,
because the router refuses it or its device is lost; the last line of its log says why.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from serving.cluster import (
    ROUTER,
    Environment,
    ModelFacts,
    ProcessFacts,
    VisionFacts,
    build_member,
    build_vision,
)
from serving.code_version import code_version
from serving.config import ROUTER_NAME, ServingConfig
from serving.core.buckets import CompiledProgram
from serving.core.grammar import GrammarCompiler
from serving.engine.engine import Executor
from serving.frontend.tracing import open_tracer
from serving.kv.cluster_key import ClusterKey
from serving.kv.offload import CachePort
from serving.nodes.node import Node
from serving.nodes.values import NodeId
from serving.nodes.vision_worker import Encode
from serving.transport.driver import Driver, SystemClock
from serving.transport.shared_frames import SharedFrames
from serving.transport.zeromq import ZeroMQNetwork
from sharding.config_file import ConfigError

_log = logging.getLogger(__name__)

READY = "node ready"
_LAST_WORDS_S = 0.5
"""Time for messages to leave before a process ends that cannot go on."""

_POLL_S = 0.05
_ORPHANED = "the process that has started it is gone"


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker runs."""

    executor: Executor
    facts: ModelFacts
    grammars: GrammarCompiler | None = None
    programs: tuple[CompiledProgram, ...] = ()
    cache: CachePort | None = None
    code_version: str = ""


@dataclass(frozen=True, slots=True)
class VisionParts:
    """What a vision worker runs."""

    encode: Encode
    facts: VisionFacts
    code_version: str = ""


class _Member(Node, Protocol):
    """A worker that joins, and can leave."""

    @property
    def is_idle(self) -> bool: ...

    def start(self) -> None: ...

    def drain(self) -> None: ...


def cluster_key(config: ServingConfig) -> ClusterKey | None:
    """The key of the configuration; None without one, on this machine alone.

    Raises:
        ConfigError: it cannot be read, or is missing though others could connect.
    """
    if config.cluster.key_file:
        return ClusterKey.read(Path(config.cluster.key_file).expanduser())
    for name in (ROUTER_NAME, *config.cluster.nodes):
        address = config.cluster.address_of(name)
        if not address.startswith("ipc://"):
            raise ConfigError(
                f"cluster.key_file is empty and {name} listens at {address or 'no address'}; "
                "expected a file with a secret that all nodes share"
            )
    return None


def check_node(config: ServingConfig, role: str, name: str) -> None:
    """Raise `ConfigError` unless the configuration has a node of this name and role, and says where
    it and the router listen.
    """
    node = config.cluster.nodes.get(name)
    if node is None or node.role != role:
        known = ", ".join(n for n, o in config.cluster.nodes.items() if o.role == role)
        raise ConfigError(
            f"cluster.nodes has no {role} node {name!r}; expected one of: {known or 'none'}"
        )
    for each in (name, ROUTER_NAME):
        if not config.cluster.address_of(each):
            raise ConfigError(
                f"nobody says where {each} listens; expected its address, or cluster.directory"
            )


async def run_worker(
    config: ServingConfig,
    node_id: NodeId,
    parts: WorkerParts | VisionParts,
    say: Callable[[str], None],
    parent: int | None = None,
) -> int:
    """Serve as one worker until stopped; the exit code.

    Args:
        say: takes lines for whoever has started the process.
        parent: the process ends, without finishing, when this one is gone.

    Raises:
        ConfigError: it cannot listen at its address, or the model does not fit the configuration.
    """
    address = config.cluster.address_of(node_id.name)
    drivers: list[Driver] = []
    clock = SystemClock()
    shared = None
    if config.cluster.context_transfer == "auto":
        shared = SharedFrames(Path(config.kv.memory_directory), clock)
    try:
        network = ZeroMQNetwork(
            address, cluster_key(config), lambda *m: drivers[0].deliver(*m), shared=shared
        )
    except zmq.ZMQError as error:
        raise ConfigError(f"{node_id}: cannot listen at {address}: {error.strerror}") from None
    process = ProcessFacts(network.address, parts.code_version or code_version(), os.getpid())
    if isinstance(parts, VisionParts):
        worker: _Member = build_vision(
            config, parts.facts, parts.encode, random.Random(), node_id, process
        )
        executors, caches = {}, {}
    else:
        environment = Environment(
            clock,
            random.Random(),
            parts.executor,
            parts.grammars,
            programs=parts.programs,
            cache=parts.cache,
        )
        worker = build_member(config, parts.facts, environment, node_id, process)
        executors = {node_id: parts.executor}
        caches = {} if parts.cache is None else {node_id: parts.cache}
    async with Driver([worker], executors, caches) as driver, network:
        drivers.append(driver)
        driver.remote = network
        network.connect(ROUTER, config.cluster.address_of(ROUTER_NAME))
        ending = asyncio.get_running_loop().create_future()
        driver.on_quit = lambda detail: ending.done() or ending.set_result(detail)
        worker.start()
        driver.perform(node_id)
        say(f"{READY} {node_id} at {network.address}")
        tracing = open_tracer(config.tracing, driver, str(node_id))
        with tracing, _drain_on_signal(worker, driver, config.server.drain_s, ending):
            watch = asyncio.create_task(watch_parent(parent, lambda: driver.on_quit(_ORPHANED)))
            reason = await ending
            watch.cancel()
        if not reason:
            return 0
        _log.error("%s ends: %s", node_id, reason)
        await asyncio.sleep(_LAST_WORDS_S)
        return 1


@contextlib.contextmanager
def _drain_on_signal(
    worker: _Member, driver: Driver, drain_s: float, ending: "asyncio.Future[str]"
) -> Iterator[None]:
    """The first SIGINT or SIGTERM lets the worker finish what it has; the second ends it."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        worker.drain()
        driver.perform(worker.node_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while not worker.is_idle:
                    await asyncio.sleep(_POLL_S)
        if not ending.done():
            ending.set_result("")

    def stop(number: int) -> None:
        if draining:
            os._exit(128 + number)
        draining.append(loop.create_task(drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def watch_parent(parent: int | None, on_gone: Callable[[], object]) -> None:
    """Call `on_gone`, once, when the process that has started this one is gone."""
    while parent is not None:
        if os.getppid() != parent:
            on_gone()
            return
        await asyncio.sleep(_POLL_S)
