"""The docs as a site, looked at in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.browser import browser


@pytest.mark.slow
def test_the_browser_tells_of_requests_and_errors(tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.html"
    noisy.write_text(
        "<link rel=stylesheet href='https://example.org/style.css'><img src=missing.png>"
        "<div style='width: 600px'>wide</div><script>console.warn('warned'); throw new Error('thrown')</script>"
    )
    quiet = tmp_path / "quiet.html"
    quiet.write_text(
        "<title>quiet</title><script>console.log('fine')</script><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"
    )
    with browser() as chromium:
        with chromium.open(noisy, width=360) as page:
            assert page.requests == ["https://example.org/style.css"]
            told = "\n".join(page.errors)
            assert all(each in told for each in ("missing.png", "warned", "thrown"))
            assert page.overflow() >= 240
        with chromium.open(quiet, scheme="dark") as page:
            page.assert_quiet()
            assert page.overflow() == 0
            assert page.tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
            assert page.screenshot(tmp_path / "quiet.png").read_bytes().startswith(b"\x89PNG")
            assert page.pdf(tmp_path / "quiet.pdf").read_bytes().startswith(b"%PDF")
