"""The report of runs: what it says, and how its page looks in a real browser."""

import json
import re
import time

import pytest

from ckptman.tools.monitoring.page import make_page
from ckptman.tools.monitoring.report import as_data, read_reports
from tests.helpers.browser import browser
from tests.helpers.journals import make_root
from tests.tools.monitoring.invented_run import InventedRun, invented

HEALTH = {"figures": {"utilisation": {"min": 0.6, "median": 0.93, "max": 0.99}}}


@pytest.fixture
def root(tmp_path):
    run = invented(5)
    place = len(run.events) // 2
    attempt = run.events[place]["attempt"]
    told = [{"time": run.events[place]["time"], "event": "health", "attempt": attempt, **HEALTH}]
    told.append({**told[0], "event": "health_breach", "text": "rank 3 on n7: <b>throttled</b> for 5 min"})
    run.events[place:place] = told
    return make_root(tmp_path / "root", run.events, [run.durable_step - 50, run.durable_step])


def test_what_programs_read(root):
    [report] = read_reports([root], time.time())
    data = json.loads(json.dumps(as_data(report)))
    ledger = data["ledger"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["total_seconds"])
    assert ledger["rank_seconds"]["training"] == pytest.approx(8 * ledger["seconds"]["training"])
    assert sum(data["endings"].values()) == len(data["attempts"])
    assert data["endings"]["finished"] == 1
    assert data["metric"] == "loss"
    assert sum(len(curve["steps"]) for curve in data["curves"]) <= 2100
    assert [each["step"] for each in data["checkpoints"]] == [each.step for each in report.entries]
    assert len(data["breaches"]) == len(data["health"]) == 1


@pytest.mark.slow
def test_the_page_in_a_browser(root, tmp_path):
    other = make_root(tmp_path / "other </script><b>", invented(6).events, [])
    page = tmp_path / "report.html"
    page.write_text(make_page(read_reports([root, other], time.time()), time.time()))
    assert page.stat().st_size < 2_000_000
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text.replace('xlink:href="#', ""))
    assert "<b>throttled" not in text
    with browser() as chromium:
        for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
            with chromium.open(page, width=width, scheme=scheme) as shown:
                shown.assert_quiet()
                assert shown.overflow() <= 0
                shown.screenshot(tmp_path / f"{width}-{scheme}.png")
                ink = "getComputedStyle(document.querySelector('svg text')).fill"
                assert shown.tab.evaluate(ink) == {"light": "rgb(29, 36, 48)", "dark": "rgb(228, 232, 239)"}[scheme]
                assert shown.tab.locator("svg").count() == 1 + 2 * 4 + 1
                assert shown.tab.get_by_text("training that counted").count() == 3
        with chromium.open(page) as shown:
            assert shown.pdf(tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    run = InventedRun(7)
    run.job("in vain", 0)
    page = make_page(read_reports([make_root(tmp_path / "root", run.events, [])], time.time()), time.time())
    assert "starting" in page


def test_a_metric_that_is_not_finite_is_drawn_as_a_gap(tmp_path):
    run = InventedRun(8)
    run.job("stopped", 100)
    for event in run.events[::2]:
        if "metrics" in event:
            event["metrics"] = {"loss": "nan"}
    [report] = read_reports([make_root(tmp_path / "root", run.events, [])], time.time())
    assert "loss" in make_page([report], time.time()).lower()
    assert report.metric == "loss"
