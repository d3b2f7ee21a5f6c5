"""A whole cluster on one machine: starts all of its processes, and starts anew what ends.

The nodes of the KV tiers come first and go last, with the cache process of the machine, so that
what workers have computed is stored when they leave. Of the workers one is started before all
others, so that what it compiles is there for them. A process that
ends is started again after a while, which grows as long as it does not stay up; one that was told
to leave comes back at once, so workers can be restarted in turn without a request failing. One
whose input is wrong, which it says with exit code 2, ends the cluster.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from serving.config import (
    CACHE_NAME,
    ROUTER_NAME,
    TIER_ROLES,
    WORKER_ROLES,
    ClusterOptions,
    ServingConfig,
)
from serving.kv.cluster_key import ClusterKey

EXIT_BAD_INPUT = 2
NODE_COMMAND = (sys.executable, "-m", "serving", "node")
READY_LINES = ("node ready", "Serving ", "storage ready", "metadata ready", "cache ready")
"""How the lines begin with which processes say that they are up."""

_BACK_OFF_S, _BACK_OFF_MAX_S = 0.5, 30.0
_STABLE_S = 60.0
"""One that has been up for so long is not held to what was before."""


class Child:
    """One process of the cluster.

    Attributes:
        name, role: of the node.
        state: `starting`, `ready`, `waiting` until it is started again, or `stopped`.
        num_starts: how often it was started.
        is_up: set when it has been ready for the first time.
    """

    def __init__(
        self, name: str, role: str, command: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self.name, self.role = name, role
        self.state = "waiting"
        self.num_starts = 0
        self.is_up = asyncio.Event()
        self._command = [*command, "--role", role, "--name", name, "--parent", str(os.getpid())]
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    @property
    def line(self) -> str:
        """How it is, in one line."""
        pid = "" if self._process is None else f"  pid {self._process.pid}"
        return f"{self.name:<12} {self.role:<8} {self.state:<9} starts {self.num_starts}{pid}"

    async def run(self) -> int:
        """Keep it running until it is told to stop, or cannot be started; its exit code."""
        loop = asyncio.get_running_loop()
        back_off_s = _BACK_OFF_S
        while not self._is_stopping:
            begin = loop.time()
            code = await self._run_once()
            if self._is_stopping or code == EXIT_BAD_INPUT:
                self._set("stopped")
                return code
            self._process = None
            if code == 0:
                continue
            if loop.time() - begin > _STABLE_S:
                back_off_s = _BACK_OFF_S
            self._set("waiting", f"ended with code {code}; again in {back_off_s:g} s")
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, _BACK_OFF_MAX_S)
        return 0

    def tell(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self) -> None:
        """Let it finish and end; it is not started again."""
        self._is_stopping = True
        self.tell(signal.SIGTERM)

    def end(self) -> None:
        """End it at once; it is not started again."""
        self._is_stopping = True
        self.tell(signal.SIGKILL)

    async def _run_once(self) -> int:
        self.num_starts += 1
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Signals of a terminal come from here, in order.
            process_group=0,
        )
        self._set("starting")
        if self._is_stopping:
            self.tell(signal.SIGTERM)
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith(READY_LINES):
                self.is_up.set()
                self._set("ready")
            # The router speaks for the service; what workers say is not for everybody.
            if self.role == ROUTER_NAME:
                self._say(line)
        return await self._process.wait()

    def _set(self, state: str, why: str = "") -> None:
        self.state = state
        self._say(self.line + (f"  {why}" if why else ""))


async def run_cluster(
    config: ServingConfig,
    arguments: Sequence[str],
    say: Callable[[str], None],
    command: Sequence[str] = NODE_COMMAND,
) -> int:
    """Run all processes of a configuration until a signal comes; the exit code.

    Args:
        arguments: the flags that give a process this configuration.
        say: takes lines for people.
        command: runs a node whose flags follow.
    """
    given, cluster = [*command, *arguments], config.cluster
    tiers = _children(config, TIER_ROLES, given, say)
    if config.kv.is_on and not config.kv.address:
        given += ["--set", f"kv.address={cluster.address_of(CACHE_NAME)}"]
        tiers.insert(0, Child(CACHE_NAME, CACHE_NAME, given, say))
    router = Child(ROUTER_NAME, ROUTER_NAME, given, say)
    workers = _children(config, WORKER_ROLES, given, say)
    return await _look_after(router, workers, tiers, config.server.drain_s)


def _children(
    config: ServingConfig,
    roles: Sequence[str],
    command: Sequence[str],
    say: Callable[[str], None],
) -> list[Child]:
    """The nodes of the configuration that have one of these roles, in the order of these."""
    cluster = config.cluster
    return [Child(name, role, command, say) for role in roles for name in cluster.named(role)]


async def _look_after(
    router: Child, workers: list[Child], tiers: list[Child], drain_s: float
) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        if stopping.is_set():  # Whoever asks twice does not want to wait.
            for child in (router, *workers, *tiers):
                child.end()
        stopping.set()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: router.tell(signal.SIGHUP))
    first = (*tiers, router, workers[0])
    running = {child: asyncio.create_task(child.run()) for child in first}
    starting = asyncio.create_task(_start_others(workers, running))
    waiting = asyncio.create_task(stopping.wait())
    try:
        while not stopping.is_set():
            tasks = [*running.values(), waiting]
            done, _ = await asyncio.wait(
                tasks if starting.done() else [*tasks, starting],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if any(task in done for task in running.values()):
                break
        starting.cancel()
        # The router first: its requests may need the workers to finish. The cache process, which
        # comes first of the tiers, may need the others to write to.
        for some in ([router], workers, tiers[:1], tiers[1:]):
            for child in some:
                child.stop()
            ending = [running[child] for child in some if child in running]
            if ending:
                await asyncio.wait(ending, timeout=drain_s + 5)
        for child in running:
            child.tell(signal.SIGKILL)
        codes = await asyncio.gather(*running.values())
        return EXIT_BAD_INPUT if EXIT_BAD_INPUT in codes else 0
    finally:
        waiting.cancel()
        for number in (*numbers, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _start_others(workers: list[Child], running: "dict[Child, asyncio.Task[int]]") -> None:
    await workers[0].is_up.wait()
    running |= {child: asyncio.create_task(child.run()) for child in workers[1:]}


@contextlib.contextmanager
def meeting_place(cluster: ClusterOptions) -> Iterator[list[str]]:
    """The changes to a configuration that give its nodes a place to meet, and a key."""
    made = None
    changes: list[str] = []
    try:
        if cluster.directory:
            directory = Path(cluster.directory).expanduser()
            directory.mkdir(parents=True, exist_ok=True)
        else:
            directory = made = Path(tempfile.mkdtemp(prefix="deepinfer-"))
            changes.append(f"cluster.directory={directory}")
        if not cluster.key_file:
            for number in itertools.count():
                path = directory / f"key{number or ''}"
                with contextlib.suppress(FileExistsError):
                    ClusterKey.write(path)
                    break
            changes.append(f"cluster.key_file={path}")
        yield changes
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
