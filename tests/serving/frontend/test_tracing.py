"""Goal: each call becomes a span in the trace of its caller, with what it waited for inside, and no
text of clients leaves the server that way.

Method: a receiver of OTLP on this machine, over HTTP, behind a service with a scripted executor.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.config import TracingOptions
from serving.frontend import tracing
from serving.frontend.auth import Scope, SqliteKeyStore
from serving.frontend.tracing import Tracer
from serving.observe import SpanNote
from sharding.config_file import ConfigError
from tests.serving.frontend.alphabet import completion, letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor
from tests.serving.span_receiver import Receiver, attributes, span_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with span_receiver() as server:
        yield server


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
    found = attributes(inside)
    assert found["gen_ai.usage.output_tokens"] == 6 and found["deepinfer.finish_reason"] == "length"
    assert found["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert (found["deepinfer.tenant"], found["http.route"]) == ("local", "/v1/completions")
    parts = receiver.children(inside)
    assert [span.name for span in parts] == ["admission", "queue", "prefill", "decode"]
    told = [attributes(span) for span in parts]
    assert [entry.get("deepinfer.node") for entry in told] == [None, *["mesh_worker/0"] * 3]
    assert [entry.get("deepinfer.num_tokens", 0) for entry in told] == [0, 0, 1, 5]
    assert all(span.trace_id == inside.trace_id for span in parts)
    edges = [
        edge for span in parts for edge in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]
    assert edges == sorted(edges) and edges[3] == edges[4] and edges[5] == edges[6]
    assert inside.start_time_unix_nano <= edges[0] and edges[-1] <= inside.end_time_unix_nano
    (first,) = inside.events
    assert first.name == "first token" and edges[5] <= first.time_unix_nano <= edges[-1]
    assert abs(edges[0] / 1e9 - int(_date_s(answer))) < 5, "in seconds since 1970"
    assert receiver.resources[0]["service.name"] == "mine"
    assert receiver.resources[0]["service.instance.id"] == "mesh_worker/0"
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
    parts = receiver.children(span)
    assert [part.name for part in parts] == ["admission", "queue", "prefill"], "it came to no token"
    assert [part.status.code for part in parts] == [0, 0, 2]


def test_refused_calls_have_spans_with_their_status(receiver: Receiver, tmp_path: Path) -> None:
    options = {
        "tracing.endpoint": receiver.url,
        "quotas": {"default": {"requests_per_minute": 1}},
        "engine.waiting_max": 1,
    }
    _, key = SqliteKeyStore(tmp_path / "db").add("acme", [Scope.USE], 0)
    headers = {"authorization": f"Bearer {key}"}
    with RunningService(ScriptedExecutor(letter_at), options, tmp_path / "db") as service:
        url = f"{service.url}/v1/completions"
        httpx.post(url, json=completion(), timeout=20)
        httpx.post(url, json=completion() | {"max_tokens": "many"}, headers=headers, timeout=20)
        # Only the engine finds out that this one is wrong.
        wrong = completion() | {"guided_regex": "secret("}
        httpx.post(url, json=wrong, headers=headers, timeout=20)
        httpx.post(url, json=completion(), headers=headers, timeout=20)
    spans = receiver.named("POST /v1/completions")
    found = [attributes(span) for span in spans]
    assert [entry["http.response.status_code"] for entry in found] == [401, 400, 400, 429]
    assert found[0]["error.type"] == "invalid_api_key" and found[3]["error.type"]
    assert all(span.status.code == 0 for span in spans), "no fault of the server"
    assert [len(receiver.children(span)) for span in spans] == [0, 0, 2, 0]
    assert b"secret" not in receiver.raw


def test_a_receiver_that_is_not_there_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.2)
    given_up: list[bool] = []
    with Tracer(TracingOptions("http://127.0.0.1:1"), 0, "") as tracer:
        tracer.add(SpanNote("", "x", 1, 1, {}))
        shutdown = tracer._exporter.shutdown
        monkeypatch.setattr(
            tracer._exporter, "shutdown", lambda: (given_up.append(True), shutdown())
        )
    assert given_up, "it would have tried again and again"


def test_without_the_packages_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"deepinfer-jax\[tracing\]"):
        Tracer(TracingOptions("http://127.0.0.1:4318"), 0, "")
    with pytest.raises(ValueError, match="endpoint"):
        TracingOptions("127.0.0.1:4318")
