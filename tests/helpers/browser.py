"""Pages of files in a real browser, without a screen and without a network: what they ask for and complain of.

with browser() as chromium:
    with chromium.open(path, width=360, scheme="dark") as page:
        page.assert_quiet()
        page.screenshot(folder / "narrow.png")
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright import sync_api

MUST_ENV = "CKPTMAN_TEST_BROWSER"
"""must: a machine without a browser fails these tests instead of skipping them."""
LOCAL = ("file:", "data:", "blob:", "about:")
_FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]


@dataclass
class OpenPage:
    """A page that has been loaded. `tab` is what Playwright knows it by, for anything else."""

    tab: sync_api.Page
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for and are not local; none was reached."""
    errors: list[str] = field(default_factory=list)
    """Warnings and errors on the console, exceptions that nobody caught, and files that are not there."""

    def assert_quiet(self):
        """The page asked for nothing outside, and complained of nothing."""
        assert not self.requests
        assert not self.errors

    def overflow(self):
        """Pixels that the page is wider than its window."""
        return int(self.tab.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def screenshot(self, file, whole=True):
        """A picture of the whole page, or of what fits in the window."""
        self.tab.screenshot(path=file, full_page=whole)
        return file

    def pdf(self, file):
        """The page as it would be printed on A4."""
        self.tab.pdf(path=file, format="A4", print_background=True)
        return file


class Browser:
    def __init__(self, chromium):
        self._chromium = chromium

    @contextmanager
    def open(self, path, width=1280, height=900, scheme="light"):
        """Load a file (or a file: address, with its #anchor) in a window of this size in pixels; no network."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, locale="en-GB"
        )
        try:
            tab = context.new_page()
            tab.set_default_timeout(30_000)
            page = OpenPage(tab)
            # Requests of workers and frames are the context's, sockets the tab's alone.
            context.on("request", lambda each: None if each.url.startswith(LOCAL) else page.requests.append(each.url))
            tab.on("websocket", lambda each: page.requests.append(each.url))
            context.on("requestfailed", lambda each: page.errors.append(f"{each.url}: {each.failure}"))
            context.on("weberror", lambda each: page.errors.append(str(each.error)))
            context.on(
                "console",
                lambda each: page.errors.append(each.text) if each.type in ("error", "warning") else None,
            )
            address = path if isinstance(path, str) else path.resolve(strict=True).as_uri()
            tab.goto(address, wait_until="load")
            tab.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
            yield page
        finally:
            context.close()


@contextmanager
def browser():
    """Start Debian's chromium. Skip the test where it or Playwright is not installed."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        why = "no browser (Debian: apt-get install chromium; pip install playwright)"
        if os.environ.get(MUST_ENV) == "must":
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
