"""Goal: `POST /profile` makes traces for whoever is on the server's machine and for nobody else,
and says what is wrong with a call that it refuses.

Method: addresses by hand; HTTP over loopback against a scripted executor.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from jax.profiler import ProfileData
from starlette.datastructures import Address

from scripts.read_trace import counted_steps
from serving.core.profiling import ProfileProblem
from serving.frontend import operators
from serving.frontend.errors import ApiError
from serving.frontend.operators import check_operator
from tests.serving.frontend.alphabet import completion, letter_at, post, wait_for
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("traces") / "made"
    options = {"server.profile_dir": str(folder)}
    with RunningService(ScriptedExecutor(letter_at, step_s=0.001), options) as running:
        yield running


def profile(service: RunningService, body: Any = None) -> httpx.Response:
    return httpx.post(f"{service.url}/profile", json=body, timeout=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
def test_callers_on_this_machine_may(host: str) -> None:
    check_operator(Address(host, 1), {})


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1", "localhost", ""])
def test_others_may_not(host: str) -> None:
    with pytest.raises(ApiError, match="this call came from") as caught:
        check_operator(Address(host, 1), {})
    assert caught.value.status == 403
    with pytest.raises(ApiError):
        check_operator(None, {})


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.1"])
def test_the_own_page_may(host: str) -> None:
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        check_operator(Address("127.0.0.1", 1), headers)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://evil.example"),
        ("localhost:8000", "http://localhost:3000"),
        ("localhost:8000", "null"),
        ("evil.example:8000", "http://evil.example:8000"),
        ("evil.example:8000", None),
        ("[", None),
        ("localhost:8000", "http://["),
    ],
)
def test_pages_of_others_may_not(host: str, origin: str | None) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    with pytest.raises(ApiError, match="Only callers on the server's machine") as caught:
        check_operator(Address("127.0.0.1", 1), headers)
    assert caught.value.status == 403


def test_a_trace_holds_the_steps_that_ran(service: RunningService) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(profile, service, {"num_steps": 4})
        while not answer.done():
            assert post(service.url, completion(max_tokens=8), "completions").status_code == 200
    made = answer.result().json()
    first, *_, last = made["steps"]
    assert made["steps"] == [first, first + 1, first + 2, first + 3]
    (file,) = Path(made["directory"]).glob("plugins/profile/*/*.xplane.pb")
    numbers = {
        int(value)
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        for name, value in event.stats
        if name == "step_num"
    }
    assert numbers >= set(made["steps"]) == counted_steps(Path(made["directory"]))


def test_without_steps_the_wait_ends(service: RunningService) -> None:
    assert profile(service, {"timeout_s": 0.01}).json()["steps"] == []


def test_one_trace_at_a_time(service: RunningService) -> None:
    def longer_trace() -> httpx.Response:
        # One of the short ones below may be first.
        while (answer := profile(service, {"num_steps": 1, "timeout_s": 30})).status_code == 409:
            pass
        return answer

    with ThreadPoolExecutor() as pool:
        longer = pool.submit(longer_trace)
        wait_for(lambda: profile(service, {"timeout_s": 0.01}).status_code == 409, "a refusal")
        post(service.url, completion(max_tokens=2), "completions")
        assert len(longer.result().json()["steps"]) == 1
    assert profile(service, {"timeout_s": 0.01}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"num_steps": "3"}, "num_steps"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 601}, "timeout_s"),
        ({"steps": 3}, "steps"),
        ([], None),
    ],
)
def test_bad_bodies(service: RunningService, body: Any, param: str | None) -> None:
    response = profile(service, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_no_folder_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder, status, text in (
        ("", 404, "server.profile_dir"),
        (str(tmp_path / "file"), 500, "cannot be written"),
    ):
        executor = ScriptedExecutor(letter_at)
        with RunningService(executor, {"server.profile_dir": folder}) as service:
            response = profile(service)
            assert response.status_code == status, response.text
            assert text in response.json()["error"]["message"]


def test_every_problem_has_a_status() -> None:
    assert set(operators._STATUS) == set(ProfileProblem)
