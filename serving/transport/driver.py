"""Performs the effects of nodes under asyncio, and reads the system's clock for everybody.

All nodes live on the event loop's thread. Each executor has one thread of its own: it takes a
plan, submits it, waits for its result and posts that back to the loop. Of the effects of one call
the execution comes first, so the device starts before tokens travel. Slow work that nodes ask for
is done by a few threads of its own.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from serving.core.kv_transfer import KVTransfer
from serving.core.request import RequestError
from serving.core.step_plan import StepPlan
from serving.engine.engine import Executor
from serving.engine.kv_moves import TransferExecutor
from serving.kv.offload import CachePort, CacheReply
from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import (
    AskCache,
    Compute,
    Connect,
    Execute,
    Node,
    NodeId,
    Quit,
    Send,
    SetTimer,
    Trace,
)
from serving.observe import SpanNote
from serving.transport.in_process import InProcessNetwork

_log = logging.getLogger(__name__)

_COMPUTE_THREADS = 3
"""One of them may wait for the steps of a trace."""

_THREAD_WAIT_S = 5.0
"""How long a job waits for one of them: jobs that were given up keep theirs to their ends."""


class SystemClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.monotonic_ns()

    def unix_s(self) -> int:
        """Whole seconds since 1970."""
        return int(time.time())


def unix_offset_ns() -> int:
    """What to add to the monotonic clock for nanoseconds since 1970."""
    return time.time_ns() - time.monotonic_ns()


Post = Callable[[NodeId, Message], None]


class Remote(Protocol):
    """The way to nodes of other processes."""

    def send(self, source: NodeId, destination: NodeId, message: Message) -> bool:
        """Sends without waiting; False if that is not possible now."""
        ...

    def connect(self, node_id: NodeId, address: str) -> None:
        """Says where a node is."""
        ...


class Driver:
    """Runs nodes on the current event loop.

    Args:
        nodes: every node of this process.
        executors: the executor of each node that has one.
        caches: the way to the KV tiers of each node that has one.

    Attributes:
        remote: the way to other processes; None if there are none.
        on_quit: called with the reason when a node asks for the end of this process.
        on_trace: takes the spans of nodes.

    Use as an async context manager: threads start on entry and end on exit.
    """

    def __init__(
        self,
        nodes: list[Node],
        executors: Mapping[NodeId, Executor],
        caches: Mapping[NodeId, CachePort] | None = None,
    ) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._network = InProcessNetwork(self._deliver)
        self._executors = executors
        self._caches = caches or {}
        self.remote: Remote | None = None
        self.on_quit: Callable[[str], object] = _log.error
        self.on_trace: Callable[[SpanNote], object] = lambda _: None
        self._threads: dict[NodeId, _ExecutorThreads] = {}
        self._timers: dict[tuple[NodeId, str], asyncio.TimerHandle] = {}
        self._computing: set[asyncio.Task[None]] = set()
        self._compute_threads = ThreadPoolExecutor(_COMPUTE_THREADS, "compute")

    async def __aenter__(self) -> "Driver":
        loop = asyncio.get_running_loop()
        for node_id, executor in self._executors.items():
            thread = _ExecutorThreads(executor, loop, self._on_completion, node_id)
            self._threads[node_id] = thread
            thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for handle in self._timers.values():
            handle.cancel()
        for task in list(self._computing):
            task.cancel()
        self._compute_threads.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads.values():
            thread.stop()

    def perform(self, node_id: NodeId) -> None:
        """Performs what a node has in its outbox; for calls that did not come as messages."""
        effects = self._nodes[node_id].outbox.take()
        loop = asyncio.get_running_loop()
        for effect in effects:
            if isinstance(effect, Execute):
                self._threads[node_id].put(effect.plan)
        for effect in effects:
            match effect:
                case Send(destination, message):
                    self._network.send(node_id, destination, message)
                case SetTimer(name, delay_ns):
                    self._set_timer(node_id, name, delay_ns)
                case Compute():
                    task = asyncio.get_running_loop().create_task(self._compute(node_id, effect))
                    self._computing.add(task)
                    task.add_done_callback(self._computing.discard)
                case AskCache(call):
                    self._caches[node_id].call(call, partial(self._on_cache_reply, node_id, loop))
                case Connect(other, address):
                    if self.remote is not None:
                        self.remote.connect(other, address)
                case Quit(detail):
                    self.on_quit(detail)
                case Trace(note):
                    self.on_trace(note)
                case Execute():
                    pass

    def deliver(self, source: NodeId, destination: NodeId, message: Message) -> None:
        """Takes a message that came from another process."""
        if destination in self._nodes:
            self._network.send(source, destination, message)
        else:
            _log.warning("message of %s to unknown node %s dropped", source, destination)

    def _deliver(self, source: NodeId, destination: NodeId, message: Message) -> None:
        node = self._nodes.get(destination)
        if node is None:
            self._send_away(source, destination, message)
            return
        try:
            node.on_message(source, message)
        except Exception as error:
            # A bug, not an outside failure: say so where it shows, and let the node give up
            # what it was doing rather than leave its clients waiting.
            _log.exception("%s failed on %s", destination, type(message).__name__)
            if not isinstance(message, messages.Crashed):
                crashed = messages.Crashed(f"{type(error).__name__}: {error}")
                self._network.send(destination, destination, crashed)
        self.perform(destination)

    def _send_away(self, source: NodeId, destination: NodeId, message: Message) -> None:
        if self.remote is not None and self.remote.send(source, destination, message):
            return
        _log.warning("%s from %s to %s dropped", type(message).__name__, source, destination)
        if source in self._nodes:
            undeliverable = messages.Undeliverable(destination, message)
            self._network.send(source, source, undeliverable)

    async def _compute(self, node_id: NodeId, effect: Compute) -> None:
        """Does slow work; a job that is given up runs to its end unheard, if it has begun."""
        value, error, is_busy = None, None, False
        loop, seconds = asyncio.get_running_loop(), effect.timeout_ns / 1e9
        wait_s = min(seconds, _THREAD_WAIT_S)
        has_begun = asyncio.Event()

        def job() -> object:
            loop.call_soon_threadsafe(has_begun.set)
            return effect.job()

        result = loop.run_in_executor(self._compute_threads, job)
        try:
            # The time of the job itself counts from its begin: it is not to blame for a queue.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(has_begun.wait(), wait_s)
            if not has_begun.is_set() and result.cancel():
                is_busy = True
                error = f"no thread was free for it within {wait_s:g} s; send it again later"
            else:
                value = await asyncio.wait_for(result, seconds)
        except TimeoutError:
            error = f"not finished within {seconds:g} s; make it simpler"
        except RequestError as refusal:
            error = str(refusal)
        except Exception as fault:
            _log.exception("job %s of %s failed", effect.key, node_id)
            error = f"{type(fault).__name__}: {fault}"
        finally:
            result.cancel()
        self._on_completion(node_id, messages.Computed(effect.key, value, error, is_busy))

    def _on_cache_reply(
        self, node_id: NodeId, loop: asyncio.AbstractEventLoop, reply: CacheReply
    ) -> None:
        # If the loop is closed, nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_completion, node_id, messages.CacheReplied(reply))

    def _on_completion(self, node_id: NodeId, message: Message) -> None:
        self._network.send(node_id, node_id, message)

    def _set_timer(self, node_id: NodeId, name: str, delay_ns: int) -> None:
        key = (node_id, name)
        old = self._timers.pop(key, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(delay_ns / 1e9, self._on_timer, node_id, name)

    def _on_timer(self, node_id: NodeId, name: str) -> None:
        self._timers.pop((node_id, name), None)
        self._nodes[node_id].on_timer(name)
        self.perform(node_id)


class _ExecutorThreads:
    """Run one executor's plans in order and post what came of them to the event loop.

    The threads are daemons: an executor that hangs must not keep the process from ending.
    """

    def __init__(
        self,
        executor: Executor,
        loop: asyncio.AbstractEventLoop,
        post: Post,
        node_id: NodeId,
    ) -> None:
        self._executor = executor
        self._loop = loop
        self._post = post
        self._node_id = node_id
        self._plans: queue.SimpleQueue[StepPlan | KVTransfer | None] = queue.SimpleQueue()
        self._submitted: queue.SimpleQueue[StepPlan | KVTransfer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"{name} {node_id}", daemon=True)
            for name, run in (("submit", self._submit), ("collect", self._collect))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, plan: StepPlan | KVTransfer) -> None:
        self._plans.put(plan)

    def stop(self) -> None:
        """Lets the running steps end, briefly, so that the runtime is not torn down under them."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _submit(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                if isinstance(plan, KVTransfer):
                    self._mover().move(plan)
                else:
                    self._executor.submit(plan)
            except Exception as error:
                self._fail(plan, error)
            else:
                if isinstance(plan, StepPlan) or plan.is_reading:
                    self._submitted.put(plan)
        self._submitted.put(None)

    def _collect(self) -> None:
        while (plan := self._submitted.get()) is not None:
            try:
                if isinstance(plan, KVTransfer):
                    message = messages.BlocksRead(self._mover().collect_read())
                else:
                    message = messages.StepDone(self._executor.collect())
            except Exception as error:
                self._fail(plan, error)
            else:
                self._tell(message)

    def _mover(self) -> TransferExecutor:
        assert isinstance(self._executor, TransferExecutor), "this executor moves no blocks"
        return self._executor

    def _fail(self, plan: StepPlan | KVTransfer, error: Exception) -> None:
        detail = f"{type(error).__name__}: {error}"
        if isinstance(plan, KVTransfer):
            # The cache that it was to write may be gone.
            _log.error("transfer %d failed", plan.transfer_id, exc_info=error)
            self._tell(messages.Crashed(detail))
            return
        _log.error("step %d failed", plan.step_index, exc_info=error)
        self._tell(messages.StepFailed(plan.step_index, detail))

    def _tell(self, message: Message) -> None:
        # If the loop is closed, nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._post, self._node_id, message)
