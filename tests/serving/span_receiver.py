"""A receiver of OpenTelemetry spans on this machine, by OTLP over HTTP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(ThreadingHTTPServer):
    """Keeps every span that is posted to it, what processes they are from, and their bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.raw = b""
        self.resources: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def named(self, name: str) -> list[Any]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Any) -> list[Any]:
        """The spans inside another one, the earliest first."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


class _Handler(BaseHTTPRequestHandler):
    server: Receiver  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        assert self.path == "/v1/traces"
        self.server.raw += raw
        for group in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.server.resources.append(attributes(group.resource))
            for scope in group.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a span, or of the process it is from."""
    return {
        entry.key: entry.value.string_value or entry.value.int_value for entry in holder.attributes
    }


@contextmanager
def span_receiver() -> Iterator[Receiver]:
    """One that runs until it is left."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
