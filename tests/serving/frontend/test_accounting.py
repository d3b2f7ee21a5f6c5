"""Goal: with keys, quotas and records in place, every accepted call leaves exactly one record that
agrees with what the client was told, and tenants get what is theirs and nothing else; their urgent
calls come first.

Method: HTTP against a scripted executor and a real database; the official client where errors
matter to it.
"""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving.frontend.auth import Scope, SqliteKeyStore
from serving.frontend.logs import JsonFormatter
from serving.frontend.usage import UsageRecord, read_records
from tests.serving.frontend.alphabet import (
    HELLO,
    completion,
    events_of,
    letter_at,
    letters,
    wait_for,
)
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@dataclass
class Shop:
    """A service with tenants, and what it has recorded."""

    service: RunningService
    database: Path
    keys: dict[str, str]

    def post(self, tenant: str, path: str = "/v1/completions", **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        body = completion(**changes)
        return httpx.post(f"{self.service.url}{path}", json=body, headers=headers, timeout=20)

    def record_of(self, request_id: str) -> UsageRecord:
        found = [row for row in read_records(self.database) if row.request_id == request_id]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    database = tmp_path_factory.mktemp("shop") / "service.sqlite3"
    store = SqliteKeyStore(database)
    keys = {name: store.add(name, [Scope.USE], 0)[1] for name in ("acme", "other", "small")}
    keys["root"] = store.add("root", [Scope.ADMIN], 0)[1]
    options = {"quotas.small.concurrent_max": 1, "quotas.small.requests_per_minute": 2}
    options |= {"quotas.small.context_max": 40}
    options |= {"prices.input": 2.0, "prices.cached": 0.5, "prices.output": 10.0}
    executor = ScriptedExecutor(letter_at, step_s=0.001)
    with RunningService(executor, options, database) as service:
        yield Shop(service, database, keys)


@pytest.mark.parametrize("stream", [False, True])
def test_record_agrees_with_the_answer(shop: Shop, stream: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer = shop.post("acme", prompt=["x", "yy"], max_tokens=6, stream=stream, **options)
    name = answer.headers["x-request-id"]
    record = shop.record_of(name)
    assert name in answer.text and (record.tenant, record.model) == ("acme", "tiny-v41")
    assert f'"prompt_tokens":{record.num_prompt_tokens}' in answer.text
    assert f'"completion_tokens":{record.num_generated_tokens}' in answer.text
    assert (record.num_generated_tokens, record.finish_reason) == (12, "length")
    assert record.route == "/v1/completions" and record.duration_s >= record.first_token_s > 0


def test_a_prompt_of_several_samples_is_recorded_once(shop: Shop) -> None:
    answer = shop.post("acme", prompt=[3] * 200, n=3, max_tokens=6)
    record = shop.record_of(answer.headers["x-request-id"])
    assert (record.num_prompt_tokens, record.num_generated_tokens) == (200, 18)
    assert record.num_cached_tokens == 0, "what samples share is no hit"


def test_other_dialects_are_recorded(shop: Shop) -> None:
    settings = {
        "model": "tiny-v41",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
    }
    headers = {"x-api-key": shop.keys["acme"]}
    url = f"{shop.service.url}/v1/messages"
    for stream in (False, True):
        answer = httpx.post(url, json=settings | {"stream": stream}, headers=headers, timeout=20)
        record = shop.record_of(answer.headers["x-request-id"])
        assert record.route == "/v1/messages" and record.num_generated_tokens == 5
        assert record.num_reasoning_tokens == 5, "it never stopped thinking"


def test_refused_calls_leave_no_record(shop: Shop) -> None:
    before = len(list(read_records(shop.database)))
    assert shop.post("acme", max_tokens=0).status_code == 400
    assert shop.post("root").status_code == 403
    for headers in ({}, {"authorization": "Bearer dk-wrong"}):
        answer = httpx.post(f"{shop.service.url}/v1/completions", json={}, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert len(list(read_records(shop.database))) == before


def test_hanging_up_is_recorded_once(shop: Shop) -> None:
    headers = {"authorization": f"Bearer {shop.keys['acme']}"}
    url = f"{shop.service.url}/v1/completions"
    body = completion(max_tokens=480, stream=True)
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        name = answer.headers["x-request-id"]
        next(answer.iter_bytes())
    wait_for(
        lambda: any(row.request_id == name for row in read_records(shop.database)), "the record"
    )
    record = shop.record_of(name)
    assert record.finish_reason == "abort" and 0 < record.num_generated_tokens < 480


def test_thinking_that_is_hung_up_on_is_counted(shop: Shop) -> None:
    headers = {"authorization": f"Bearer {shop.keys['acme']}"}
    url = f"{shop.service.url}/v1/chat/completions"
    body = {"model": "tiny-v41", "messages": HELLO, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        name = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        assert any('"reasoning_content":"' in line for line in lines)
        assert next(line for line in lines if line)
    wait_for(
        lambda: any(row.request_id == name for row in read_records(shop.database)), "the record"
    )
    record = shop.record_of(name)
    assert record.finish_reason == "abort"
    assert 0 < record.num_reasoning_tokens == record.num_generated_tokens


def test_scopes_of_other_routes(shop: Shop) -> None:
    def status(path: str, tenant: str | None) -> int:
        headers = {} if tenant is None else {"x-api-key": shop.keys[tenant]}
        return httpx.get(f"{shop.service.url}{path}", headers=headers).status_code

    assert [status("/health", None), status("/ready", None)] == [200, 200]
    assert [status("/metrics", who) for who in (None, "acme", "root")] == [401, 403, 200]
    assert [status("/v1/models", who) for who in (None, "acme", "root")] == [401, 200, 403]


def test_quotas_reach_the_client(shop: Shop) -> None:
    first = shop.post("small", max_tokens=100)
    assert first.json()["usage"]["completion_tokens"] < 40, "cut to the context of the tenant"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    error = shop.post("small", prompt="x y " * 30)
    assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"
    assert shop.post("small").status_code == 200
    with (
        openai.OpenAI(
            base_url=f"{shop.service.url}/v1", api_key=shop.keys["small"], max_retries=0
        ) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model="tiny-v41", prompt="x", max_tokens=3)
    headers = caught.value.response.headers
    assert shop.post("small", prompt=7).status_code == 429, "its body is not even looked at"
    assert 1 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert shop.post("other").status_code == 200


def test_cost_is_by_what_was_computed_reused_and_generated(shop: Shop) -> None:
    prompt = list(range(50, 50 + 200))
    costs: list[float] = []
    for _ in range(2):
        answer = shop.post("acme", prompt=prompt, max_tokens=4)
        costs.append(shop.record_of(answer.headers["x-request-id"]).cost)
    assert costs[0] == pytest.approx((200 * 2 + 4 * 10) / 1e6)
    assert costs[1] == pytest.approx((72 * 2 + 128 * 0.5 + 4 * 10) / 1e6)


def test_no_log_holds_keys_or_texts(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text, wrong = "a secret of mine", "dk-of-somebody-else"
    assert shop.post("acme", prompt=text, max_tokens=3).status_code == 200
    assert shop.post("acme", prompt=text, max_tokens=0).status_code == 400
    url = f"{shop.service.url}/v1/completions"
    for headers in ({"x-api-key": wrong}, {"authorization": f"Bearer {wrong}"}):
        assert httpx.post(url, json=completion(prompt=text), headers=headers).status_code == 401
    headers = {"authorization": f"Bearer {shop.keys['acme']}"}
    broken = b'{"prompt": "a secret of mine"'
    assert httpx.post(url, content=broken, headers=headers).status_code == 400
    ours = [entry for entry in caplog.records if not entry.name.startswith("http")]
    assert any(entry.name == "serving.calls" for entry in ours)
    written = "\n".join(JsonFormatter().format(entry) for entry in ours)
    for secret in (*shop.keys.values(), wrong, text):
        assert secret not in written


def test_every_answer_has_headers_for_browsers(shop: Shop) -> None:
    headers = {"authorization": f"Bearer {shop.keys['acme']}"}
    answers = [
        shop.post("acme", max_tokens=2),
        shop.post("acme", max_tokens=2, stream=True),
        shop.post("acme", max_tokens=0),
        httpx.get(f"{shop.service.url}/v1/models", headers=headers),
        httpx.get(f"{shop.service.url}/health"),
        httpx.get(f"{shop.service.url}/none"),
        httpx.get(f"{shop.service.url}/"),
        httpx.get(f"{shop.service.url}/health", headers={"x": "y" * 40_000}),
    ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff", answer.url
        assert answer.headers["x-frame-options"] == "DENY"


def test_prefixes_are_not_shared_between_tenants(shop: Shop) -> None:
    prompt = list(range(10, 10 + 200))

    def cached(tenant: str, **changes: Any) -> int:
        usage = shop.post(tenant, prompt=prompt, max_tokens=2, **changes).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("acme") == 0
    assert cached("acme") == 128 and cached("acme", cache_salt="mine") == 0
    assert cached("other") == 0 and cached("other") == 128


def test_metrics_count_by_tenant_and_under_familiar_names(shop: Shop) -> None:
    headers = {"x-api-key": shop.keys["root"]}

    def page() -> str:
        return httpx.get(f"{shop.service.url}/metrics", headers=headers).text

    def value(name: str) -> float:
        lines = [line for line in page().splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[-1]) if lines else 0.0

    calls = 'deepinfer_tenant_calls_total{tenant="other"}'
    tokens = 'deepinfer_tenant_generated_tokens_total{tenant="other"}'
    familiar = 'vllm:generation_tokens_total{model_name="tiny-v41"}'
    before = [value(name) for name in (calls, tokens, familiar)]
    assert shop.post("other", max_tokens=6).status_code == 200
    after = [value(name) for name in (calls, tokens, familiar)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 6, 6]
    text = page()
    for name in (
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_sum",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
    ):
        assert f"vllm:{name}{{" in text, name
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny-v41"}' in text


def test_fault_is_recorded_as_an_error(tmp_path: Path) -> None:
    database = tmp_path / "db"
    executor = ScriptedExecutor(letter_at, failing_step=4)
    with RunningService(executor, None, database) as service:
        url = f"{service.url}/v1/completions"
        body = completion(max_tokens=100, stream=True)
        answer = httpx.post(url, json=body, timeout=20)
        assert events_of(answer.text)[-1] == "[DONE]"
        (record,) = read_records(database)
    assert record.finish_reason == "error" and record.tenant == "local"
    assert record.request_id == answer.headers["x-request-id"]
    chunks = [json.loads(event) for event in events_of(answer.text)[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert record.num_generated_tokens == len(text), "billed is what was delivered"


def test_greedy_tenant_cannot_push_another_past_its_share(tmp_path: Path) -> None:
    database = tmp_path / "db"
    store = SqliteKeyStore(database)
    keys = {name: store.add(name, [Scope.USE], 0)[1] for name in ("greedy", "small")}
    gate = threading.Event()
    options = {"engine.decode_rows": [1], "engine.prefill_rows": 1, "engine.waiting_max": 64}
    executor = ScriptedExecutor(letter_at, gate=gate)
    with RunningService(executor, options, database) as service, ThreadPoolExecutor(20) as pool:
        shop = Shop(service, database, keys)
        held = [pool.submit(shop.post, "greedy", max_tokens=8) for _ in range(12)]
        wait_for(lambda: service.accounting.queue.num_waiting == 10, "a queue")
        late = [pool.submit(shop.post, "small", max_tokens=8) for _ in range(3)]
        wait_for(lambda: service.accounting.queue.num_waiting == 13, "a longer queue")
        gate.set()
        assert all(task.result().status_code == 200 for task in (*held, *late))
    # Rows are in the order in which the engine took the calls. Two of the greedy tenant were in
    # the engine already; then both take turns.
    taken = [row.tenant for row in read_records(database)]
    assert len(taken) == 15 and taken[:9].count("small") == 3, taken


def test_a_full_queue_is_told_like_a_quota(tmp_path: Path) -> None:
    database, gate = tmp_path / "db", threading.Event()
    _, key = SqliteKeyStore(database).add("acme", [Scope.USE], 0)
    options = {"engine.decode_rows": [1], "engine.prefill_rows": 1, "engine.waiting_max": 2}
    options |= {"quotas.acme.requests_per_minute": 100}
    executor = ScriptedExecutor(letter_at, gate=gate)
    with RunningService(executor, options, database) as service, ThreadPoolExecutor(8) as pool:
        shop = Shop(service, database, {"acme": key})
        calls = [pool.submit(shop.post, "acme", max_tokens=2) for _ in range(8)]
        counts = service.gateway.metrics.tenant("acme")
        wait_for(lambda: sum(call.done() for call in calls) > 0, "a refusal")
        gate.set()
        refused = [call.result() for call in calls if call.result().status_code == 429]
        assert counts.num_refused == len(refused) and counts.num_calls == 8 - len(refused)
    for answer in refused:
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-ratelimit-limit-requests"] == "100"


class LateGate(threading.Event):
    """Is open for the first dozen steps."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return self.num_waits <= 12 or super().wait(timeout)


def test_an_urgent_call_overtakes_a_running_one_that_fills_the_engine(tmp_path: Path) -> None:
    database = tmp_path / "db"
    store = SqliteKeyStore(database)
    keys = {"acme": store.add("acme", [Scope.USE], 0)[1]}
    root = store.add("root", [Scope.ADMIN], 0)[1]
    gate, order = LateGate(), list[str]()
    options = {"engine.decode_rows": [4], "engine.prefill_rows": 4, "engine.waiting_max": 64}
    executor = ScriptedExecutor(letter_at, gate=gate, step_s=0.001)
    with RunningService(executor, options, database) as service, ThreadPoolExecutor(2) as pool:
        shop = Shop(service, database, keys)
        queue = service.accounting.queue
        bulk = pool.submit(shop.post, "acme", prompt=[3, 4], n=8, max_tokens=40)
        bulk.add_done_callback(lambda _: order.append("bulk"))
        wait_for(lambda: gate.num_waits == 13, "the running of the first half")
        assert queue.num_running == 8
        urgent = pool.submit(shop.post, "acme", prompt=[3, 4, 5], max_tokens=2, priority=-100)
        urgent.add_done_callback(lambda _: order.append("urgent"))
        wait_for(lambda: queue.num_running + queue.num_waiting == 9, "the urgent call")
        gate.set()
        texts = [choice["text"] for choice in bulk.result().json()["choices"]]
        assert urgent.result().json()["choices"][0]["text"] == letters(3, 2)
        page = httpx.get(f"{service.url}/metrics", headers={"x-api-key": root}).text
        wait_for(lambda: queue.num_running == 0, "the return of all places")
    assert order == ["urgent", "bulk"]
    assert "\ndeepinfer_preemptions_total 1.0\n" in page
    assert texts == [letters(2, 40)] * 8, "the one that gave way has gone on"


def test_greedy_tenant_cannot_evict_what_another_has_cached(tmp_path: Path) -> None:
    database = tmp_path / "db"
    store = SqliteKeyStore(database)
    keys = {name: store.add(name, [Scope.USE], 0)[1] for name in ("greedy", "small")}
    options = {"engine.num_blocks": 13, "engine.prefix_snapshots": 6}
    with RunningService(ScriptedExecutor(letter_at), options, database) as service:
        shop = Shop(service, database, keys)

        def cached(tenant: str, number: int, salt: str = "-") -> int:
            prompt = [5 + number] * 300
            answer = shop.post(tenant, prompt=prompt, max_tokens=2, cache_salt=salt)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("small", 0) == 0 and cached("small", 0) == 256
        for number in range(12):
            # A salt of its own for each makes one tenant look like many, and is of no use.
            assert cached("greedy", number, salt=str(number)) == 0
        assert cached("greedy", 11, salt="11") == 256, "it has a share, too"
        assert cached("greedy", 0, salt="0") == 0, "all that it brought does not fit"
        assert cached("small", 0) == 256
