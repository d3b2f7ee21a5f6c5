"""The frontend as a node: turns calls of HTTP tasks into messages, and messages into streams.

One `TokenStream` belongs to one HTTP call and carries the requests of that call (several when a
completions call has several prompts). Deltas that arrive while the reader is busy are merged, so
a reader gets everything that happened since its last look in one piece. What waits for a reader
is bounded: a reader that falls too far behind is cut off and its requests are aborted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.clock import Clock, s_of_ns
from serving.core.profiling import ProfileCapture, ProfileRefusal
from serving.core.request import FinishReason, Request, TokenDelta, TokenLogprob
from serving.frontend.errors import ApiError, bad_request, unavailable
from serving.nodes import messages
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.node import NodeId, Outbox
from serving.observe import ServiceMetrics

_log = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 1.0
TRACE_WRITING_S = 90.0
"""How long a worker may take for a trace after its last step."""


class Update(msgspec.Struct):
    """What happened to the call's request number `index` since the reader's last look.

    `logprobs` are those of `token_ids`, if they were asked for. A struct because one is made for
    nearly every token.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] = []  # noqa: RUF012 - each struct has a list of its own


class TokenStream:
    """The answers to the requests of one HTTP call. Made by `Gateway.open`.

    `cut_off` is the error of a reader that fell too far behind; `on_cut_off` is called then.
    `on_end` is called for each request when it ends, whatever the reader has read.
    """

    def __init__(self, gateway: "Gateway", requests: Sequence[Request]) -> None:
        self._gateway = gateway
        self._requests = requests
        self._pending: dict[int, Update] = {}
        self._num_pending_tokens = 0
        self._num_admitted = 0
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._wait_start_s = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self.on_cut_off: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self.cut_off: ApiError | None = None

    async def admitted(self) -> None:
        """Waits until every request is queued.

        Raises:
            ApiError: one was refused, or nobody answered in time.
        """
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_S):
                while self._num_admitted < len(self._requests):
                    self._raise_error()
                    await self._wait()
        except TimeoutError:
            raise unavailable("No worker answered in time") from None
        self._raise_error()

    async def next(self, wait_s: float | None = None) -> list[Update]:
        """What happened since the last call, one entry per request concerned; waits for news.

        Nothing, if `wait_s` passes without any.

        Raises:
            ApiError: the requests ended by a fault of the service.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not await self._wait(wait_s):
                break
        pending, self._pending = self._pending, {}
        self._num_pending_tokens = 0
        return list(pending.values())

    def end(self, index: int) -> None:
        """The caller needs no more of request `index`, a stop string having ended its text."""
        self._gateway.release(self._requests[index].request_id, FinishReason.STOP)

    def close(self) -> None:
        """The caller is done; whatever still runs is aborted. May be called twice."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        for request in self._requests:
            self._gateway.release(request.request_id, FinishReason.ABORT)

    def put(self, index: int, delta: TokenDelta, backlog_max: int) -> bool:
        """Adds a delta; False when the reader has fallen too far behind."""
        token_ids, update = delta.token_ids, self._pending.get(index)
        if update is None:
            update = self._pending[index] = Update(index, list(token_ids))
        else:
            update.token_ids.extend(token_ids)
        if delta.logprobs:
            update.logprobs.extend(delta.logprobs)
        update.finish_reason = delta.finish_reason
        update.num_cached_tokens = delta.num_cached_tokens
        self._num_pending_tokens += len(token_ids)
        self._wake()
        return self._num_pending_tokens <= backlog_max

    def admit_one(self) -> None:
        """Counts one queued request."""
        self._num_admitted += 1
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with `error` after what is already pending."""
        self._error = self._error or error
        self._wake()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self, wait_s: float | None = None) -> bool:
        """Whether news came before the time was over."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        if wait_s is not None:
            # One timer for many waits: most of them are short, and tokens pass here often.
            self._wait_start_s = loop.time()
            if self._silence is None:
                self._silence = loop.call_later(wait_s, self._on_silence, wait_s)
        try:
            return await waiter
        finally:
            self._waiter = None

    def _on_silence(self, wait_s: float) -> None:
        """Ends the wait if it has lasted as long as that; looks again later if there is none."""
        self._silence = None
        loop = asyncio.get_running_loop()
        left_s = self._wait_start_s + wait_s - loop.time()
        if self._waiter is None or left_s > 0:
            delay_s = left_s if left_s > 0 else wait_s
            self._silence = loop.call_later(delay_s, self._on_silence, wait_s)
        else:
            _resolve(self._waiter, False)

    def _wake(self) -> None:
        if self._waiter is not None:
            _resolve(self._waiter, True)


def _resolve(waiter: asyncio.Future[bool], has_news: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_news)


@dataclass(slots=True)
class _Open:
    """A request under way, with what its latencies are measured from."""

    request: Request
    stream: TokenStream
    index: int
    last_token_ns: int | None = None


class Gateway:
    """The frontend node.

    Args:
        worker: where requests go.
        flush: performs this node's effects; called after every call that is no message.
        on_drain: called when draining begins.
        backlog_tokens_max: tokens that may wait for one reader.
    """

    def __init__(
        self,
        node_id: NodeId,
        worker: NodeId,
        clock: Clock,
        metrics: ServiceMetrics,
        backlog_tokens_max: int,
    ) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self.metrics = metrics
        self.flush: Callable[[NodeId], None] = lambda _: None
        self.is_draining = False
        self.on_drain: Callable[[], object] = lambda: None
        self._worker = worker
        self._clock = clock
        self._backlog_tokens_max = backlog_tokens_max
        self._open: dict[str, _Open] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._num_queries = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def worker(self) -> NodeId:
        """Where requests go."""
        return self._worker

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    def open(self, requests: Sequence[Request]) -> TokenStream:
        """Submits the requests of one call.

        Raises:
            ApiError: 503, the server is draining.
        """
        if self.is_draining:
            raise unavailable("The server is shutting down")
        stream = TokenStream(self, requests)
        self._idle.clear()
        for index, request in enumerate(requests):
            self._open[request.request_id] = _Open(request, stream, index)
            self.outbox.send(self._worker, messages.Submit(request))
        self.flush(self.node_id)
        return stream

    def release(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request that nobody reads any more; no effect on one that has ended."""
        entry = self._forget(request_id, reason.value)
        if entry is not None:
            self.outbox.send(self._worker, messages.Abort(request_id))
            self.flush(self.node_id)

    async def status(self) -> messages.WorkerStatus | None:
        """The worker's gauges, None when it does not answer in time."""
        return await self._ask(messages.QueryStatus, STATUS_TIMEOUT_S)

    async def profile(
        self, num_steps: int, timeout_s: float
    ) -> ProfileCapture | ProfileRefusal | None:
        """A trace of the worker's next steps, None when it does not answer in time."""

        def query(query_id: int) -> Message:
            return messages.Profile(query_id, num_steps, timeout_s)

        profiled = await self._ask(query, timeout_s + TRACE_WRITING_S)
        return None if profiled is None else profiled.result

    async def _ask(self, query: Callable[[int], Message], timeout_s: float) -> Any:
        """The answer to a query that is made with a number of its own; None if there is none."""
        self._num_queries += 1
        query_id = self._num_queries
        future = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        self.outbox.send(self._worker, query(query_id))
        self.flush(self.node_id)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._queries[query_id]

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests and waits for those under way; ends the rest at the limit."""
        self.is_draining = True
        self.on_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for request_id, entry in list(self._open.items()):
                entry.stream.fail(unavailable("The server shut down before the answer ended"))
                self.release(request_id, FinishReason.ABORT)

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message; those for requests that have ended are ignored."""
        match message:
            case messages.Tokens(deltas):
                now_ns = self._clock.now_ns()
                for delta in deltas:
                    self._on_delta(delta, now_ns)
            case messages.Admitted(request_id):
                entry = self._open.get(request_id)
                if entry is not None:
                    self.metrics.num_requests += 1
                    entry.stream.admit_one()
            case messages.Refused(request_id, reason, detail, param):
                entry = self._forget(request_id, None)
                if entry is not None:
                    self.metrics.num_refused += 1
                    entry.stream.fail(_error_of_refusal(reason, detail, param))
            case messages.Failed(request_id, detail):
                entry = self._forget(request_id, FinishReason.ERROR.value)
                if entry is not None:
                    # What broke is for the operator: it may speak of other people's requests.
                    _log.error("request %s ended by a fault: %s", request_id, detail)
                    entry.stream.fail(
                        ApiError(500, f"The engine failed; the log has more under {request_id}")
                    )
            case messages.WorkerStatus(query_id) | messages.Profiled(query_id):
                future = self._queries.get(query_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                pass

    def on_timer(self, name: str) -> None:
        """This node sets no timers: its waits are those of HTTP tasks, which have their own."""

    def _on_delta(self, delta: TokenDelta, now_ns: int) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        self._measure(entry, delta, now_ns)
        if delta.finish_reason is not None:
            self._forget(delta.request_id, delta.finish_reason.value)
        if delta.finish_reason is FinishReason.ERROR:
            constraint = entry.request.constraint
            param = None if constraint is None else constraint.param
            entry.stream.fail(bad_request(delta.error or "The request failed", param))
            return
        if not entry.stream.put(entry.index, delta, self._backlog_tokens_max):
            limit = self._backlog_tokens_max
            entry.stream.cut_off = ApiError(500, f"More than {limit} tokens waited for the reader")
            entry.stream.fail(entry.stream.cut_off)
            entry.stream.close()
            entry.stream.on_cut_off()

    def _measure(self, entry: _Open, delta: TokenDelta, now_ns: int) -> None:
        metrics = self.metrics
        num_tokens = len(delta.token_ids)
        if num_tokens:
            metrics.num_generated_tokens += num_tokens
            if entry.last_token_ns is None:
                metrics.first_token_s.observe(s_of_ns(now_ns - entry.request.arrival_ns))
                if not entry.request.sample_index:
                    metrics.num_prompt_tokens += len(entry.request.prompt_token_ids)
                    metrics.num_cached_tokens += delta.num_cached_tokens
            else:
                gap_s = s_of_ns(now_ns - entry.last_token_ns)
                metrics.inter_token_s.observe(gap_s / num_tokens, num_tokens)
            entry.last_token_ns = now_ns

    def _forget(self, request_id: str, reason: str | None) -> _Open | None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.stream.on_end()
        if entry is not None and reason is not None:
            self.metrics.add_finished(reason)
            duration_ns = self._clock.now_ns() - entry.request.arrival_ns
            self.metrics.request_s.observe(s_of_ns(duration_ns))
        if not self._open:
            self._idle.set()
        return entry


def _error_of_refusal(reason: RefusalReason, detail: str, param: str | None) -> ApiError:
    match reason:
        case RefusalReason.INVALID:
            return bad_request(detail, param)
        case RefusalReason.BUSY:
            return ApiError(429, detail, code="queue_full", retry_after_s=1)
        case RefusalReason.UNAVAILABLE:
            _log.warning("a request was refused: %s", detail)
            return unavailable("The engine has failed; the log has more")
