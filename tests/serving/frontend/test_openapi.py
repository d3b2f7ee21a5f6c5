"""Goal: the document says what the service does: every route is in it and every route in it is
there, and whatever a client makes of it, valid or not, is answered without a fault of the server.

Method: the routes compared; schemathesis, which makes requests up from the document. A longer run:
`python -m pytest -m slow tests/serving/frontend/test_openapi.py`.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from starlette.applications import Starlette
from starlette.routing import Route

from serving.config import ServerOptions
from serving.frontend.app import make_app
from serving.frontend.openapi import document
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import is_idle, letter_at, wait_for
from tests.serving.frontend.test_gateway import make_gateway
from tests.serving.frontend.test_protocols import MODEL
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

OPERATIONS = [
    (method, path) for path, methods in document("1")["paths"].items() for method in methods
]
OTHERS = {"/", "/page/{name}", "/openapi.json"}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at)) as running:
        yield running


def test_document_and_routes_agree(service: RunningService) -> None:
    served = httpx.get(f"{service.url}/openapi.json").json()
    assert served["openapi"] == "3.1.0" and served["info"]["version"]
    gateway, _ = make_gateway()
    app: Any = make_app(gateway, MODEL, ServerOptions(), SystemClock())
    while not isinstance(app, Starlette):
        app = app._app
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.path not in OTHERS
        for method in set(route.methods or ()) - {"HEAD"}
    }
    assert routes == set(OPERATIONS)


def fuzz(service: RunningService, method: str, path: str, max_examples: int) -> None:
    """Requests made up for one operation, with the served model named where one is wanted."""
    schema = schemathesis.openapi.from_dict(document("1"))
    schema.config.base_url = service.url
    operation = schema[path][method]
    # Requests that the document allows, and others that break it.
    modes = list(GenerationMode) if method == "post" else [GenerationMode.POSITIVE]
    strategy = strategies.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @hypothesis.given(case=strategy, keeps_model=strategies.integers(0, 9))
    @hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    def run(case: Any, keeps_model: int) -> None:
        if keeps_model and isinstance(case.body, dict):
            case.body["model"] = "tiny-v41"
        response = case.call(timeout=30)
        assert response.status_code != 401
        case.validate_response(response, checks=[not_a_server_error])

    run()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_made_up_from_the_document_is_a_fault(
    service: RunningService, method: str, path: str
) -> None:
    fuzz(service, method, path, 6 if method == "post" else 2)
    wait_for(lambda: is_idle(service.url), "the end of every request")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), [pair for pair in OPERATIONS if pair[0] == "post"])
def test_nothing_made_up_in_a_long_run_is_a_fault(
    service: RunningService, method: str, path: str
) -> None:
    fuzz(service, method, path, 300)
    wait_for(lambda: is_idle(service.url), "the end of every request")
