"""OpenTelemetry spans: one for each call, and one each for its waiting, prefill and decode.

Spans are made when a call has ended, from the times that its account has noted, so that nothing of
OpenTelemetry stands in the way of a token. A `traceparent` header that came with the call makes
them part of the caller's trace. They are exported by OTLP over HTTP on a thread of its own, and
hold counts and names, never texts.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.config import TracingOptions
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACES_PATH = "/v1/traces"

_FLUSH_S = 3.0
"""How long the last spans may take to leave when the server ends."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When a call came, was let through to the engine, had its first token, and ended.

    Nanoseconds of the monotonic clock; None for what it did not come to.
    """

    start_ns: int
    entered_ns: int | None
    first_token_ns: int | None
    end_ns: int


class Tracer:
    """Makes and exports spans. Use as a context manager: what is left is exported at the end.

    Args:
        unix_offset_ns: what to add to the monotonic clock for nanoseconds since 1970.
        exporter: where spans go; by OTLP to the endpoint of the options if not given.

    Raises:
        ConfigError: the packages of the extra `tracing` are not installed.
    """

    def __init__(
        self,
        options: TracingOptions,
        unix_offset_ns: int,
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
        self._offset_ns = unix_offset_ns
        self._propagator = TraceContextTextMapPropagator()
        endpoint = options.endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": options.service_name}),
            sampler=ParentBased(TraceIdRatioBased(options.sample_ratio)),
            shutdown_on_exit=False,
        )
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
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

    def add_call(
        self, name: str, traceparent: str, times: CallTimes, attributes: Mapping[str, Any]
    ) -> None:
        """Exports the spans of a call that has ended, soon and elsewhere.

        A finish reason of `error` marks the span as one.
        """
        trace, offset_ns = self._trace, self._offset_ns
        parent = self._propagator.extract({"traceparent": traceparent})
        span = self._tracer.start_span(
            name,
            parent,
            trace.SpanKind.SERVER,
            attributes,
            start_time=times.start_ns + offset_ns,
        )
        inside = trace.set_span_in_context(span)
        entered_ns = times.end_ns if times.entered_ns is None else times.entered_ns
        parts = [("queue", times.start_ns, entered_ns)]
        if times.entered_ns is not None:
            first_ns = times.end_ns if times.first_token_ns is None else times.first_token_ns
            parts.append(("prefill", entered_ns, first_ns))
            if times.first_token_ns is not None:
                parts.append(("decode", first_ns, times.end_ns))
        for part, start_ns, end_ns in parts:
            child = self._tracer.start_span(part, inside, start_time=start_ns + offset_ns)
            child.end(end_ns + offset_ns)
        if attributes.get("deepinfer.finish_reason") == "error":
            span.set_status(trace.StatusCode.ERROR)
        span.end(times.end_ns + offset_ns)
