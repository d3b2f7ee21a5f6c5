"""Goal: the page and all that it refers to come from the package, under a policy that lets nothing
else in; what it reads of the metrics is there under those names.

Method: HTTP; the texts of the files.
"""

import re
from collections.abc import Iterator

import httpx
import pytest

from serving.frontend.web_page import STATIC_DIR
from tests.serving.frontend.alphabet import letter_at
from tests.serving.running_service import RunningService
from tests.serving.scripted import ScriptedExecutor


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(ScriptedExecutor(letter_at)) as running:
        yield running


def test_the_page_and_what_it_refers_to(service: RunningService) -> None:
    page = httpx.get(f"{service.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 2
    for path in named:
        assert path.startswith("/page/") and httpx.get(f"{service.url}{path}").status_code == 200
    # The policy forbids code and style inside the page.
    assert not re.search(r"<script>|<style|style=|onclick=", page.text)


def test_ids_that_the_code_uses_are_in_the_page() -> None:
    page = (STATIC_DIR / "index.html").read_text()
    code = (STATIC_DIR / "page.js").read_text()
    used = set(re.findall(r'byId\("([^"]+)"\)', code))
    assert used and used <= set(re.findall(r'id="([^"]+)"', page))


def test_metrics_that_the_code_reads_exist(service: RunningService) -> None:
    code = (STATIC_DIR / "page.js").read_text()
    page = httpx.get(f"{service.url}/metrics").text
    names = {f"deepinfer_{name}" for name in re.findall(r'value\("([a-z_]+)"\)', code)}
    names |= set(re.findall(r'"(deepinfer_[a-z_]+)"', code))
    assert len(names) > 6
    for name in names:
        assert re.search(rf"^{name}(_count|_sum)? ", page, re.MULTILINE), name


@pytest.mark.parametrize("name", ["none.js", "..%2fauth.py", "%2e%2e/auth.py", "__init__.py"])
def test_nothing_else_is_served(service: RunningService, name: str) -> None:
    assert httpx.get(f"{service.url}/page/{name}").status_code == 404
