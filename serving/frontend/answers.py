"""The writing of one answer, whole or as a stream, while watching for the client to hang up.

A call waits for its turn, opens a stream at the gateway, and waits until the worker has admitted
every request, so that a refusal can still choose the status code. Its usage is on disk before the
last byte goes out.
"""

import asyncio
import contextlib
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.frontend.accounting import Account
from serving.frontend.errors import ApiError, internal_error
from serving.frontend.gateway import Gateway, TokenStream, Update
from serving.frontend.http_limits import SECURITY_HEADERS
from serving.frontend.protocols import Call

_log = logging.getLogger(__name__)

CUT_OFF_S = 2.0
"""How long a reader that was cut off may take to read on, to hear why."""

KEEP_ALIVE_S = 15.0
"""How long a stream may be silent before a comment says that it is alive."""

_KEEP_ALIVE = b": waiting\n\n"

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Generates while it is written: a thin ASGI callable, because a token passes here often."""

    def __init__(self, call: Call, account: Account, gateway: Gateway) -> None:
        super().__init__()
        self._call = call
        self._account = account
        self._gateway = gateway
        self._stream: TokenStream | None = None
        self._has_begun = False
        # Numbers of the requests whose texts go on.
        self._open = set(range(len(call.requests)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            writing = asyncio.create_task(self._write(send))
            hanging_up = asyncio.create_task(_until_disconnect(receive))
            await asyncio.wait({writing, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            for task in (writing, hanging_up):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            cut_off = None if self._stream is None else self._stream.cut_off
            if cut_off is not None and self._has_begun:
                await _end_cut_off(self._call.failing(cut_off), send)
        except ApiError as error:
            self._account.note(error, error.status)
            raise
        finally:
            if self._stream is not None:
                self._stream.close()
            self._account.abandon()

    async def _write(self, send: Send) -> None:
        await self._account.enter()
        writing = asyncio.current_task()
        assert writing is not None
        self._stream = stream = self._gateway.open(self._account.requests)
        stream.on_cut_off = writing.cancel
        stream.on_end = self._account.give_back
        await stream.admitted()
        self._account.begin()
        if self._call.is_streamed:
            await self._account.begun()
            await self._write_events(stream, send)
        else:
            await self._write_whole(stream, send)

    async def _write_whole(self, stream: TokenStream, send: Send) -> None:
        call = self._call
        call.opening()
        try:
            while self._open:
                self._take(await stream.next())
        except ApiError as error:
            await self._account.fail(error, error.status)
            raise
        body = call.answer()
        await self._account.end()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _write_events(self, stream: TokenStream, send: Send) -> None:
        call = self._call

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await self._start(send, _SSE_HEADERS)
        self._has_begun = True
        try:
            opening = call.opening()
            if opening:
                await write(opening)
            while True:
                updates = await stream.next(KEEP_ALIVE_S)
                end = self._take(updates) if updates else _KEEP_ALIVE
                if not self._open:
                    break
                if end:
                    await send({"type": "http.response.body", "body": end, "more_body": True})
            end += call.closing()
            await self._account.end()
        except ApiError as error:
            end = call.failing(error)
            await self._account.fail(error)
        except Exception:
            _log.exception("writing the stream of %s failed", call.call_id)
            error = internal_error()
            end = call.failing(error)
            await self._account.fail(error)
        await write(end, more=False)

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        own = [(b"x-request-id", self._call.call_id.encode()), *self._account.headers()]
        own += SECURITY_HEADERS
        await send({"type": "http.response.start", "status": 200, "headers": headers + own})

    def _take(self, updates: list[Update]) -> bytes:
        """The events of what happened since the last look at the stream."""
        call, data = self._call, b""
        for update in updates:
            index = update.index
            if index in self._open:
                data += call.feed(update)
                self._account.add(update)
                if call.is_over(index):
                    self._open.discard(index)
                    assert self._stream is not None
                    self._stream.end(index)
        return data


async def _end_cut_off(body: bytes, send: Send) -> None:
    """Tells a reader that was cut off why, if it reads on soon."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_OFF_S):
            await send({"type": "http.response.body", "body": body, "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
