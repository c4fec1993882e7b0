"""How runs stand, as their roots tell it, whatever state these are in."""

import os
import time
from contextlib import contextmanager

import pytest

from ckptman.jobs.slurm.commands import Job
from ckptman.storage.catalog.writer_lock import claim
from ckptman.tools.monitoring import status as status_module
from ckptman.tools.monitoring.status import read_status
from tests.helpers.journals import make_root
from tests.tools.monitoring.invented_run import InventedRun


def status_of(root, **options):
    [found] = read_status([root], time.time(), **options)
    return found


def at_work(**fields):
    run = InventedRun(1)
    run.job("killed", 250)
    events = run.events
    events[0] |= {"total_steps": 1000, "job_id": "", **fields}
    events[-1] |= {"next_save": {"step": 300, "seconds": 90.0, "reason": "every 100 steps"}}
    return [*events, {**events[-1], "step": 251, "time": events[-1]["time"] + 2}]


@contextmanager
def claimed(root):
    held = claim(root, "invented", None)
    try:
        yield
    finally:
        held.release()


def test_a_run_at_work(tmp_path):
    root = make_root(tmp_path / "root", at_work(), [100, 200])
    with claimed(root):
        found = status_of(root)
    assert (found.state, found.step, found.total_steps, found.ranks) == ("running", 251, 1000, 8)
    assert (found.saved_step, found.checkpoints, found.places) == (200, 2, ("disk",))
    assert found.metrics["loss"] == pytest.approx(1 / 250, rel=0.1)
    assert found.step_seconds == pytest.approx(2.0, rel=0.1)
    assert found.next_save["step"] == 300
    assert found.end - time.time() == pytest.approx(749 * found.step_seconds, rel=0.05)


def test_it_was_killed_or_is_silent(tmp_path, monkeypatch):
    root = make_root(tmp_path / "root", at_work(), [200], ago_seconds=3600)
    assert status_of(root).state == "killed"
    with claimed(root):
        assert status_of(root).state == "silent"
        monkeypatch.setattr(status_module, "process_lives", lambda owner: None)  # on another machine
        assert status_of(root).state == "silent"


@pytest.mark.parametrize("ending", ["finished", "stopped", "failed"])
def test_it_has_ended(tmp_path, ending):
    run = InventedRun(2)
    run.job(ending, 120)
    found = status_of(make_root(tmp_path / "root", run.events, [100]))
    assert (found.state, found.step, found.next_save, found.end) == (ending, 120, None, None)


def test_its_next_job_waits(tmp_path, monkeypatch):
    root = make_root(tmp_path / "root", at_work(job_id="7"), [200], ago_seconds=100)
    asked = []

    def queue(ids, environ):
        asked.append(ids)
        return {"7": Job("7", "PENDING", "Resources", "", "")}

    monkeypatch.setattr(status_module, "ask_queue", queue)
    found = status_of(root)
    assert (found.state, found.queue) == ("queued", ("job 7 pending, resources",))
    assert "attempt 1 was killed" in found.reason
    assert status_of(root, slurm=False).state == "killed"
    assert asked == [{"7"}]


def test_slurm_is_asked_once_for_all_runs(tmp_path, monkeypatch):
    roots = [make_root(tmp_path / str(n), at_work(job_id=str(n)), [200]) for n in range(4)]
    calls = []
    monkeypatch.setattr(status_module, "ask_queue", lambda ids, environ: calls.append(ids))
    read_status(roots, time.time())
    assert calls == [{"0", "1", "2", "3"}]


def test_roots_without_a_run(tmp_path):
    (tmp_path / "empty").mkdir()
    empty = status_of(tmp_path / "empty")
    assert (empty.state, empty.trouble) == ("not started", "")
    gone = status_of(tmp_path / "gone")
    assert gone.state == "not started"
    assert "gone" in gone.trouble
    one = make_root(tmp_path / "root", at_work(), [200]) / "step-0000000200"
    assert "checkpoint" in status_of(one).trouble
    link = tmp_path / "link" / ".ckptman"
    link.mkdir(parents=True)
    (link / "journal.jsonl").symlink_to("/dev/zero")
    assert "is not a journal" in status_of(tmp_path / "link").trouble
    if os.getuid():
        (tmp_path / "empty").chmod(0)
        assert "permissions" in status_of(tmp_path / "empty").trouble


def test_a_long_attempt_whose_beginning_is_not_in_the_end_of_its_journal(tmp_path, monkeypatch):
    root = make_root(tmp_path / "root", at_work(), [200])
    monkeypatch.setattr(status_module, "_TAIL_BYTES", 500)
    assert status_of(root).step == 251
