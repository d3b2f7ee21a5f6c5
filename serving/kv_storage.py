"""Opens the storage that a configuration names, and runs storage nodes."""

import contextlib
import fcntl
import os
import random
import secrets
import signal
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from serving.kv.cluster_key import ClusterKey
from serving.kv.directory_link import DirectoryLink
from serving.kv.segment_tier import SegmentStorage
from serving.kv.shared_tier import SharedTier
from serving.kv.store import BlockStore, StoreError
from serving.kv.whereabouts import Announcer, Here
from serving.kv_config import KVOptions
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from serving.kv.storage_node import StorageNode

READY = "ready"
_METADATA_S = 5.0
"""For an answer of the metadata node; requests wait for no longer than `kv.wait_s`."""

_LOCK_WAIT_S = 10.0
_LOOK_S = 0.1
"""How often a storage node looks whether it is to end."""

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def read_key(path: str) -> ClusterKey | None:
    """The key that the processes of a cluster share; None if the configuration names none.

    Raises:
        ConfigError: the file cannot be used.
    """
    return ClusterKey.read(Path(path).expanduser()) if path else None


def check_address(address: str, key: ClusterKey | None) -> None:
    """Refuse an address that other machines can reach without a key.

    Raises:
        ConfigError: that is so.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "tcp" and key is None and parts.hostname not in _LOCAL_HOSTS:
        raise ConfigError(
            f"{address}: other machines can reach it; expected cluster.key_file to name a file "
            "with a secret, or an address of this machine alone"
        )


@contextlib.contextmanager
def stop_signal(parent: int | None = None) -> Iterator[Callable[[], bool]]:
    """Whether a node is to end: SIGTERM has come, or the process `parent` that started it is gone.

    For the main thread.
    """
    has_come: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: has_come.append(number))
    try:
        yield lambda: bool(has_come) or (parent is not None and os.getppid() != parent)
    finally:
        signal.signal(signal.SIGTERM, before)


def print_ready(what: str, address: str) -> None:
    """Tell whoever started this process that it answers."""
    sys.stdout.write(f"{what} {READY} {address}\n")
    sys.stdout.flush()


def open_storage(
    options: KVOptions, key: ClusterKey | None, stack: contextlib.ExitStack
) -> BlockStore | None:
    """The storage tier; None for a cache that keeps everything in memory.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        match options.storage:
            case "disk":
                return _open_disk(options, key, stack)
            case "erasure":
                return _open_erasure(options, key)
            case "object":
                return _open_objects(options, key)
            case "mooncake":
                return _open_mooncake(options)
            case _:
                return None
    except StoreError as error:
        raise ConfigError(f"kv.storage = {options.storage!r}: {error}") from None


# Each imports its tier by itself, because none needs the libraries of the others.


def _open_disk(
    options: KVOptions, key: ClusterKey | None, stack: contextlib.ExitStack
) -> BlockStore:
    from serving.kv.orbax_tier import OrbaxTier, SharedOrbaxSegments

    directory = Path(options.directory).expanduser()
    try:
        if options.metadata:
            segments = SharedOrbaxSegments(directory / "segments", _random_source())
            return _share(segments, options, key)
        directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_locked(directory))
    except OSError as error:
        raise ConfigError(f"kv.directory: {directory}: {error.strerror or error}") from None
    return OrbaxTier(
        directory / "segments",
        options.disk_bytes,
        SystemClock(),
        options.tenant_bytes,
        options.ttl_s,
    )


def _open_erasure(options: KVOptions, key: ClusterKey | None) -> BlockStore:
    from serving.kv.erasure_tier import ErasureTier, ErasureTimes
    from serving.kv.stripe_repair import RepairOptions
    from serving.kv.stripes import Coding

    erasure = options.erasure
    for address in erasure.nodes.values():
        check_address(address, key)
    try:
        return ErasureTier(
            erasure.nodes,
            Coding(erasure.data_fragments, erasure.parity_fragments),
            options.disk_bytes,
            key,
            SystemClock(),
            _random_source(),
            options.tenant_bytes,
            options.ttl_s,
            ErasureTimes(read_s=erasure.read_s, write_s=erasure.write_s),
            RepairOptions(after_s=erasure.repair_after_s, bytes_per_s=erasure.repair_bytes_per_s),
        )
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv.erasure.nodes: {error.strerror}; expected addresses such as tcp://HOST:PORT"
        ) from None


def _open_objects(options: KVOptions, key: ClusterKey | None) -> BlockStore:
    from serving.kv.object_tier import ObjectSegments, ObjectTier, ObjectTimes

    chosen = options.object
    times = ObjectTimes(chosen.read_s, chosen.write_s, refresh_s=chosen.refresh_s)
    if options.metadata:
        try:
            segments = ObjectSegments(chosen.kvstore, times, _random_source())
        except (OSError, ValueError) as error:
            raise StoreError(f"{chosen.kvstore}: cannot be used: {error}") from error
        return _share(segments, options, key)
    return ObjectTier(
        chosen.kvstore,
        options.disk_bytes,
        SystemClock(),
        _random_source(),
        options.tenant_bytes,
        options.ttl_s,
        times,
    )


def _open_mooncake(options: KVOptions) -> BlockStore:
    from serving.kv.mooncake_tier import MooncakeSetup, MooncakeTier

    chosen = options.mooncake
    setup = MooncakeSetup(
        chosen.master,
        chosen.metadata,
        chosen.hostname,
        chosen.protocol,
        chosen.devices,
        chosen.segment_bytes,
    )
    return MooncakeTier(setup, SystemClock(), options.ttl_s)


def _share(segments: SegmentStorage, options: KVOptions, key: ClusterKey | None) -> BlockStore:
    """A storage that other hosts use too, as the metadata node says."""
    check_address(options.metadata, key)
    try:
        return SharedTier(
            segments, DirectoryLink(options.metadata, SystemClock(), _METADATA_S, key)
        )
    except StoreError as error:
        raise ConfigError(f"kv.metadata: {error}") from None
    except zmq.ZMQError as error:
        raise ConfigError(f"kv.metadata: {options.metadata}: {error.strerror}") from None


def run_storage_node(
    options: KVOptions,
    name: str,
    address: str | None,
    key: ClusterKey | None,
    metadata: str = "",
    is_over: Callable[[], bool] | None = None,
) -> None:
    """Keep fragments until asked to stop, or until `is_over`.

    The node keeps them in the folder of its name in `kv.directory`, and listens at `address` or
    where `kv.erasure.nodes` says. It finds the others through the metadata node; without one it
    tells those of `kv.erasure.nodes` that it is there.

    Raises:
        ConfigError: the directory or the address cannot be used.
    """
    from serving.kv.fragment_directory import FragmentDirectory
    from serving.kv.greeter import Greeter
    from serving.kv.storage_node import StorageNode

    address = address or options.erasure.nodes.get(name)
    if not address:
        raise ConfigError(
            f"where does storage node {name!r} listen? Expected --listen ADDRESS, or "
            f"kv.erasure.nodes.{name}"
        )
    if not options.directory:
        raise ConfigError("kv.directory: received nothing; expected a directory for the node")
    check_address(address, key)
    path = Path(options.directory).expanduser() / name
    try:
        directory = FragmentDirectory(path)
    except BlockingIOError:
        raise ConfigError(f"kv.directory: {path} is used by another storage node") from None
    except OSError as error:
        raise ConfigError(f"kv.directory: {path}: {error.strerror or error}") from None
    clock = SystemClock()
    try:
        node = StorageNode(name, address, directory, key, clock, _random_source())
    except zmq.ZMQError as error:
        directory.close()
        raise ConfigError(f"{address}: cannot listen there: {error.strerror}") from None
    others = dict(options.erasure.nodes)
    # It may listen on all interfaces; others need the address of one.
    reached_at = others.pop(name, node.address)
    node.meet(name, reached_at)
    if is_over is not None:
        node.every(_LOOK_S, lambda: node.stop() if is_over() else None)
    with contextlib.ExitStack() as stack:
        if metadata:
            stack.callback(_announce(node, reached_at, metadata, key).close)
        else:
            greeter = Greeter(name, reached_at, others, key)
            node.every(Greeter.every_s, greeter.greet)
            stack.callback(greeter.close)
        print_ready("storage", node.address)
        node.run()


def _announce(
    node: "StorageNode", address: str, metadata: str, key: ClusterKey | None
) -> Announcer:
    """Have a storage node and the metadata node hear of each other again and again."""
    here = Here(0, "storage", node.name, address, os.getpid())
    announcer = Announcer(metadata, here, key, SystemClock())

    def beat() -> None:
        for found in announcer.beat(node.numbers()):
            if found.role == "storage":
                node.meet(found.name, found.address)

    beat()
    node.every(Announcer.every_s, beat)
    return announcer


def _random_source() -> random.Random:
    """For names that no other process has given; seeded by the system."""
    return random.Random(secrets.token_bytes(32))


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
                "(kv.address) or another directory"
            )
        yield
