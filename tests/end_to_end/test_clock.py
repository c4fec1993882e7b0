"""A clock that was never set, or is broken: the run saves and goes on, and nothing new is taken for old."""

import time

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.jobs.evidence import newest_sequence
from ckptman.policies.retention_by_time import KeepWithin
from ckptman.policies.retention_plan import plan
from ckptman.policies.retention_rules import LATEST_SECONDS, Record, is_known_time
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.session.timings import Timings
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import plan_prune
from ckptman.storage.format.paths import journal_path, outcome_path
from tests.helpers.checkpoints import commit

DAY = 86_400.0
NOW = 1_790_000_000.0
BROKEN = [-5.0, -62e9, 0.0, 300e9, 1e18]


def run(root, steps, **options):
    with ckptman.Checkpointer(root, {"x": torch.ones(4)}, **options) as checkpointer:
        start = checkpointer.restore()
        for step in range(start + 1, steps + 1):
            checkpointer.step(step)
    return start


@pytest.mark.parametrize("now", BROKEN)
def test_a_run_saves_and_goes_on(now, tmp_path, monkeypatch):
    root, policy, keep = tmp_path / "run", ckptman.EverySteps(1), KeepWithin(DAY)
    assert run(root, 2) == 0
    monkeypatch.setattr(time, "time", lambda: now)
    assert run(tmp_path / "first", 3, deadline=None) == 0
    found = Catalog(tmp_path / "first").complete()
    assert found[-1].step == 3
    assert newest_sequence(str(tmp_path / "first"), since_seconds=now) == len(found)
    assert run(root, 4, save_policy=policy, retention=keep, deadline=None) == 2
    monkeypatch.undo()
    assert run(root, 5, save_policy=policy, retention=keep) == 4
    times = [entry.require_manifest().time_seconds for entry in Catalog(root).complete()]
    assert [is_known_time(each) for each in times] == [True, False, False, True]
    assert times[1] in (0, LATEST_SECONDS), "a number that every version reads"
    outcome = read_outcome(outcome_path(root))
    assert outcome.state == "finished"
    assert [each["event"] for each in read_journal(journal_path(root))[0]].count("finished") == 3


@pytest.mark.parametrize("now", BROKEN)
def test_no_deadline_and_no_start_up_is_told_by_a_broken_clock(now):
    pace = Timings(NOW, NOW + 60.0, monotonic=iter(range(100)).__next__, wall=lambda: now)
    assert pace.facts(1, ahead=False).time_left_seconds is None
    told = pace.step_ended()
    assert 0 < told[1]["init_seconds"] < 10


def record(sequence, time_seconds):
    return Record(sequence * 100, sequence, time_seconds, 1, {})


@pytest.mark.parametrize("broken", [0.0, float(LATEST_SECONDS)])
def test_what_a_broken_clock_saved_is_as_old_as_the_next_save(broken):
    records = [record(1, broken), record(2, NOW - 9 * DAY), record(3, broken), record(4, NOW - DAY), record(5, broken)]
    verdicts = plan(records, KeepWithin(2 * DAY), now_seconds=NOW)
    assert [each.record.sequence for each in verdicts if each.keep] == [3, 4, 5]
    assert "its time is not known" in verdicts[2].reasons


@pytest.mark.parametrize("now", BROKEN)
def test_no_age_is_told_by_a_clock_that_is_broken_now(now):
    records = [record(number, NOW + number * DAY) for number in range(1, 5)]
    assert all(each.keep for each in plan(records, KeepWithin(1.0), now_seconds=now))


def test_a_listing_and_a_prune_say_so(tmp_path, capsys):
    now = time.time()
    for sequence, saved in enumerate([now - 9 * DAY, 0.0, now - 60, float(LATEST_SECONDS)], start=1):
        commit(tmp_path, sequence * 100, sequence=sequence, time_seconds=saved)
    assert main(["list", str(tmp_path)]) == 0
    ages = [
        line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["200"], ["400"])
    ]
    assert [each[0] for each in ages] == ["unknown"] * 2
    assert main(["show", str(tmp_path), "--step", "400"]) == 0
    assert "at an unknown time: the clock of that host was not set" in capsys.readouterr().out
    verdicts = plan_prune(tmp_path, KeepWithin(DAY)).verdicts
    assert [each.record.step for each in verdicts if each.keep] == [200, 300, 400]
