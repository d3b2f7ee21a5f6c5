"""The KV tiers of an engine that runs in its caller's loop, as offline generation does.

The rules are those of a server's worker (`nodes/kv_offload.py`): what that wants done is done here
between two steps, on the caller's thread, which answers of the tiers reach through a queue. What is
stored of a request is asked for a little ahead of the engine, so that it comes while others are
computed.
"""

import contextlib
import dataclasses
import json
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from serving.clock import Clock
from serving.config import ClusterOptions, KVOptions
from serving.core.grammar import Grammar
from serving.core.request import Request, TokenDelta
from serving.core.step_plan import StepPlan
from serving.engine.engine import Engine, Executor, run_step
from serving.engine.kv_moves import TransferExecutor
from serving.engine.mesh_engine import MeshEngine
from serving.kv.link import CacheLink
from serving.kv.offload import CachePort, CacheReply, OffloadLimits, OffloadStatus
from serving.kv.store import PayloadForm
from serving.kv_process import CacheProcess, ask
from serving.kv_storage import read_key
from serving.nodes.kv_offload import KVOffload
from serving.nodes.node import AskCache, Execute, Outbox, SetTimer
from serving.transport.driver import SystemClock

_AHEAD_MAX = 32
"""Requests that wait for their prefixes or in the engine; more are not asked for yet."""

_PAUSE_S = 0.05

Waiting = tuple[Request, Grammar | None]


class OfflineTiers:
    """Requests on their way to an engine, and prefixes on their way from and to the tiers.

    Args:
        executor: of the engine.
        cache: where calls go.
    """

    def __init__(
        self,
        engine: Engine,
        executor: TransferExecutor,
        cache: CachePort,
        limits: OffloadLimits,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._cache = cache
        self._clock = clock
        self._wait_ns = limits.wait_ns
        self._staged_bytes_max = limits.staged_bytes_max
        self._outbox = Outbox()
        self._offload = KVOffload(self._outbox, engine.transfers, limits, executor.move)
        self._replies: queue.SimpleQueue[CacheReply] = queue.SimpleQueue()
        self._due_ns: dict[str, int] = {}
        self._queued: deque[Waiting] = deque()
        self._fetching: dict[str, Waiting] = {}
        self._started: list[str] = []
        # For each read from the device the steps that are still before it.
        self._reading: deque[int] = deque()

    @property
    def has_requests(self) -> bool:
        """Whether a request has not come back from `ready` yet."""
        return bool(self._queued or self._fetching)

    def add(self, requests: Iterable[Waiting]) -> None:
        """Take checked requests; those of a smaller priority come first."""
        self._queued.extend(sorted(requests, key=lambda waiting: waiting[0].priority))

    def drop(self) -> None:
        """Forget all requests."""
        for request_id in self._fetching:
            self._offload.forget(request_id)
        self._queued.clear()
        self._fetching.clear()

    def ready(self) -> list[Waiting]:
        """The requests that may be admitted now. Waits a little if there is nothing else to do."""
        ready: list[Waiting] = []
        num_waiting = self._engine.status().num_waiting
        while self._queued and len(self._fetching) + num_waiting + len(ready) < _AHEAD_MAX:
            if self._engine.transfers.num_staged_bytes >= self._staged_bytes_max:
                break
            waiting = self._queued.popleft()
            if self._offload.fetch(waiting[0]):
                self._fetching[waiting[0].request_id] = waiting
            else:
                ready.append(waiting)
            self._perform()
        is_idle = not (ready or self._engine.has_work)
        self._poll(_PAUSE_S if is_idle else 0.0)
        started, self._started = self._started, []
        return ready + [self._fetching.pop(name) for name in started if name in self._fetching]

    def after_step(self) -> None:
        """Offer what became usable in a step that was committed."""
        self._offload.offer_kept()
        self._perform()
        self._poll(0.0)
        self._reading = deque(num_steps - 1 for num_steps in self._reading)
        self._collect()

    def settle(self) -> None:
        """Wait until everything that was offered is handed over, as long as for a prefix."""
        deadline_ns = self._clock.now_ns() + self._wait_ns
        while self._offload.num_offers and self._clock.now_ns() < deadline_ns:
            self._poll(_PAUSE_S)
            self._collect()

    def status(self) -> OffloadStatus:
        """Counts since the start."""
        return self._offload.status()

    def _collect(self) -> None:
        """Hand over what was read, where no step is waited for."""
        is_idle = not self._engine.status().num_steps_in_flight
        while self._reading and (is_idle or self._reading[0] < 0):
            self._reading.popleft()
            self._offload.on_read(self._executor.collect_read())
            self._perform()

    def _poll(self, wait_s: float) -> None:
        """Take answers, waiting for the first one, and timers that are due."""
        with contextlib.suppress(queue.Empty):
            self._take(self._replies.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                self._take(self._replies.get_nowait())
        now_ns = self._clock.now_ns()
        for name in [name for name, due_ns in self._due_ns.items() if due_ns <= now_ns]:
            del self._due_ns[name]
            self._start(self._offload.on_timer(name))

    def _take(self, reply: CacheReply) -> None:
        self._start(self._offload.on_reply(reply))

    def _start(self, request_id: str | None) -> None:
        if request_id is not None:
            self._started.append(request_id)
        self._perform()

    def _perform(self) -> None:
        """Do what the rules ask for."""
        while effects := self._outbox.take():
            for effect in effects:
                match effect:
                    case AskCache(call):
                        self._cache.call(call, self._replies.put)
                    case SetTimer(name, delay_ns):
                        self._due_ns[name] = self._clock.now_ns() + delay_ns
                    case Execute(transfer):
                        assert not isinstance(transfer, StepPlan), "the rules plan no steps"
                        self._executor.move(transfer)
                        if transfer.is_reading:
                            self._reading.append(self._engine.status().num_steps_in_flight)
                    case _:
                        raise AssertionError(f"{effect} is nothing that the rules ask for")


def run_requests(
    engine: Engine | MeshEngine,
    executor: Executor,
    requests: Sequence[Waiting],
    tiers: OfflineTiers | None,
) -> Iterator[TokenDelta]:
    """Run checked requests to their ends, each with its stored prefix where there are tiers."""
    if tiers is None:
        for request, grammar in requests:
            engine.admit(request, grammar)
        while engine.has_work:
            yield from run_step(engine, executor)
        return
    tiers.add(requests)
    while engine.has_work or tiers.has_requests:
        for request, grammar in tiers.ready():
            engine.admit(request, grammar)
        yield from run_step(engine, executor)
        tiers.after_step()
    tiers.settle()


def kv_arguments(kv: KVOptions, cluster: ClusterOptions) -> list[str]:
    """The options of a cache process with this configuration."""
    values = {f"kv.{name}": value for name, value in dataclasses.asdict(kv).items()}
    values["cluster.key_file"] = cluster.key_file
    changes = [f"{name}={_as_toml(value)}" for name, value in values.items()]
    return [part for change in changes for part in ("--set", change)]


def _as_toml(value: object) -> str:
    """A value of a configuration on one line; other than tables they look as in JSON."""
    if not isinstance(value, Mapping):
        return json.dumps(value)
    table = cast(Mapping[str, object], value)
    return "{" + ", ".join(f"{json.dumps(k)} = {_as_toml(v)}" for k, v in table.items()) + "}"


@contextlib.contextmanager
def open_link(kv: KVOptions, cluster: ClusterOptions, form: PayloadForm) -> Iterator[CacheLink]:
    """A line to the cache process at `kv.address`, or to one of its own, which ends with it.

    Raises:
        ConfigError: it does not answer, or has ended.
    """
    key = read_key(cluster.key_file)
    with contextlib.ExitStack() as stack:
        address = kv.address
        if address:
            ask(address, "stats", timeout_s=5.0, key=key)
        else:
            process = CacheProcess(kv, kv_arguments(kv, cluster), key)
            stack.callback(process.stop)
            process.wait_until_ready()
            address = process.address
        link = CacheLink(address, form, SystemClock(), key)
        link.start()
        stack.callback(link.close)
        yield link
