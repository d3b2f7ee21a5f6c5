"""A worker's end of the line to the process that owns the host tier.

Calls are posted from any thread and answered by callbacks on threads of the link; none of them
waits for the other process. Payloads are checked here, on their last way: what is handed on was
copied out of shared memory first and then checked, so nothing that happens to the memory later can
change it.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import zmq

from serving.clock import Clock
from serving.core.kv_transfer import KVRead
from serving.core.prefix_transfer import StagedPrefix
from serving.kv import wire
from serving.kv.cluster_key import ClusterKey
from serving.kv.host_tier import Place, SharedArena, StalePlaceError
from serving.kv.key_bytes import join_keys
from serving.kv.offload import (
    CacheCall,
    CacheReply,
    FetchPrefix,
    OfferPrefix,
    PrefixFetched,
    PrefixWanted,
    StorePrefix,
)
from serving.kv.store import (
    HEADER_SIZE,
    CorruptPayloadError,
    Header,
    Name,
    PayloadForm,
    PayloadKind,
    decode,
    encode_into,
    tenant_id,
)

_log = logging.getLogger(__name__)

_COPY_THREADS = 2
_CALLS_MAX = 4096
"""Calls that may be unanswered; the oldest is forgotten for a new one."""

Reply = Callable[[CacheReply], None]


class CacheLink:
    """Carries calls to the cache at `address`, which has the same key, if any.

    Start it with `start`, end it with `close`.
    """

    def __init__(
        self, address: str, form: PayloadForm, clock: Clock, key: ClusterKey | None = None
    ) -> None:
        self.address = address
        self._form = form
        self._clock = clock
        self._loop = wire.Loop(clock)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = wire.connect(self._context, address, key)
        self._loop.listen(self._socket, self._receive)
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[CacheCall, Reply]] = {}
        self._arenas: dict[str, SharedArena] = {}
        self._arena_lock = threading.Lock()
        self._copiers = ThreadPoolExecutor(_COPY_THREADS, "kv-copy")
        self._thread = threading.Thread(target=self._loop.run, name="kv-link", daemon=True)

    def start(self) -> None:
        """Begin to carry calls."""
        self._thread.start()

    def close(self) -> None:
        """Give up all calls and let go of shared memory."""
        self._loop.stop()
        self._thread.join()
        self._copiers.shutdown()
        self._socket.close()
        self._context.term()
        for arena in self._arenas.values():
            arena.close()

    def call(self, call: CacheCall, reply: Reply) -> None:
        """Make a call; `reply` is called with what comes back, on another thread, or never."""
        self._loop.post(lambda: self._begin(call, reply))

    def _begin(self, call: CacheCall, reply: Reply) -> None:
        number = next(self._numbers)
        self._calls[number] = (call, reply)
        if len(self._calls) > _CALLS_MAX:
            del self._calls[next(iter(self._calls))]
        match call:
            case FetchPrefix():
                keys = join_keys(call.keys)
                tenant = tenant_id(call.salt)
                message = wire.Fetch(number, keys, call.first, call.num_usable, tenant)
                message.has_state, message.request = call.has_state, call.request_id
            case OfferPrefix():
                message = wire.Offer(number, join_keys(call.keys))
            case StorePrefix():
                names = _items(call, self._form)
                items = [(kind, key, HEADER_SIZE + size) for (kind, key), size in names]
                message = wire.Reserve(number, items, tenant_id(call.salt))
        if not self._send(message):
            del self._calls[number]

    def _send(self, message: wire.Message) -> bool:
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode(frames[-1])
        except msgspec.MsgspecError as error:
            _log.warning("a message that is none: %s", error)
            return
        if not isinstance(message, wire.Fetched | wire.Wanted | wire.Reserved):
            return
        call, reply = self._calls.pop(message.call, (None, None))
        if reply is None:
            # Given up: what is pinned for it is of no use.
            if isinstance(message, wire.Fetched) and message.num_blocks:
                self._send(wire.Release(message.lease))
            return
        match call, message:
            case FetchPrefix(), wire.Fetched():
                if message.num_blocks:
                    self._copiers.submit(self._copy, call, message, reply)
                else:
                    reply(PrefixFetched(call.request_id, None, message.error))
            case OfferPrefix(), wire.Wanted():
                blocks = tuple(call.keys[index] for index in message.blocks)
                reply(PrefixWanted(call.offer_id, blocks, message.has_state))
            case StorePrefix(), wire.Reserved():
                self._copiers.submit(self._fill, call, message)
            case _:
                _log.warning("%s answers %s", type(message).__name__, type(call).__name__)

    def _arena(self, path: str, size: int) -> SharedArena:
        with self._arena_lock:
            arena = self._arenas.get(path)
            if arena is None:
                # The other side was started anew, so what it had before is gone.
                for old in self._arenas.values():
                    old.close()
                self._arenas.clear()
                arena = self._arenas[path] = SharedArena.attach(Path(path), size)
            return arena

    def _copy(self, call: FetchPrefix, message: wire.Fetched, reply: Reply) -> None:
        """Copy and check payloads that are pinned, then let them go."""
        corrupt: list[tuple[int, bytes]] = []
        prefix, error = None, None
        try:
            prefix = self._stage(call, message, corrupt)
        except (OSError, StalePlaceError, CorruptPayloadError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            _log.warning("a stored prefix is not used: %s", error)
        self._loop.post(lambda: self._release(message.lease, corrupt))
        reply(PrefixFetched(call.request_id, prefix, error))

    def _release(self, lease: int, corrupt: list[tuple[int, bytes]]) -> None:
        self._send(wire.Release(lease, corrupt))

    def _stage(
        self, call: FetchPrefix, message: wire.Fetched, corrupt: list[tuple[int, bytes]]
    ) -> StagedPrefix:
        arena = self._arena(message.arena, message.arena_size)
        keys, form = call.keys[: message.num_blocks], self._form
        # Blocks that are present may reach further than the last state.
        first = min(call.first, len(keys))
        if len(message.blocks) != len(keys) - first or (call.has_state and message.state is None):
            raise ValueError(f"{len(message.blocks)} places for {len(keys) - first} blocks")
        size = HEADER_SIZE + sum(form.group_bytes)
        blocks = np.empty((len(message.blocks), size), np.uint8)
        names = [Name(PayloadKind.BLOCK, key) for key in keys[first:]]
        wanted = list(zip(names, message.blocks, blocks, strict=True))
        state = None
        if message.state is not None:
            state = np.empty(HEADER_SIZE + form.state_bytes, np.uint8)
            wanted.append((Name(PayloadKind.STATE, keys[-1]), message.state, state))
        problems: list[CorruptPayloadError] = []
        for name, span, target in wanted:
            try:
                self._take(arena, span, name, target)
            except CorruptPayloadError as problem:
                # All that is damaged is to be forgotten, not one payload at each try.
                problems.append(problem)
                corrupt.append((int(name.kind), name.key))
        if problems:
            raise problems[0]
        groups: list[np.ndarray] = []
        start = HEADER_SIZE
        for group_bytes in form.group_bytes:
            groups.append(blocks[:, start : start + group_bytes])
            start += group_bytes
        body = None if state is None else state[HEADER_SIZE:]
        return StagedPrefix(keys, first, tuple(groups), body)

    def _take(
        self,
        arena: SharedArena,
        span: wire.Span,
        name: Name,
        target: np.ndarray,
    ) -> None:
        """Copy a payload and check the copy."""
        place = Place(*span)
        source = arena.payload(place)
        if len(source) != len(target):
            raise CorruptPayloadError(f"{name} has {len(source)} bytes; expected {len(target)}")
        target[:] = np.frombuffer(source, np.uint8)
        source.release()
        arena.check(place)
        decode(target.data, name, self._form.layout)

    def _fill(self, call: StorePrefix, message: wire.Reserved) -> None:
        """Write payloads into the places that were reserved for them."""
        try:
            arena = self._arena(message.arena, message.arena_size)
            written_s, tenant = self._clock.unix_s(), tenant_id(call.salt)
            for index, ((name, size), span) in enumerate(
                zip(_items(call, self._form), message.places, strict=True)
            ):
                if span is None:
                    continue
                header = Header(name, self._form.layout, tenant, written_s, size)
                target = arena.payload(Place(*span))
                encode_into(target, header, _parts(call.read, index))
                target.release()
        except (OSError, StalePlaceError, ValueError) as error:
            _log.warning("what was computed is not kept: %s", error)
            return
        self._loop.post(lambda: self._commit(message.write))

    def _commit(self, write: int) -> None:
        self._send(wire.Commit(write))


def _items(call: StorePrefix, form: PayloadForm) -> list[tuple[Name, int]]:
    """The payloads of a call, and the sizes of their bodies."""
    size = sum(form.group_bytes)
    items = [(Name(PayloadKind.BLOCK, key), size) for key in call.blocks]
    if call.state is not None:
        items.append((Name(PayloadKind.STATE, call.state), form.state_bytes))
    return items


def _parts(read: KVRead, index: int) -> list[memoryview]:
    """The body of the payload `index`: a block's layer groups, or a state."""
    num_blocks = len(read.groups[0]) if read.groups else 0
    if index < num_blocks:
        return [np.ascontiguousarray(group[index]).data for group in read.groups]
    return [np.ascontiguousarray(read.states[index - num_blocks]).data]
