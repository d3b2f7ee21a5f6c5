"""The HTTP application: routes, and the writing of answers.

A generation call takes six steps: see who calls; read the body within its limit; see that there is
quota left; parse it into a `Call`; open its account, which reserves what it may take; write its
`Answer`.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.clock import Clock
from serving.config import COUNT_MAX, ServerOptions
from serving.frontend import exposition, openapi, operators, web_page
from serving.frontend.accounting import Accounting
from serving.frontend.answers import Answer
from serving.frontend.auth import LOCAL, Authenticator, Scope
from serving.frontend.body import BodyReader
from serving.frontend.cache_admin import CacheAccess, CacheAdmin
from serving.frontend.completions import CompletionCall
from serving.frontend.conversion import ServedModel
from serving.frontend.errors import ApiError, internal_error, unavailable
from serving.frontend.fair_queue import FairQueue
from serving.frontend.gateway import Gateway
from serving.frontend.http_limits import SECURITY_HEADERS, HeadLimit
from serving.frontend.message_calls import MessagesCall, count_tokens
from serving.frontend.parsing import ParsingThreads
from serving.frontend.protocols import Call, ChatCall
from serving.frontend.quota import Quotas
from serving.frontend.responses import ResponsesCall
from serving.frontend.tokenization import detokenize, tokenize
from serving.frontend.tracing import Tracer

_LARGE_BODY_BYTES = 32 * 2**10
"""Bodies from here on are parsed on another thread, lest encoding them delay everyone's tokens."""

_IMAGE_PARTS = (b"image", b"\\u")
"""So are bodies that may hold an image, in whatever spelling: a small file can be a large picture,
and one at a web address is waited for."""

_MESSAGES_PATH = "/v1/messages"
"""Errors below it are spelled as that dialect has them."""

Handler = Callable[[HttpRequest], Awaitable[Response]]


def make_app(
    gateway: Gateway,
    model: ServedModel,
    options: ServerOptions,
    clock: Clock,
    authenticator: Authenticator | None = None,
    accounting: Accounting | None = None,
    cache: CacheAccess | None = None,
    overview: Callable[[], object] | None = None,
) -> ASGIApp:
    """The application in front of a gateway. Its life cycle is the caller's affair.

    Without an `authenticator` everybody may do everything; without `accounting` there are no
    quotas and no records; `cache` is the way to the KV tiers, if there are any. `overview` is what
    `/cluster` answers; None for a single worker.
    """
    if accounting is None:
        queue = FairQueue(COUNT_MAX, COUNT_MAX)
        quotas = Quotas({}, clock)
        accounting = Accounting(quotas, queue, None, model.name, clock, gateway.metrics)
    admin = CacheAdmin(cache, gateway, model)
    service = _Service(gateway, model, options, clock, accounting, admin, overview)

    def guarded(scope: Scope, handler: Handler) -> Handler:
        async def handle(request: HttpRequest) -> Response:
            if authenticator is not None:
                request.state.principal = authenticator.principal(request.headers, scope)
            return await handler(request)

        return handle

    def use(handler: Handler) -> Handler:
        return guarded(Scope.USE, handler)

    tracer = accounting.tracer

    def generating(handler: Handler) -> Handler:
        return use(handler) if tracer is None else _traced(use(handler), tracer, clock)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", generating(service.chat), methods=["POST"]),
            Route("/v1/completions", generating(service.completions), methods=["POST"]),
            Route("/v1/responses", generating(service.responses), methods=["POST"]),
            Route("/v1/messages", generating(service.messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", use(service.count_tokens), methods=["POST"]),
            Route("/tokenize", use(service.tokenize), methods=["POST"]),
            Route("/detokenize", use(service.detokenize), methods=["POST"]),
            Route("/v1/models", use(service.models), methods=["GET"]),
            Route("/v1/models/{name:path}", use(service.model), methods=["GET"]),
            Route("/health", service.health, methods=["GET"]),
            Route("/ready", service.ready, methods=["GET"]),
            Route("/metrics", guarded(Scope.ADMIN, service.metrics), methods=["GET"]),
            Route("/cluster", guarded(Scope.ADMIN, service.cluster), methods=["GET"]),
            Route("/status", guarded(Scope.ADMIN, service.status), methods=["GET"]),
            Route("/admin/cache", guarded(Scope.ADMIN, service.cache_stats), methods=["GET"]),
            Route("/admin/cache", guarded(Scope.ADMIN, service.cache_action), methods=["POST"]),
            Route("/profile", guarded(Scope.ADMIN, service.profile), methods=["POST"]),
            Route("/openapi.json", service.openapi, methods=["GET"]),
            Route("/", web_page.answer, methods=["GET"]),
            Route("/page/{name}", web_page.answer, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_exception,
            Exception: _answer_exception,
        },
    )
    return HeadLimit(app, options.head_bytes_max)


class _Service:
    """The route functions and what they share."""

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        options: ServerOptions,
        clock: Clock,
        accounting: Accounting,
        cache: CacheAdmin,
        overview: Callable[[], object] | None,
    ) -> None:
        self._accounting = accounting
        self._cache = cache
        self._overview = overview
        self._gateway = gateway
        self._model = model
        self._options = options
        self._bodies = BodyReader(options.body_bytes_max, options.body_s)
        self._parsing = ParsingThreads()
        gateway.on_drain = self._bodies.drain
        self._clock = clock
        self._created = clock.unix_s()
        self._document = msgspec.json.encode(openapi.document(version("deepinfer-jax")))

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

    async def openapi(self, request: HttpRequest) -> Response:
        """What may be asked of this server, for programs."""
        return _plain(self._document, "application/json")

    async def metrics(self, request: HttpRequest) -> Response:
        num_queued = self._accounting.queue.num_waiting
        status = await self._gateway.status()
        tiers = await self._cache.metrics()
        page = exposition.render(self._gateway.metrics, status, self._model.name, num_queued, tiers)
        return _plain(page, exposition.CONTENT_TYPE)

    async def status(self, request: HttpRequest) -> Response:
        """What the engine holds, and what was compiled for it at the start."""
        status = await self._gateway.status()
        if status is None:
            raise unavailable("The worker does not answer")
        return _json(operators.status_of(status, self._gateway, self._accounting.queue.num_waiting))

    async def cluster(self, request: HttpRequest) -> Response:
        """The workers of a cluster, what they hold, and where requests are."""
        if self._overview is None:
            raise ApiError(404, "This server has a single worker; /status tells of it")
        return _json(self._overview())

    async def profile(self, request: HttpRequest) -> Response:
        """Traces the next steps; the answer comes when the trace is written."""
        _check_operator(request)
        raw = await self._bodies.read(request)
        return _json(await operators.capture_profile(raw, self._gateway))

    async def cache_stats(self, request: HttpRequest) -> Response:
        """Numbers of the KV tiers."""
        _check_operator(request)
        return _json(await self._cache.stats())

    async def cache_action(self, request: HttpRequest) -> Response:
        """Pins, warms or purges in the KV tiers."""
        _check_operator(request)
        return _json(await self._cache.act(await self._bodies.read(request)))

    async def _generate(self, request: HttpRequest, parse: Callable[[bytes], Call]) -> Response:
        raw = await self._bodies.read(request)
        principal = getattr(request.state, "principal", LOCAL)
        try:
            # Before the work of parsing, which may fetch images.
            self._accounting.check(principal)
            call = await self._parse(request, parse, raw)
            span = getattr(request.state, "span", None)
            account = self._accounting.open(call, principal, request.url.path, span)
        except ApiError as error:
            error.headers += self._accounting.quotas.headers(principal.tenant)
            raise
        return Answer(call, account, self._gateway)

    async def _parsed[T](self, request: HttpRequest, parse: Callable[[bytes], T]) -> T:
        return await self._parse(request, parse, await self._bodies.read(request))

    async def _parse[T](self, request: HttpRequest, parse: Callable[[bytes], T], raw: bytes) -> T:
        if len(raw) < _LARGE_BODY_BYTES and not any(part in raw for part in _IMAGE_PARTS):
            return parse(raw)
        tenant = getattr(request.state, "principal", LOCAL).tenant
        return await self._parsing.run(tenant, parse, raw)

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


def _traced(handler: Handler, tracer: Tracer, clock: Clock) -> Handler:
    """A handler whose calls have spans; the account of a call ends its span, if there comes one."""

    async def handle(request: HttpRequest) -> Response:
        caller = request.headers.get("traceparent", "")
        span = request.state.span = tracer.begin(request.url.path, caller, clock.now_ns())
        try:
            return await handler(request)
        except Exception as error:
            shown = error if isinstance(error, ApiError) else internal_error()
            span.end(clock.now_ns(), {}, shown, shown.status)
            raise

    return handle


def _check_operator(request: HttpRequest) -> None:
    """Without keys, whoever is on the server's machine is its operator."""
    if getattr(request.state, "principal", LOCAL) is LOCAL:
        operators.check_operator(request.client, request.headers)


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return _plain(msgspec.json.encode(value), "application/json", status, headers)


def _plain(
    body: bytes, media_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    response = Response(body, status, headers, media_type)
    response.raw_headers += SECURITY_HEADERS
    return response


def _answer_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    headers = {name.decode(): value.decode() for name, value in error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    is_message = request.url.path.startswith(_MESSAGES_PATH)
    body = error.message_fields() if is_message else {"error": error.fields()}
    return _json(body, error.status, headers)


def _answer_http_exception(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    where = f"{request.method} {request.url.path}"
    shown = ApiError(error.status_code, f"{where}: {error.detail}")
    # Among them is which methods a path takes.
    shown.headers += [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
    return _answer_api_error(request, shown)


def _answer_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette logs the exception itself by raising it again after this answer."""
    return _answer_api_error(request, internal_error())
