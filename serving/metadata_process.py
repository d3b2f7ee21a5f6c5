"""The process of the metadata node: a socket in front of services that answer messages.

A *service* says which messages are its own, takes them one at a time and leaves its answers; the
process carries them. The directory is one service, who is where (`kv/whereabouts.py`) another, and
the questions of operators are a third.
"""

import logging
import os
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Union, get_args

import lmdb
import msgspec
import zmq

from serving.clock import Clock, ns_of_s
from serving.kv import directory_calls, wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.directory import Directory, DirectoryTimes
from serving.kv.eviction import TenantLimits
from serving.kv.placements import PlacementFile
from serving.kv.tier_metrics import histogram_numbers
from serving.kv.whereabouts import Here, Whereabouts
from serving.kv_config import KVOptions
from serving.nodes.metadata_node import MetadataNode
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError

_log = logging.getLogger(__name__)

_TICK_S = 0.1


class Service(Protocol):
    """A part of the process."""

    def on_message(self, source: Hashable, message: Any) -> None:
        """Take a message of its own, or raise ValueError if it makes no sense."""
        ...

    def on_tick(self) -> None:
        """Time has passed."""
        ...

    def take_replies(self) -> Sequence[tuple[Hashable, msgspec.Struct]]:
        """Answers since the last call, with the sources they are for."""
        ...


class MetadataProcess:
    """Serves on a socket.

    Args:
        address: where to listen.
        services: each with the messages that it takes; no two take the same.
        key: what those must have who are answered; None answers everybody.

    Raises:
        zmq.ZMQError: it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[tuple[Service, Sequence[type[msgspec.Struct]]]],
        clock: Clock,
        key: ClusterKey | None = None,
    ) -> None:
        self._context, self._socket = wire.bind(address, key)
        self._services = [service for service, _ in services]
        self._by_type = {kind: service for service, kinds in services for kind in kinds}
        self._decoder = msgspec.msgpack.Decoder(Union[tuple(self._by_type)])  # noqa: UP007
        self._loop = wire.Loop(clock)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.listen(self._socket, self._receive)
        self._loop.every(_TICK_S, self._tick)

    def run(self) -> None:
        """Serve until asked to stop."""
        self._loop.run()
        self._socket.close()
        self._context.term()

    def stop(self) -> None:
        """Let `run` return; from any thread."""
        self._loop.stop()

    def stop_when(self, condition: Callable[[], bool]) -> None:
        """Look now and then whether `run` is to return; before that."""
        self._loop.every(_TICK_S, lambda: self.stop() if condition() else None)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = self._decoder.decode(frames[-1])
            service = self._by_type[type(message)]
            service.on_message(frames[0], message)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.warning("a message that is none: %s", error)
            return
        self._send(service)

    def _tick(self) -> None:
        for service in self._services:
            service.on_tick()
            self._send(service)

    def _send(self, service: Service) -> None:
        for source, reply in service.take_replies():
            assert isinstance(source, bytes), source
            self._socket.send_multipart([source, wire.encode(reply)])


class Administration:
    """Answers `stats` and `stop`."""

    def __init__(self, node: MetadataNode) -> None:
        self._node = node
        self._replies: list[tuple[Hashable, msgspec.Struct]] = []
        self.on_stop: Callable[[], None] | None = None

    def on_message(self, source: Hashable, message: wire.Ask) -> None:
        """Answer a question."""
        match message.what:
            case "stats":
                answer = wire.Answer(message.call, numbers_of(self._node))
            case "stop" if self.on_stop is not None:
                self.on_stop()
                answer = wire.Answer(message.call)
            case _:
                error = f"{message.what!r} is not for a metadata node; expected stats or stop"
                answer = wire.Answer(message.call, error=error)
        self._replies.append((source, answer))

    def on_tick(self) -> None:
        """Nothing waits."""

    def take_replies(self) -> Sequence[tuple[Hashable, msgspec.Struct]]:
        """Answers since the last call."""
        replies, self._replies = self._replies, []
        return replies


def numbers_of(node: MetadataNode) -> dict[str, float | int]:
    """What the directory holds and has done since its start, under names."""
    directory = node.directory
    numbers: dict[str, float | int] = {
        f"directory_{key.removeprefix('num_')}": value
        for key, value in asdict(directory.counts).items()
    }
    numbers |= histogram_numbers("directory_evicted_age_seconds", directory.index.evicted_age_s)
    return numbers | {
        "directory_epoch": directory.epoch,
        "directory_payloads": len(directory),
        "directory_segments": len(directory.index.segments),
        "directory_bytes": directory.index.num_bytes,
        "directory_evicted": directory.index.num_evicted,
        "directory_leases": directory.num_leases,
        "directory_writes": directory.num_writes,
        "directory_doomed": directory.num_doomed,
        "directory_failed_records": node.num_failed_records,
    }


def run_metadata(
    options: KVOptions,
    name: str,
    address: str,
    ready: Callable[[str], None],
    key: ClusterKey | None = None,
    limits: Mapping[bytes, TenantLimits] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> None:
    """Serve the directory of a store, and who is where, until asked to stop or until `is_over`.

    `ready` is told the address. `limits` are those of single tenants.

    Raises:
        ConfigError: the folder or the address cannot be used.
    """
    folder = Path(options.directory).expanduser() / f"metadata-{name}"
    clock, lease_ns = SystemClock(), ns_of_s(options.lease_s)
    try:
        log = PlacementFile(folder)
    except OSError as error:
        raise ConfigError(f"kv.directory: {folder}: {error}") from None
    try:
        directory = Directory(
            secrets.randbits(31),
            options.disk_bytes,
            options.tenant_bytes,
            options.ttl_s,
            DirectoryTimes(lease_ns, lease_ns, lease_ns),
        )
        for tenant, own in (limits or {}).items():
            directory.index.limit(tenant, own)
        node = MetadataNode(directory, log, clock)
        administration = Administration(node)
        whereabouts = Whereabouts(Here(0, "metadata", name, address, os.getpid()), clock)
        process = MetadataProcess(
            address,
            [
                (node, get_args(directory_calls.Call)),
                (administration, [wire.Ask]),
                (whereabouts, [Here]),
            ],
            clock,
            key,
        )
        administration.on_stop = process.stop
        if is_over is not None:
            process.stop_when(is_over)
        ready(process.address)
        process.run()
    except zmq.ZMQError as error:
        raise ConfigError(f"{address}: cannot listen there: {error.strerror}") from None
    except lmdb.Error as error:
        raise ConfigError(f"kv.directory: {folder}: {error}") from None
    finally:
        log.close()
