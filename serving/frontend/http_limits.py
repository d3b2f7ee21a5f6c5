"""Limits on the heads of requests, which the HTTP server itself does not set.

A head that does not end is cut off by size and by time, so that neither memory nor connections are
held by whoever sends one byte at a time. Bodies have limits of their own, in `body.py`.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.frontend.errors import ApiError

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
"""What every answer says to browsers; the page says more."""


class HeadLimit:
    """Refuses requests whose headers are too large, though they have arrived."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = sum(len(name) + len(value) for name, value in scope.get("headers", ()))
        size += len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
        if size <= self._bytes_max:
            await self._app(scope, receive, send)
            return
        detail = f"The headers have {size} bytes; expected at most {self._bytes_max}"
        body = ApiError(431, detail).body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *SECURITY_HEADERS,
        ]
        await send({"type": "http.response.start", "status": 431, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def limited_protocol(bytes_max: int, timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol; a head is given up after so many bytes and seconds."""

    class LimitedProtocol(HttpToolsProtocol):
        _is_in_head = True
        _num_bytes = 0
        _num_messages = 0
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_in_head and self._timer is None:
                self._start_timer()
            num_messages = self._num_messages
            super().data_received(data)
            # If a message has ended in this data, most of it was not head.
            if self._is_in_head and self._num_messages == num_messages:
                self._num_bytes += len(data)
                if self._num_bytes > bytes_max:
                    self._give_up(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            self._stop_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            # The head of the next request may follow; its time begins with its first byte.
            self._is_in_head, self._num_bytes = True, 0
            self._num_messages += 1
            super().on_message_complete()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(timeout_s, self._on_timer)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timer(self) -> None:
            self._timer = None
            if self.cycle is not None and not self.cycle.response_complete:
                self._start_timer()  # An answer is still being written on this connection.
            else:
                self._give_up(b"408 Request Timeout")

        def _give_up(self, status: bytes) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.close()  # No status can be told within another answer.
            elif not self.transport.is_closing():
                ending = b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                self.transport.write(b"HTTP/1.1 " + status + ending)
                self.transport.close()

    return LimitedProtocol
