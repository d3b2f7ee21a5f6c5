"""Goal: each call becomes a span in the trace of its caller, with what it waited for inside, and no
text of clients leaves the server that way.

Method: a receiver of OTLP on this machine, over HTTP, behind a service with a scripted executor.
"""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving.config import TracingOptions
from serving.frontend import tracing
from serving.frontend.tracing import CallTimes, Tracer
from sharding.config_file import ConfigError
from tests.serving.frontend.alphabet import completion, letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver(HTTPServer):
    """Keeps every span that is posted to it, and the bytes they came in."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.raw = b""
        self.resources: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        import gzip

        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        assert self.path == "/v1/traces"
        self.server.raw += raw
        for group in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.server.resources.append(_attributes(group.resource))
            for scope in group.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _attributes(holder: Any) -> dict[str, Any]:
    return {
        entry.key: entry.value.string_value or entry.value.int_value for entry in holder.attributes
    }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_call_is_a_span_in_the_trace_of_its_caller(receiver: Receiver, tmp_path: Path) -> None:
    options = {"tracing.endpoint": receiver.url, "tracing.service_name": "mine"}
    executor = ScriptedExecutor(letter_at, step_s=0.002)
    with RunningService(executor, options, tmp_path / "db") as service:
        url = f"{service.url}/v1/completions"
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = completion(max_tokens=6, prompt="secret words")
        answer = httpx.post(url, json=body, headers=headers, timeout=20)
        httpx.post(url, json=body | {"stream": True}, timeout=20)
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        httpx.post(url, json=body, headers=unsampled, timeout=20)
        httpx.post(url, json=body, headers={"traceparent": "nonsense"}, timeout=20)
    calls = receiver.named("POST /v1/completions")
    assert len(calls) == 3, "not the one whose caller does not sample"
    (inside,) = [span for span in calls if span.trace_id.hex() == TRACE]
    assert inside.parent_span_id.hex() == PARENT and inside.kind == 2
    assert all(not span.parent_span_id for span in calls if span is not inside)
    found = _attributes(inside)
    assert found["gen_ai.usage.output_tokens"] == 6 and found["deepinfer.finish_reason"] == "length"
    assert found["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert (found["deepinfer.tenant"], found["http.route"]) == ("local", "/v1/completions")
    parts = [span for span in receiver.spans if span.parent_span_id == inside.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    edges = [
        edge for span in parts for edge in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]
    assert edges == sorted(edges) and edges[1] == edges[2] and edges[3] == edges[4]
    assert (inside.start_time_unix_nano, inside.end_time_unix_nano) == (edges[0], edges[-1])
    assert abs(edges[0] / 1e9 - int(_date_s(answer))) < 5, "in seconds since 1970"
    assert receiver.resources[0]["service.name"] == "mine"
    assert b"secret" not in receiver.raw


def _date_s(answer: httpx.Response) -> float:
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(answer.headers["date"]).timestamp()


def test_a_fault_marks_the_span(receiver: Receiver, tmp_path: Path) -> None:
    executor = ScriptedExecutor(letter_at, failing_step=0)
    options = {"tracing.endpoint": f"{receiver.url}/v1/traces"}
    with RunningService(executor, options, tmp_path / "db") as service:
        httpx.post(f"{service.url}/v1/completions", json=completion(), timeout=20)
    (span,) = receiver.named("POST /v1/completions")
    assert span.status.code == 2
    names = [other.name for other in receiver.spans if other is not span]
    assert names == ["queue", "prefill"], "it came to no token"


def test_a_receiver_that_is_not_there_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.2)
    given_up: list[bool] = []
    with Tracer(TracingOptions("http://127.0.0.1:1"), 0) as tracer:
        tracer.add_call("x", "", CallTimes(1, 1, 1, 1), {})
        shutdown = tracer._exporter.shutdown
        monkeypatch.setattr(
            tracer._exporter, "shutdown", lambda: (given_up.append(True), shutdown())
        )
    assert given_up, "it would have tried again and again"


def test_without_the_packages_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"deepinfer-jax\[tracing\]"):
        Tracer(TracingOptions("http://127.0.0.1:4318"), 0)
    with pytest.raises(ValueError, match="endpoint"):
        TracingOptions("127.0.0.1:4318")
