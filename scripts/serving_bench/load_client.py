"""Clients that cost little, so that a machine of two cores holds them and the server.

They send one request on a connection of their own and look at what comes back only as far as they
must: when the first bytes came, how many events there were, and whether the stream ended well.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

_EVENT = b"data: "
_TAIL_BYTES = 64


@dataclass(slots=True)
class StreamResult:
    """What came of one call. Times are those of the monotonic clock, in seconds."""

    start_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_events: int = 0
    num_writes: int = 0
    head: bytes = b""
    tail: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether the answer was a 200 and ended as its protocol has it."""
        ends = (b"data: [DONE]\n\n\r\n0\r\n\r\n", b"}")
        return self.head.startswith(b"HTTP/1.1 200") and self.tail.endswith(ends)


class _Stream(asyncio.Protocol):
    """Sends a request once connected; resolves `done` when the answer is complete."""

    def __init__(self, request: bytes, done: "asyncio.Future[StreamResult]") -> None:
        self._request = request
        self._done = done
        self._num_missing = -1
        self.result = StreamResult(0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.result.start_s = time.monotonic()
        transport.write(self._request)  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        result = self.result
        result.last_s = time.monotonic()
        if not result.head:
            result.head, _, body = data.partition(b"\r\n\r\n")
            self._num_missing = _content_length(result.head)
            if self._num_missing >= 0:
                self._num_missing -= len(body)
            data = body
            if not body and self._num_missing:
                return
        elif self._num_missing >= 0:
            self._num_missing -= len(data)
        if not result.first_s:
            result.first_s = result.last_s
        result.num_events += data.count(_EVENT)
        result.num_writes += 1
        result.tail = (result.tail + data)[-_TAIL_BYTES:]
        if self._num_missing == 0 or result.tail.endswith(b"0\r\n\r\n"):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(self.result)
            self._transport.close()


def _content_length(head: bytes) -> int:
    """Bytes of the body, -1 for one in chunks."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return -1


def request_bytes(path: str, body: bytes, key: str) -> bytes:
    """A POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def call(port: int, request: bytes) -> StreamResult:
    """One call, to its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[StreamResult] = loop.create_future()
    await loop.create_connection(lambda: _Stream(request, done), "127.0.0.1", port)
    return await done


async def open_idle(port: int, request: bytes) -> Callable[[], None]:
    """Opens a stream and returns when its first event is there; the result closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(_EVENT)
    return writer.close


async def at_a_pace[T](
    rate: float, num_calls: int, make: Callable[[], "asyncio.Future[T]"]
) -> list[T]:
    """Starts so many calls, `rate` a second whatever becomes of them; their results in order."""
    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), list["asyncio.Future[T]"]()
    for index in range(num_calls):
        delay = start + index / rate - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(make())
    return list(await asyncio.gather(*tasks))
