"""The report of runs: what programs read, and how its page looks in a real browser."""

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


def pages(*roots):
    return make_page(read_reports(roots, time.time(), slurm=False), time.time())


def test_what_programs_read(root):
    [report] = read_reports([root], time.time())
    data = json.loads(json.dumps(as_data(report)))
    ledger = data["ledger"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["total_seconds"])
    assert ledger["rank_seconds"]["training"] == pytest.approx(8 * ledger["seconds"]["training"])
    assert ledger["goodput"] == pytest.approx(ledger["seconds"]["training"] / ledger["held_seconds"])
    assert sum(data["endings"].values()) == len(data["attempts"])
    assert data["endings"]["finished"] == 1
    assert [each["step"] for each in data["checkpoints"]] == [each.step for each in report.entries]
    assert len(data["breaches"]) == len(data["health"]) == 1


def test_the_timeline_has_a_row_for_each_attempt_and_covers_the_whole_time(root):
    [report] = read_reports([root], time.time(), slurm=False)
    page = make_page([report], time.time())
    rows = re.findall(r'<div><span>(\d+)</span><div class="bar">(.*)</div></div>', page)
    assert [int(number) for number, _ in rows] == [each.number for each in report.ledger.attempts]
    widths = [float(width) for _, drawn in rows for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert page.count("&times;</b>") == report.ledger.failures
    ends = [float(left) + float(width) for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", page)]
    assert max(ends) == pytest.approx(100, abs=0.01)


def test_many_attempts_share_a_row(tmp_path):
    run = InventedRun(9)
    for _ in range(41):
        run.job("failed", 5)
    page = pages(make_root(tmp_path / "root", run.events, []))
    assert len(re.findall(r'<div class="bar">', page)) == 1
    assert page.count("&times;</b>") == 41


def test_a_page_holds_all_that_it_needs_and_takes_no_markup_from_a_run(root, tmp_path):
    text = pages(root, make_root(tmp_path / "other </script><b>", invented(6).events, []))
    assert not re.findall(r"""(?:src|href)=["']""", text)
    assert "<b>throttled" not in text
    assert "</script>" not in text
    assert text.count("training that counted") == 3
    assert "<td>GPU utilisation</td>" in text
    assert len(text) < 500_000


@pytest.mark.slow
def test_the_page_in_a_browser(root, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(pages(root, make_root(tmp_path / "other", invented(6).events, [])))
    with browser() as chromium:
        for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
            with chromium.open(page, width=width, scheme=scheme) as shown:
                shown.assert_quiet()
                assert shown.overflow() <= 0
                ink = "getComputedStyle(document.querySelector('.timeline b')).color"
                assert shown.tab.evaluate(ink) == {"light": "rgb(29, 36, 48)", "dark": "rgb(228, 232, 239)"}[scheme]
                assert shown.tab.locator(".timeline").count() == 2
        with chromium.open(page) as shown:
            assert shown.pdf(tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    run = InventedRun(7)
    run.job("in vain", 0)
    assert "starting" in pages(make_root(tmp_path / "root", run.events, []))
