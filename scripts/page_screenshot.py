"""A picture of the page for people, taken with a headless Chromium against a running server.

    python -m serving &
    python scripts/page_screenshot.py http://127.0.0.1:8000 FILE.png [--key KEY] [--text TEXT]

It asks the model something, with thinking, waits for the answer and for some points in the plots.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WAIT_MS = 120_000


def browser_path() -> str | None:
    """A browser of this machine; None if it has none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def page_of(url: str) -> Iterator[Page]:
    """The page of a server, in a window of its own."""
    path = browser_path()
    if path is None:
        raise SystemExit(f"no browser was found; install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        # As root, as in containers, Chromium runs without its sandbox or not at all.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(url)
            yield page
        finally:
            browser.close()


def ask(page: Page, text: str, max_tokens: int, *, thinking: bool) -> None:
    """Sends a message and waits for the end of its answer."""
    page.fill("#text", text)
    page.fill("#limit", str(max_tokens))
    page.set_checked("#thinking", thinking)
    page.click("#send")
    page.wait_for_selector("#send:enabled", timeout=_WAIT_MS)


def main() -> None:
    """Takes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the server")
    parser.add_argument("file", type=Path, help="PNG file to write")
    parser.add_argument("--key", default="", help="API key with the scope use")
    parser.add_argument("--text", default="Hello", help="what to ask")
    options = parser.parse_args()
    with page_of(options.url) as page:
        if options.key:
            page.fill("#key", options.key)
            page.press("#key", "Tab")
        for thinking in (False, True):
            ask(page, options.text, 64, thinking=thinking)
        if page.locator(".turn.assistant summary").count():
            page.locator(".turn.assistant summary").last.click()
        page.locator("#nodes td").first.wait_for()
        page.wait_for_timeout(4_000)
        page.screenshot(path=options.file)


if __name__ == "__main__":
    main()
