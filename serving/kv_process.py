"""The process that keeps computed prefixes: how it is started, what it runs, and how it is asked.

A server with KV tiers starts one for itself and starts it anew when it dies; or it uses one that
runs already (`kv.address`), which several servers of a machine may share and which outlives them.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from serving.frontend.auth import Principal
from serving.kv import wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.eviction import TenantLimits
from serving.kv.fetcher import Fetcher, FetcherOptions
from serving.kv.host_tier import SharedArena, remove_abandoned
from serving.kv.store import tenant_id
from serving.kv.write_behind import WriteBehindOptions
from serving.kv_config import KVOptions
from serving.kv_storage import READY, check_address, open_storage, print_ready
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError

_ARENA_PREFIX = "deepinfer-kv-"
_SOCKET_NAME = "cache.sock"
_SOCKET_PATH_MAX = 100
"""A socket's path has to fit into 107 bytes."""

_RESTART_S = 1.0
_READY_LINE = f"cache {READY}"


def default_address(options: KVOptions) -> str:
    """Where the cache process of a directory listens, or of this server alone without one."""
    path = Path(options.directory or ".").expanduser().resolve() / _SOCKET_NAME
    if options.directory and not options.metadata and len(str(path)) <= _SOCKET_PATH_MAX:
        return f"ipc://{path}"
    folder = Path(tempfile.mkdtemp(prefix=_ARENA_PREFIX))
    return f"ipc://{folder / _SOCKET_NAME}"


def limits_by_tenant(
    options: KVOptions, salt_of: Callable[[str], str | None]
) -> dict[bytes, TenantLimits]:
    """The limits that tenants have of their own, by what they are called in the tiers."""
    found: dict[bytes, TenantLimits] = {}
    for name, limits in options.tenants.items():
        salt = salt_of(name)
        own = name if not salt else Principal(name, frozenset(), salt).salted("")
        found[tenant_id(own)] = TenantLimits(limits.bytes, limits.ttl_s)
    return found


def run_cache(
    options: KVOptions,
    address: str,
    is_over: Callable[[], bool] | None = None,
    key: ClusterKey | None = None,
    limits: Mapping[bytes, TenantLimits] | None = None,
) -> None:
    """Keep prefixes until asked to stop, or until `is_over`.

    With a key, only those who have it are answered. `limits` are those of single tenants.

    Raises:
        ConfigError: the memory, the directory or the address cannot be used.
    """
    check_address(address, key)
    with contextlib.ExitStack() as stack:
        store = open_storage(options, key, stack)
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
                key,
            )
        except zmq.ZMQError as error:
            arena.close()
            raise ConfigError(f"{address}: cannot listen there: {error.strerror}") from None
        for tenant, own in (limits or {}).items():
            fetcher.limit(tenant, own)
        if is_over is not None:
            fetcher.stop_when(is_over)
        print_ready("cache", address)
        fetcher.run()


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
        key: that it is told of in its configuration, if any.
    """

    def __init__(
        self, options: KVOptions, arguments: Sequence[str], key: ClusterKey | None = None
    ) -> None:
        self.address = default_address(options)
        self._key = key
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
        if not line.startswith(_READY_LINE):
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
                ask(self.address, "stop", timeout_s=5.0, key=self._key)
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
    address: str,
    what: str,
    tenant: bytes | None = None,
    timeout_s: float = 60.0,
    key: ClusterKey | None = None,
    node: str = "",
    keys: bytes = b"",
) -> dict[str, float | int]:
    """Ask a node of the KV tiers, which has the same key, for numbers or to do something.

    `tenant` and `node` as in `wire.Ask`.

    Raises:
        ConfigError: it does not answer, or refuses.
    """
    context = zmq.Context[zmq.Socket[bytes]]()
    try:
        with contextlib.closing(wire.connect(context, address, key)) as socket:
            socket.send(wire.encode(wire.Ask(1, what, tenant, keys, node)))
            if not socket.poll(round(timeout_s * 1000)):
                raise ConfigError(
                    f"{address} does not answer; is a node running there, with the same "
                    "cluster.key_file?"
                )
            answer = wire.decode(socket.recv())
    except zmq.ZMQError as error:
        raise ConfigError(f"{address}: {error.strerror}; expected ipc://PATH or tcp://…") from None
    finally:
        context.term()
    if not isinstance(answer, wire.Answer) or answer.error is not None:
        raise ConfigError(f"{address}: {getattr(answer, 'error', None) or 'no such question'}")
    return answer.numbers
