"""OpenTelemetry spans: one for each call, and inside it those of all that had a part in it.

A call that is sampled has a name for others, a `traceparent`, which goes with its requests to every
node. Nodes note what they did and when (`nodes/request_spans.py`), in this process or others; each
process makes spans of its own nodes' notes. Spans are made when what they tell of is over, so that
nothing of OpenTelemetry stands in the way of a token. A `traceparent` header that came with the
call makes them part of the caller's trace. They are exported by OTLP over HTTP on a thread of its
own, and hold counts and names, never texts.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from serving.config import TracingOptions
from serving.frontend.errors import ApiError
from serving.observe import SpanNote
from serving.transport.driver import Driver, unix_offset_ns
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACES_PATH = "/v1/traces"

_EXPORT_EVERY_MS = 1000.0

_FLUSH_S = 3.0
"""How long the last spans may take to leave when the server ends."""


class Tracer:
    """Makes and exports spans. Use as a context manager: what is left is exported at the end.

    Args:
        unix_offset_ns: what to add to the monotonic clock for nanoseconds since 1970.
        instance: what the spans name this process.
        exporter: where spans go; by OTLP to the endpoint of the options if not given.

    Raises:
        ConfigError: the packages of the extra `tracing` are not installed.
    """

    def __init__(
        self,
        options: TracingOptions,
        unix_offset_ns: int,
        instance: str,
        exporter: "SpanExporter | None" = None,
    ) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint is {options.endpoint!r}, which needs more packages ({error}); "
                "install them: pip install 'deepinfer-jax[tracing]'"
            ) from None
        self._trace = trace
        self.unix_offset_ns = unix_offset_ns
        self._propagator = TraceContextTextMapPropagator()
        endpoint = options.endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        self._provider = TracerProvider(
            resource=Resource.create(
                {"service.name": options.service_name, "service.instance.id": instance}
            ),
            sampler=ParentBased(TraceIdRatioBased(options.sample_ratio)),
            shutdown_on_exit=False,
        )
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, schedule_delay_millis=_EXPORT_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("serving")

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: object) -> None:
        # A receiver that does not answer must not keep the server from ending.
        giving_up = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        giving_up.start()
        try:
            self._provider.shutdown()
        finally:
            giving_up.cancel()

    def begin(self, path: str, traceparent: str, start_ns: int) -> "CallSpan":
        """The span of a call that has come now, with the header of that name if it had one."""
        parent = self._propagator.extract({"traceparent": traceparent})
        kind, start_ns = self._trace.SpanKind.SERVER, start_ns + self.unix_offset_ns
        route = {"http.route": path}
        span = self._tracer.start_span(f"POST {path}", parent, kind, route, start_time=start_ns)
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return CallSpan(self, span, carrier.get("traceparent", ""))

    def add(self, note: SpanNote) -> None:
        """Exports a span that is part of another one, soon and elsewhere."""
        parent = self._propagator.extract({"traceparent": note.parent})
        start_ns = note.start_ns + self.unix_offset_ns
        span = self._tracer.start_span(
            note.name, parent, attributes=dict(note.attributes), start_time=start_ns
        )
        self.finish(span, note.end_ns, note.fault)

    def finish(self, span: Any, end_ns: int, fault: str) -> None:
        """Ends a span; a `fault` marks it as one that went wrong."""
        if fault:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, fault))
        span.end(end_ns + self.unix_offset_ns)


class CallSpan:
    """The span of one call while it goes on. Made by `Tracer.begin`.

    Attributes:
        traceparent: names it for those who make parts of it; empty if it is not sampled.
    """

    def __init__(self, tracer: Tracer, span: Any, traceparent: str) -> None:
        self.traceparent = traceparent
        self._tracer = tracer
        self._span = span

    def add_part(self, name: str, start_ns: int, end_ns: int) -> None:
        """Something that was done for the call here."""
        if self.traceparent:
            self._tracer.add(SpanNote(self.traceparent, name, start_ns, end_ns, {}))

    def add_event(self, name: str, time_ns: int) -> None:
        """Something that happened to the call at one moment."""
        self._span.add_event(name, timestamp=time_ns + self._tracer.unix_offset_ns)

    def end(
        self,
        end_ns: int,
        attributes: Mapping[str, str | int],
        error: ApiError | None = None,
        status: int = 200,
    ) -> None:
        """The call is over, perhaps by an error; `status` is that of the answer.

        An error of the client's is none of this server.
        """
        self._span.set_attributes({**attributes, "http.response.status_code": status})
        fault = ""
        if error is not None:
            self._span.set_attribute("error.type", error.code or str(error.status))
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                fault = error.detail
        self._tracer.finish(self._span, end_ns, fault)


@contextlib.contextmanager
def open_tracer(options: TracingOptions, driver: Driver, instance: str) -> Iterator[Tracer | None]:
    """What makes the spans of the process `instance`, those of its nodes included; None if they
    are to go nowhere.

    Raises:
        ConfigError: the packages of the extra `tracing` are not installed.
    """
    if not options.endpoint:
        yield None
        return
    with Tracer(options, unix_offset_ns(), instance) as tracer:
        driver.on_trace = tracer.add
        yield tracer
