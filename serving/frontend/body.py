"""Reading request bodies within limits of size and time.

A body that is still on its way when the server begins to drain is given up at once: the request
could not be served any more, and waiting for it would hold the shutdown up.
"""

import asyncio

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from serving.frontend.errors import ApiError, unavailable


class BodyReader:
    """Reads bodies of at most `bytes_max` bytes that arrive within `timeout_s` seconds."""

    def __init__(self, bytes_max: int, timeout_s: float) -> None:
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._limits: set[asyncio.Timeout] = set()
        self._is_draining = False

    async def read(self, request: HttpRequest) -> bytes:
        """The whole body.

        Raises:
            ApiError: 413, too large; 408, too slow; 400, cut off; 503, the server is stopping.
        """
        if self._is_draining:
            raise unavailable("The server is shutting down")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._bytes_max:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._limits.add(limit)
                try:
                    return await self._collect(request)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._is_draining:
                raise unavailable("The server is shutting down") from None
            detail = f"The body did not arrive within {self._timeout_s:g} s"
            raise ApiError(408, detail) from None
        except ClientDisconnect:
            raise ApiError(400, "The client hung up before the body had arrived") from None

    def drain(self) -> None:
        """Gives up every body that has not arrived yet, and refuses those that come later."""
        self._is_draining = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    async def _collect(self, request: HttpRequest) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._bytes_max:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        detail = f"The body is too large; expected at most {self._bytes_max} bytes"
        return ApiError(413, detail)
