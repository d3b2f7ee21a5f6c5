"""What a call costs its tenant: quotas before, a place in the queue, a usage record after.

A call opens an account, which reserves what it may take. Once the engine has accepted it, a record
exists; when it ends, whatever the end, the record is completed and what was reserved is corrected.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, replace

from serving.clock import NS_PER_S, Clock, s_of_ns
from serving.config import PriceOptions
from serving.core.request import FinishReason, Request
from serving.frontend.auth import Principal
from serving.frontend.errors import ApiError, bad_request, unavailable
from serving.frontend.fair_queue import FairQueue, Place
from serving.frontend.gateway import Update
from serving.frontend.logs import CALLS
from serving.frontend.protocols import Call
from serving.frontend.quota import Quotas
from serving.frontend.tracing import CallSpan, Tracer
from serving.frontend.usage import OPEN, UsageLog, UsageRecord
from serving.observe import ServiceMetrics

_PROGRESS_NS = NS_PER_S

_WORST_FIRST = ("error", "abort", "length", "stop")


class Accounting:
    """Opens an account for each call. Without a `usage` log nothing is recorded."""

    def __init__(
        self,
        quotas: Quotas,
        queue: FairQueue,
        usage: UsageLog | None,
        model: str,
        clock: Clock,
        metrics: ServiceMetrics,
        tracer: Tracer | None = None,
        prices: PriceOptions | None = None,
    ) -> None:
        self.quotas = quotas
        self.prices = prices or PriceOptions()
        self.tracer = tracer
        self.queue = queue
        self.usage = usage
        self.model = model
        self.clock = clock
        self.metrics = metrics

    def check(self, principal: Principal) -> None:
        """Refuses a tenant whose quota is used up whatever it asks for.

        Raises:
            ApiError: 429.
        """
        with self.counted_refusals(principal.tenant):
            self.quotas.check(principal.tenant)

    def open(
        self, call: Call, principal: Principal, route: str, span: CallSpan | None = None
    ) -> "Account":
        """The account of a call, its quota reserved. It ends the `span` of the call, if it has one.

        Raises:
            ApiError: 429 or 400, the tenant's quota does not allow for it.
        """
        limit = self.quotas.context_max(principal.tenant)
        requests = [_within(request, limit, principal) for request in call.requests]
        if span is not None:
            requests = [replace(request, traceparent=span.traceparent) for request in requests]
        with self.counted_refusals(principal.tenant):
            return Account(self, call, requests, principal.tenant, route, span)

    @contextlib.contextmanager
    def counted_refusals(self, tenant: str) -> Iterator[None]:
        """Counts an `ApiError` of the block as a call of the tenant that was refused."""
        try:
            yield
        except ApiError:
            self.metrics.tenant(tenant).num_refused += 1
            raise


class Account:
    """One call's account. `requests` are what the engine is to do."""

    def __init__(
        self,
        accounting: Accounting,
        call: Call,
        requests: list[Request],
        tenant: str,
        route: str,
        span: CallSpan | None,
    ) -> None:
        self.requests = requests
        self.tenant = tenant
        self._accounting = accounting
        self._call = call
        self._span = span
        self._error: ApiError | None = None
        self._status = 200
        # A prompt counts once, however many samples of it are wanted.
        firsts = [request for request in requests if not request.sample_index]
        self._num_input = sum(len(request.prompt_token_ids) for request in firsts)
        self._num_output = sum(request.sampling.max_tokens for request in requests)
        self._reservation = accounting.quotas.reserve(
            tenant, self._num_input, self._num_output, len(requests)
        )
        self._is_accepted = self._is_recorded = False
        self._begun: asyncio.Future[None] | None = None
        self._reasons: dict[int, str] = {}
        self._cached: dict[int, int] = {}
        self._entered_ns: int | None = None
        self._place: Place | None = None
        self._first_token_ns: int | None = None
        self._start_ns = self._progress_ns = accounting.clock.now_ns()
        self._record = UsageRecord(
            request_id=call.call_id,
            tenant=tenant,
            model=accounting.model,
            route=route,
            started_s=accounting.clock.unix_s(),
            num_prompt_tokens=self._num_input,
            num_images=sum(len(request.images) for request in firsts),
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that say what is left of the quota."""
        return self._accounting.quotas.headers(self.tenant)

    async def enter(self) -> None:
        """Waits for the call's turn. Raises ApiError 429 if too many wait."""
        cost = self._num_input + self._num_output
        start_ns = self._accounting.clock.now_ns()
        priority = self.requests[0].priority
        queue = self._accounting.queue
        with self._accounting.counted_refusals(self.tenant):
            try:
                self._place = await queue.enter(self.tenant, len(self.requests), cost, priority)
            except ApiError as error:
                error.headers += self.headers()
                raise
        self._entered_ns = self._accounting.clock.now_ns()
        self._accounting.metrics.queue_s.observe(s_of_ns(self._entered_ns - start_ns))

    def give_back(self) -> None:
        """One of the requests has ended in the engine, so another may go there."""
        if self._place is not None:
            self._accounting.queue.give_back(self._place)

    def begin(self) -> None:
        """Records that the engine has accepted the call, without waiting for the disk.

        Nothing may be sent before `begun` or `end` has returned.
        """
        self._is_accepted = True
        if self._accounting.usage is not None:
            # Even if nobody waits for the disk, the record will be there.
            self._is_recorded = True
            self._begun = self._accounting.usage.begin(self._record)

    async def begun(self) -> None:
        """Returns when it is on disk that the engine has accepted the call.

        Raises:
            ApiError: 503, it cannot be recorded.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            await begun
        except sqlite3.Error:
            self._is_recorded = False
            raise unavailable("Usage cannot be recorded; the log has more") from None

    def add(self, update: Update) -> None:
        """Notes what is about to be delivered; the call itself counts its tokens."""
        now_ns = self._accounting.clock.now_ns()
        if self._first_token_ns is None:
            self._first_token_ns = now_ns
        index = update.index
        if index not in self._cached and not self.requests[index].sample_index:
            self._cached[index] = update.num_cached_tokens
        if update.finish_reason is not None:
            self._reasons[update.index] = update.finish_reason.value
        if now_ns - self._progress_ns >= _PROGRESS_NS and self._is_recorded:
            self._progress_ns = now_ns
            assert self._accounting.usage is not None
            self._accounting.usage.write_soon(self._record_now(OPEN))

    async def end(self) -> None:
        """Completes the record of a call whose texts have ended; returns when it is on disk."""
        ended = self._reasons.values()
        reason = next((reason for reason in _WORST_FIRST if reason in ended), "stop")
        await self._close(reason)

    async def fail(self, error: ApiError, status: int = 200) -> None:
        """Completes the record of a call that a fault has ended; returns when it is on disk.

        If it cannot be written either, the log has it. `status` is that of the answer.
        """
        self.note(error, status)
        with contextlib.suppress(ApiError):
            await self._close(FinishReason.ERROR.value)

    def note(self, error: ApiError, status: int) -> None:
        """What the client is told instead of an answer, or behind a part of one."""
        if self._error is None:
            self._error, self._status = error, status

    def abandon(self) -> None:
        """Completes the record of a call that nobody waits for, if nothing else has."""
        if self._begun is not None:
            # Nobody is left to tell; the log has what came of it.
            self._begun.add_done_callback(lambda done: done.cancelled() or done.exception())
        record = self._settled(FinishReason.ABORT.value)
        if record is not None and self._accounting.usage is not None:
            self._accounting.usage.write_soon(record)

    async def _close(self, reason: str) -> None:
        record = self._settled(reason)
        if record is not None and self._accounting.usage is not None:
            try:
                await self._accounting.usage.end(record)
            except sqlite3.Error:
                raise unavailable("Usage cannot be recorded; the log has more") from None
        # Written before its end, so this waits for nothing more.
        await self.begun()

    def _settled(self, reason: str) -> UsageRecord | None:
        """Corrects quota and share, once; the complete record if there is to be one."""
        if self._reservation.is_over:
            return None
        accounting, num_cached = self._accounting, sum(self._cached.values())
        num_generated = self._call.num_generated_tokens()
        accounting.quotas.settle(self._reservation, num_cached, num_generated)
        if self._place is not None:
            correction = num_generated - self._num_output - num_cached
            accounting.queue.leave(self._place, correction)
        record = self._record_now(reason)
        self._end_span(record)
        if not self._is_accepted:
            return None
        counters = accounting.metrics.tenant(self.tenant)
        counters.num_calls += 1
        counters.num_prompt_tokens += record.num_prompt_tokens
        counters.num_cached_tokens += record.num_cached_tokens
        counters.num_generated_tokens += record.num_generated_tokens
        CALLS.info("call ended", extra={"fields": asdict(record)})
        return record if self._is_recorded else None

    def _end_span(self, record: UsageRecord) -> None:
        if self._span is None:
            return
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": record.model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "deepinfer.cached_tokens": record.num_cached_tokens,
            "deepinfer.finish_reason": record.finish_reason,
            "deepinfer.tenant": record.tenant,
        }
        now_ns = self._accounting.clock.now_ns()
        entered_ns = now_ns if self._entered_ns is None else self._entered_ns
        self._span.add_part("admission", self._start_ns, entered_ns)
        if self._first_token_ns is not None:
            self._span.add_event("first token", self._first_token_ns)
        self._span.end(now_ns, attributes, self._error, self._status)

    def _record_now(self, reason: str) -> UsageRecord:
        num_cached, num_generated = sum(self._cached.values()), self._call.num_generated_tokens()
        return replace(
            self._record,
            num_cached_tokens=num_cached,
            num_generated_tokens=num_generated,
            cost=self._cost(num_cached, num_generated),
            num_reasoning_tokens=self._call.num_reasoning_tokens(),
            first_token_s=self._s_until(self._first_token_ns),
            duration_s=self._s_until(self._accounting.clock.now_ns()),
            finish_reason=reason,
        )

    def _cost(self, num_cached: int, num_generated: int) -> float:
        prices = self._accounting.prices
        of_tokens = (
            (self._num_input - num_cached) * prices.input
            + num_cached * prices.cached
            + num_generated * prices.output
        )
        # Whole billionths, so that sums over many records have no noise of their own.
        return round(of_tokens / 1e6 + self._record.num_images * prices.image, 9)

    def _s_until(self, time_ns: int | None) -> float:
        """Seconds since the call came; 0 if that time has not come."""
        return 0.0 if time_ns is None else s_of_ns(time_ns - self._start_ns)


def _within(request: Request, context_max: int | None, principal: Principal) -> Request:
    """A request as its tenant may have it: within its context, and with its salt."""
    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    if context_max is not None and num_prompt + sampling.max_tokens > context_max:
        if num_prompt >= context_max:
            raise bad_request(
                f"The prompt has {num_prompt} tokens; the quota of {principal.tenant} is "
                f"{context_max} for prompt and answer",
                "messages",
                "context_length_exceeded",
            )
        sampling = replace(sampling, max_tokens=context_max - num_prompt)
    salt = principal.salted(request.cache_salt)
    return replace(request, sampling=sampling, cache_salt=salt, cache_owner=principal.salt)
