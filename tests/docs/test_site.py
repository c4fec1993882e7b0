"""The pages as a site, as `make docs` builds it, looked at in a real browser."""

from pathlib import Path

import pytest

import ckptman
from tests.helpers.browser import browser
from tests.helpers.forkserver import run

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="it needs Python 3.11")
    folder = tmp_path_factory.mktemp("site")
    build = ["-m", "sphinx", "-nWEq", "--keep-going", "docs", folder]
    built = run(*build, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.timeout(300)
def test_pages_are_whole_and_ask_for_nothing(site):
    with browser() as chromium:
        for name in ("index", "command-line", "api/ckptman"):
            for width, scheme in ((360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")):
                with chromium.open(site / f"{name}.html", width=width, scheme=scheme) as page:
                    page.assert_quiet()
                    assert page.overflow() == 0, f"{name} at {width} pixels"
                    assert page.tab.evaluate("[...document.images].every(each => each.naturalWidth > 0)")
                    brightness = page.tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
                    assert (int(brightness) < 100) == (scheme == "dark")
        with chromium.open(site / "index.html") as page:
            tables = "[...document.querySelectorAll('pre')].filter(each => each.textContent.includes('┏━'))"
            assert page.tab.evaluate(f"{tables}.map(each => each.scrollWidth <= each.clientWidth)") == [True]
        with chromium.open((site / "search.html").as_uri() + "?q=rollback") as page:
            page.tab.wait_for_selector("#search-results li")
            page.assert_quiet()


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    names = set(dir(ckptman)) - {"__version__", "dcp", "errors", "policies"}
    assert not [
        name
        for name in names
        if not any(f'id="ckptman.{room}{name}"' in pages for room in ("", "errors.", "policies."))
    ]


def test_the_browser_tells_of_requests_and_errors(tmp_path):
    noisy = tmp_path / "noisy.html"
    noisy.write_text(
        "<link rel=stylesheet href='https://example.org/style.css'><img src=missing.png>"
        "<div style='width: 600px'>wide</div><script>console.warn('warned'); throw new Error('thrown')</script>"
    )
    quiet = tmp_path / "quiet.html"
    quiet.write_text("<title>quiet</title><script>console.log('fine')</script>")
    with browser() as chromium:
        with chromium.open(noisy, width=360) as page:
            assert page.requests == ["https://example.org/style.css"]
            told = "\n".join(page.errors)
            assert all(each in told for each in ("missing.png", "warned", "thrown"))
            assert page.overflow() >= 240
        with chromium.open(quiet, scheme="dark") as page:
            page.assert_quiet()
            assert page.overflow() == 0
            assert page.screenshot(tmp_path / "quiet.png").read_bytes().startswith(b"\x89PNG")
            assert page.pdf(tmp_path / "quiet.pdf").read_bytes().startswith(b"%PDF")
