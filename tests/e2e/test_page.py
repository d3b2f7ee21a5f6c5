"""Goal: a person can use the page: chat with streaming, thinking folded away, images, errors in
words, and see how the server is doing, with a key where keys are needed and nothing without.

Method: a headless Chromium of this machine against a service with a scripted executor.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from scripts.page_screenshot import ask, browser_path, page_of
from serving.frontend.auth import Scope, SqliteKeyStore
from tests.serving.frontend.alphabet import LETTERS, THINK_END
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor

pytestmark = pytest.mark.skipif(browser_path() is None, reason="this machine has no Chromium")
"""The checks of a change install one: see `.ci/run`."""

PERIOD = 20


def script(position: int) -> int:
    """Thinking ends at every twentieth token; letters else."""
    return THINK_END if position % PERIOD == 9 else LETTERS[position % 26]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, str]]:
    database = tmp_path_factory.mktemp("page") / "db"
    _, key = SqliteKeyStore(database).add("acme", [Scope.USE, Scope.ADMIN], 0)
    with RunningService(ScriptedExecutor(script, step_s=0.002), None, database) as running:
        yield running, key


@pytest.fixture
def page(service: tuple[RunningService, str]) -> Iterator[Page]:
    with page_of(service[0].url) as made:
        problems: list[str] = []
        made.on("pageerror", lambda error: problems.append(str(error)))
        yield made
        assert not problems


def give_key(page: Page, key: str) -> None:
    page.fill("#key", key)
    page.press("#key", "Tab")
    expect(page).to_have_title("tiny-v41")


def test_without_a_key_nothing_is_shown(page: Page) -> None:
    expect(page.locator("#state")).to_contain_text("API key")
    assert page.locator("#nodes td").count() == 0
    ask(page, "Hello", 8, thinking=False)
    assert "API key" in page.locator(".turn.error").inner_text()


def test_chat_thinking_and_image(
    page: Page, service: tuple[RunningService, str], tmp_path: Path
) -> None:
    give_key(page, service[1])
    ask(page, "Hello", 12, thinking=False)
    assert len(page.locator(".turn.assistant > span").inner_text()) >= 11
    ask(page, "Think", 60, thinking=True)
    turn = page.locator(".turn.assistant").last
    assert turn.locator("details").count() == 1
    assert not turn.locator("details > span").is_visible(), "thinking is folded away"
    turn.locator("summary").click()
    assert len(turn.locator("details > span").inner_text()) > 0
    assert len(turn.locator(":scope > span").inner_text()) > 10
    file = tmp_path / "picture.png"
    Image.new("RGB", (40, 30), "teal").save(file)
    page.set_input_files("#image", file)
    ask(page, "Look", 8, thinking=False)
    assert page.locator(".turn.user img").count() == 1
    assert any(plan.images for plan in service[0].executor.plans), "it reached the engine"
    assert page.locator(".turn.error").count() == 0
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_a_long_answer_can_be_stopped(page: Page, service: tuple[RunningService, str]) -> None:
    give_key(page, service[1])
    page.fill("#text", "Go on")
    page.fill("#limit", "400")
    page.click("#send")
    expect(page.locator(".turn.assistant > span")).to_have_text(re.compile(".{6,}"))
    page.click("#stop")
    page.wait_for_selector("#send:enabled")
    assert page.locator(".turn.error").inner_text() == "Stopped"


def test_workers_of_a_cluster_and_the_store(
    page: Page, service: tuple[RunningService, str]
) -> None:
    engine = {"num_prefilling": 1, "num_decoding": 4, "num_waiting": 2}
    nodes = [
        {"node": "decode/7", "state": "ready", "status": {"engine": engine}},
        {"node": "prefill/3", "state": "silent", "status": None},
    ]
    page.route("**/cluster", lambda route: route.fulfill(json={"nodes": nodes}))
    page.route("**/admin/cache", lambda route: route.fulfill(json={"disk_bytes": 4711}))
    page.reload()
    give_key(page, service[1])
    expect(page.locator("#nodes")).to_contain_text("decode/7ready52")
    expect(page.locator("#nodes")).to_contain_text("prefill/3silent")
    expect(page.locator("#tiers")).to_contain_text("store: disk bytes4711")


def test_how_the_server_is_doing(page: Page, service: tuple[RunningService, str]) -> None:
    give_key(page, service[1])
    ask(page, "Hello", 40, thinking=False)
    page.locator("#plots figure").nth(6).wait_for()
    captions = " ".join(page.locator("figcaption").all_inner_texts())
    for name in ("Running", "Waiting", "KV memory", "Tokens", "Prompt reused", "First token"):
        assert name in captions
    page.locator("#nodes td").first.wait_for()
    nodes = page.locator("#nodes").inner_text()
    assert "frontend/0" in nodes and "mesh_worker/0" in nodes and "serving" in nodes
    assert "64 blocks" in page.locator("#tiers").inner_text()
    assert "acme" in page.locator("#tenants").inner_text()
    assert len(page.locator("#plots polyline").first.get_attribute("points") or "") > 5
