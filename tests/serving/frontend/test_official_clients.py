"""Goal: the official clients do what they promise their users with this server: they wait and try
again when told to, give up in time, and raise the errors of their own when a stream breaks.

Method: `openai` and `anthropic` against a scripted executor that is held back or breaks.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from serving.frontend.auth import Scope, SqliteKeyStore
from tests.serving.frontend.alphabet import HELLO, PLAIN, letter_at, wait_for
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

Client = openai.OpenAI | anthropic.Anthropic


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def held(gate: threading.Event, tmp_path: Path) -> Iterator[tuple[RunningService, str]]:
    """A service that does nothing until its gate opens, for a tenant with one call at a time."""
    database = tmp_path / "db"
    _, key = SqliteKeyStore(database).add("acme", [Scope.USE], 0)
    options = {"quotas.acme.concurrent_max": 1}
    executor = ScriptedExecutor(letter_at, gate=gate)
    with RunningService(executor, options, database) as service:
        yield service, key
        gate.set()


def make_client(kind: str, service: RunningService, key: str, **options: Any) -> Client:
    if kind == "openai":
        return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, **options)
    return anthropic.Anthropic(base_url=service.url, api_key=key, **options)


def ask(client: Client, **changes: Any) -> Any:
    if isinstance(client, openai.OpenAI):
        settings = {"model": "tiny-v41", "messages": HELLO, "max_tokens": 4} | changes
        return client.chat.completions.create(extra_body=PLAIN, **settings)
    settings = {"model": "tiny-v41", "messages": HELLO, "max_tokens": 4} | changes
    return client.messages.create(**settings)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_clients_try_again_when_they_are_told_to(
    kind: str, held: tuple[RunningService, str], gate: threading.Event
) -> None:
    service, key = held
    with make_client(kind, service, key, max_retries=3) as client:
        first = threading.Thread(target=ask, args=(client,))
        first.start()
        wait_for(lambda: len(service.executor.plans) > 0, "the first call")
        # The quota is used up until the gate opens; the answer says to come back in a second.
        threading.Timer(0.3, gate.set).start()
        assert ask(client).model == "tiny-v41"
        first.join(20)
    tenants = service.gateway.metrics.tenants["acme"]
    assert tenants.num_refused >= 1 and tenants.num_calls == 2


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_clients_give_up_in_time_and_leave_nothing_behind(
    kind: str, held: tuple[RunningService, str], gate: threading.Event
) -> None:
    service, key = held
    errors = (openai.APITimeoutError, anthropic.APITimeoutError)
    with (
        make_client(kind, service, key, max_retries=0, timeout=0.5) as client,
        pytest.raises(errors),
    ):
        ask(client)
    wait_for(lambda: service.gateway.num_open == 0, "the end of the call")
    gate.set()
    with make_client(kind, service, key, max_retries=0) as client:
        assert ask(client).model == "tiny-v41", "the quota is free again"


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_stream_that_breaks_is_an_error_of_the_client(kind: str, tmp_path: Path) -> None:
    executor = ScriptedExecutor(letter_at, failing_step=6)
    with RunningService(executor) as service:
        errors = (openai.APIError, anthropic.APIError)
        with make_client(kind, service, "none", max_retries=0) as client:
            seen = 0
            with pytest.raises(errors, match="The engine failed"):
                for _ in ask(client, max_tokens=100, stream=True):
                    seen += 1
    assert seen > 1
