"""The process that keeps computed prefixes: how it is started, what it runs, and how it is asked.

A server with KV tiers starts one for itself and starts it anew when it dies; or it uses one that
runs already (`kv.address`), which several servers of a machine may share and which outlives them.
"""

import contextlib
import fcntl
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from serving.config import KVOptions
from serving.kv import wire
from serving.kv.directory_link import DirectoryLink
from serving.kv.fetcher import Fetcher, FetcherOptions
from serving.kv.host_tier import SharedArena, remove_abandoned
from serving.kv.shared_tier import SharedTier
from serving.kv.store import BlockStore, StoreError
from serving.kv.write_behind import WriteBehindOptions
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError

_ARENA_PREFIX = "deepinfer-kv-"
_SOCKET_NAME = "cache.sock"
_SOCKET_PATH_MAX = 100
"""A socket's path has to fit into 107 bytes."""

_LOCK_WAIT_S = 10.0
_RESTART_S = 1.0
_METADATA_S = 5.0
"""For an answer of the metadata node; requests wait for no longer than `kv.wait_s`."""

READY = "cache ready"


def default_address(options: KVOptions) -> str:
    """Where the cache process of a directory listens, or of this server alone without one."""
    path = Path(options.directory or ".").expanduser().resolve() / _SOCKET_NAME
    if options.storage == "disk" and not options.metadata and len(str(path)) <= _SOCKET_PATH_MAX:
        return f"ipc://{path}"
    folder = Path(tempfile.mkdtemp(prefix=_ARENA_PREFIX))
    return f"ipc://{folder / _SOCKET_NAME}"


def run_cache(options: KVOptions, address: str, parent: int | None = None) -> None:
    """Keep prefixes until asked to stop, or until the process `parent` is gone.

    Raises:
        ConfigError: the memory, the directory or the address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        store = _open_store(options, stack)
        arena = _make_arena(options)
        try:
            fetcher = Fetcher(
                address,
                arena,
                store,
                SystemClock(),
                FetcherOptions(
                    lease_s=options.lease_s,
                    behind=WriteBehindOptions(options.segment_bytes, options.flush_s),
                ),
                options.tenant_bytes,
                options.ttl_s,
            )
        except zmq.ZMQError as error:
            arena.close()
            raise ConfigError(f"{address}: cannot listen there: {error.strerror}") from None
        if parent is not None:
            fetcher.stop_when(lambda: os.getppid() != parent)
        print_ready(address)
        fetcher.run()


def print_ready(address: str, line: str = READY) -> None:
    """Tell whoever started this process that it answers."""
    sys.stdout.write(f"{line} {address}\n")
    sys.stdout.flush()


def _open_store(options: KVOptions, stack: contextlib.ExitStack) -> BlockStore | None:
    if options.storage == "memory":
        return None
    directory = Path(options.directory).expanduser()
    if options.metadata:
        return _open_shared_store(options, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_locked(directory))
        # Imported here, because it takes seconds and other tiers need none of it.
        from serving.kv.orbax_tier import OrbaxTier

        return OrbaxTier(
            directory / "segments",
            options.disk_bytes,
            SystemClock(),
            options.tenant_bytes,
            options.ttl_s,
        )
    except StoreError as error:
        raise ConfigError(f"kv.directory: {error}") from None
    except OSError as error:
        raise ConfigError(f"kv.directory: {directory}: {error.strerror or error}") from None


def _open_shared_store(options: KVOptions, directory: Path) -> BlockStore:
    from serving.kv.orbax_tier import SharedOrbaxSegments

    try:
        segments = SharedOrbaxSegments(
            directory / "segments", random.Random(secrets.token_bytes(32))
        )
    except OSError as error:
        raise ConfigError(f"kv.directory: {directory}: {error.strerror or error}") from None
    try:
        link = DirectoryLink(options.metadata, SystemClock(), _METADATA_S)
        return SharedTier(segments, link)
    except StoreError as error:
        raise ConfigError(f"kv.metadata: {error}") from None
    except zmq.ZMQError as error:
        raise ConfigError(f"kv.metadata: {options.metadata}: {error.strerror}") from None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory for this process alone; one that is being given up is waited for."""
    with (directory / "lock").open("a") as file:
        waiting = threading.Event()
        for _ in range(round(_LOCK_WAIT_S / 0.1)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting.wait(0.1)
        else:
            raise ConfigError(
                f"kv.directory: {directory} is used by another cache process; use that one "
                f"(kv.address = 'ipc://{directory / _SOCKET_NAME}') or another directory"
            )
        yield


def _make_arena(options: KVOptions) -> SharedArena:
    folder = Path(options.memory_directory)
    try:
        remove_abandoned(folder, _ARENA_PREFIX)
        path = folder / f"{_ARENA_PREFIX}{secrets.token_hex(8)}"
        return SharedArena.create(path, options.host_bytes)
    except OSError as error:
        raise ConfigError(
            f"kv.memory_directory: {folder}: {options.host_bytes} bytes of shared memory cannot "
            f"be had: {error.strerror or error}; expected less in kv.host_bytes, or more room"
        ) from None


class CacheProcess:
    """A cache process that belongs to this one.

    Args:
        arguments: of the command line that tell it the configuration.
    """

    def __init__(self, options: KVOptions, arguments: Sequence[str]) -> None:
        self.address = default_address(options)
        self._arguments = list(arguments)
        self._is_stopping = threading.Event()
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="kv-watch", daemon=True)

    def wait_until_ready(self) -> None:
        """Return when it answers.

        Raises:
            ConfigError: it ended instead, having said why on stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(READY):
            raise ConfigError(f"the cache process ended with code {self._process.wait()}")
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The number of the process that runs now."""
        return self._process.pid

    def stop(self) -> None:
        """Let it write what it has and end."""
        self._is_stopping.set()
        if self._process.poll() is None:
            with contextlib.suppress(ConfigError):
                ask(self.address, "stop", timeout_s=5.0)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        path = Path(self.address.removeprefix("ipc://"))
        if path.parent.name.startswith(_ARENA_PREFIX):
            # Made for this process alone.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                path.parent.rmdir()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "serving", "node", "--role", "cache"]
        command += ["--listen", self.address, "--parent", str(os.getpid()), *self._arguments]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
        )

    def _watch(self) -> None:
        """Start it anew when it has died; requests do without it meanwhile."""
        while not self._is_stopping.is_set():
            self._process.wait()
            if self._is_stopping.wait(_RESTART_S):
                return
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = self._start()


def ask(
    address: str, what: str, tenant: bytes | None = None, timeout_s: float = 60.0
) -> dict[str, float | int]:
    """Ask a node of the KV tiers for numbers, or to do something.

    Raises:
        ConfigError: it does not answer, or refuses.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
        socket.send(wire.encode(wire.Ask(1, what, tenant)))
        if not socket.poll(round(timeout_s * 1000)):
            raise ConfigError(f"{address} does not answer; is a cache process running there?")
        answer = wire.decode(socket.recv())
    except zmq.ZMQError as error:
        raise ConfigError(f"{address}: {error.strerror}; expected ipc://PATH or tcp://…") from None
    finally:
        socket.close()
        context.term()
    if not isinstance(answer, wire.Answer) or answer.error is not None:
        raise ConfigError(f"{address}: {getattr(answer, 'error', None) or 'no such question'}")
    return answer.numbers
