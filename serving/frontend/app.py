"""The HTTP application: routes, and the writing of answers.

A generation call takes five steps: read the body within its limit; parse it into a `Call`; open a
stream at the gateway; wait until the worker has admitted every request, so that a refusal can
still choose the status code; write the answer while watching for the client to hang up.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serving.clock import Clock
from serving.config import ServerOptions
from serving.frontend import exposition, operators
from serving.frontend.body import BodyReader
from serving.frontend.completions import CompletionCall
from serving.frontend.conversion import ServedModel
from serving.frontend.errors import ApiError, unavailable
from serving.frontend.gateway import Gateway, TokenStream
from serving.frontend.message_calls import MessagesCall, count_tokens
from serving.frontend.protocols import Call, ChatCall
from serving.frontend.responses import ResponsesCall
from serving.frontend.tokenization import detokenize, tokenize

_log = logging.getLogger(__name__)

_LARGE_BODY_BYTES = 32 * 2**10
"""Bodies from here on are parsed on another thread, lest encoding them delay everyone's tokens."""

_IMAGE_PART = b"image"
"""So are bodies that may hold an image: a small file can be a large picture."""

_MESSAGES_PATH = "/v1/messages"
"""Errors below it are spelled as that dialect has them."""

CUT_OFF_S = 2.0
"""How long a reader that was cut off may take to read on, to hear why."""

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def make_app(
    gateway: Gateway, model: ServedModel, options: ServerOptions, clock: Clock
) -> Starlette:
    """The application in front of a gateway. Its life cycle is the caller's affair."""
    service = _Service(gateway, model, options, clock)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/responses", service.responses, methods=["POST"]),
            Route("/v1/messages", service.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", service.count_tokens, methods=["POST"]),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/detokenize", service.detokenize, methods=["POST"]),
            Route("/v1/models", service.models, methods=["GET"]),
            Route("/v1/models/{name:path}", service.model, methods=["GET"]),
            Route("/health", service.health, methods=["GET"]),
            Route("/ready", service.ready, methods=["GET"]),
            Route("/metrics", service.metrics, methods=["GET"]),
            Route("/status", service.status, methods=["GET"]),
            Route("/profile", service.profile, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_exception,
            Exception: _answer_exception,
        },
    )


class _Service:
    """The route functions and what they share."""

    def __init__(
        self, gateway: Gateway, model: ServedModel, options: ServerOptions, clock: Clock
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._options = options
        self._bodies = BodyReader(options.body_bytes_max, options.body_s)
        gateway.on_drain = self._bodies.drain
        self._clock = clock
        self._created = clock.unix_s()

    async def chat(self, request: HttpRequest) -> Response:
        return await self._generate(request, lambda raw: ChatCall(raw, self._model, self._clock))

    async def completions(self, request: HttpRequest) -> Response:
        limit = self._options.prompts_max
        return await self._generate(
            request, lambda raw: CompletionCall(raw, self._model, self._clock, limit)
        )

    async def responses(self, request: HttpRequest) -> Response:
        return await self._generate(
            request, lambda raw: ResponsesCall(raw, self._model, self._clock)
        )

    async def messages(self, request: HttpRequest) -> Response:
        return await self._generate(
            request, lambda raw: MessagesCall(raw, self._model, self._clock)
        )

    async def count_tokens(self, request: HttpRequest) -> Response:
        return _json(await self._parsed(request, lambda raw: count_tokens(raw, self._model)))

    async def tokenize(self, request: HttpRequest) -> Response:
        return _json(await self._parsed(request, lambda raw: tokenize(raw, self._model)))

    async def detokenize(self, request: HttpRequest) -> Response:
        return _json(await self._parsed(request, lambda raw: detokenize(raw, self._model)))

    async def models(self, request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != self._model.name:
            raise ApiError(
                404, f"The model {name!r} does not exist", "model", code="model_not_found"
            )
        return _json(self._card())

    async def health(self, request: HttpRequest) -> Response:
        """Alive means that the engine can serve, not merely that HTTP answers."""
        await self._check_engine()
        return _json({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        if self._gateway.is_draining:
            raise unavailable("The server is shutting down")
        await self._check_engine()
        return _json({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        page = exposition.render(self._gateway.metrics, await self._gateway.status())
        return Response(page, media_type=exposition.CONTENT_TYPE)

    async def status(self, request: HttpRequest) -> Response:
        """What the engine holds, and what was compiled for it at the start."""
        status = await self._gateway.status()
        if status is None:
            raise unavailable("The worker does not answer")
        return _json(
            {"failure": status.failure, "engine": status.engine, "programs": status.programs}
        )

    async def profile(self, request: HttpRequest) -> Response:
        """Traces the next steps; the answer comes when the trace is written."""
        operators.check_operator(request.client)
        raw = await self._bodies.read(request)
        return _json(await operators.capture_profile(raw, self._gateway))

    async def _generate(self, request: HttpRequest, parse: Callable[[bytes], Call]) -> Response:
        return _Answer(await self._parsed(request, parse), self._gateway)

    async def _parsed[T](self, request: HttpRequest, parse: Callable[[bytes], T]) -> T:
        raw = await self._bodies.read(request)
        if len(raw) < _LARGE_BODY_BYTES and _IMAGE_PART not in raw:
            return parse(raw)
        return await asyncio.to_thread(parse, raw)

    async def _check_engine(self) -> None:
        status = await self._gateway.status()
        if status is None:
            raise unavailable("The worker does not answer")
        if status.failure is not None:
            # The reason is in the log alone: this page is open to everybody.
            raise unavailable("The engine has failed; the log has more")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "deepinfer",
            "max_model_len": self._model.context_max,
        }


class _Answer(Response):
    """Generates while it is written: a thin ASGI callable, because a token passes here often."""

    def __init__(self, call: Call, gateway: Gateway) -> None:
        super().__init__()
        self._call = call
        self._gateway = gateway
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._gateway.open(self._call.requests)
        try:
            writing = asyncio.create_task(self._write(stream, send))
            hanging_up = asyncio.create_task(_until_disconnect(receive))
            stream.on_cut_off = writing.cancel
            await asyncio.wait({writing, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            for task in (writing, hanging_up):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            if stream.cut_off is not None and self._has_begun:
                await _end_cut_off(self._call.failing(stream.cut_off), send)
        finally:
            stream.close()

    async def _write(self, stream: TokenStream, send: Send) -> None:
        await stream.admitted()
        if self._call.is_streamed:
            await self._write_events(stream, send)
        else:
            await self._write_whole(stream, send)

    async def _write_whole(self, stream: TokenStream, send: Send) -> None:
        call = self._call
        call.opening()
        async for _ in _events(call, stream):
            pass
        body = call.answer()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write_events(self, stream: TokenStream, send: Send) -> None:
        call = self._call

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        self._has_begun = True
        try:
            opening = call.opening()
            if opening:
                await write(opening)
            async for data in _events(call, stream):
                if data:
                    await write(data)
            end = call.closing()
        except ApiError as error:
            end = call.failing(error)
        except Exception:
            _log.exception("writing a stream failed")
            end = call.failing(_internal_error())
        await write(end, more=False)


async def _events(call: Call, stream: TokenStream) -> AsyncIterator[bytes]:
    """The events of each look at the stream, until every text of the call has ended."""
    num_open = len(call.requests)
    while num_open:
        data = b""
        for update in await stream.next():
            if call.is_over(update.index):
                continue
            data += call.feed(update)
            if call.is_over(update.index):
                num_open -= 1
                stream.end(update.index)
        yield data


async def _end_cut_off(body: bytes, send: Send) -> None:
    """Tells a reader that was cut off why, if it reads on soon."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_OFF_S):
            await send({"type": "http.response.body", "body": body, "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def _internal_error() -> ApiError:
    return ApiError(500, "The server met an internal error; its log has the details")


def _answer_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    is_message = request.url.path.startswith(_MESSAGES_PATH)
    body = error.message_fields() if is_message else {"error": error.fields()}
    return _json(body, error.status, headers)


def _answer_http_exception(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    where = f"{request.method} {request.url.path}"
    return _answer_api_error(request, ApiError(error.status_code, f"{where}: {error.detail}"))


def _answer_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette logs the exception itself by raising it again after this answer."""
    return _answer_api_error(request, _internal_error())
