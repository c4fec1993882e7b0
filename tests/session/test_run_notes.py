"""What a Checkpointer tells its notifier, alone and in a chain."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ckptman
from ckptman.errors import EXIT_STALLED
from ckptman.runtime.journal import read_journal
from ckptman.runtime.notify import NOTIFY_ENV
from ckptman.runtime.outcome import ATTEMPT_ENV, CHAIN_ENV, OUTCOME_ENV
from ckptman.storage.format.paths import journal_path


@pytest.fixture
def notes():
    """What was told to `notes.append`."""
    return []


def in_a_chain(monkeypatch, tmp_path, command):
    monkeypatch.setenv(CHAIN_ENV, str(tmp_path / "chain"))
    monkeypatch.setenv(ATTEMPT_ENV, "3")
    monkeypatch.setenv(OUTCOME_ENV, str(tmp_path / "outcome-3.json"))
    monkeypatch.setenv(NOTIFY_ENV, command)


def checkpointer(root, notify):
    return ckptman.Checkpointer(root, {"n": torch.zeros(4)}, save_policy=1, notify=notify, deadline=None, signals=False)


def train(root, notify, *, error=None, code=None):
    """Two steps, and then an end of this kind."""
    with checkpointer(root, notify) as run:
        for step in range(run.restore() + 1, 3):
            run.step(step)
        if error is not None:
            raise error
        if code is not None:
            sys.exit(code)


def test_a_run_that_finishes(tmp_path, notes):
    train(tmp_path / "r", notes.append)
    [note] = notes
    assert note.pop("time") > 0
    facts = {"chain": "", "job_id": "", "attempt": 1, "step": 2, "root": str(tmp_path / "r"), "reason": ""}
    assert note == {"event": "finished", "line": f"run {tmp_path}/r: finished after step 2", **facts}


def test_a_run_that_crashes(tmp_path, notes):
    with pytest.raises(ValueError, match="no data"):
        train(tmp_path / "r", notes.append, error=ValueError("no data, PASSWORD=hunter22"))
    assert [each["line"] for each in notes] == [
        f"run {tmp_path}/r: crashed after step 2: ValueError: no data, PASSWORD=***"
    ]


def test_a_run_that_stops(tmp_path, notes):
    with pytest.raises(SystemExit):
        train(tmp_path / "r", notes.append, code=75)
    assert [each["event"] for each in notes] == ["stopped"]


def test_a_command(tmp_path):
    train(tmp_path / "r", f"cat > {tmp_path}/note")
    assert json.loads((tmp_path / "note").read_text())["event"] == "finished"


def test_a_notifier_that_fails_is_a_line_of_the_log(tmp_path, caplog):
    train(tmp_path / "r", "exit 4")
    assert [each.getMessage() for each in caplog.records if "notify failed (exit code 4)" in each.getMessage()]


def test_a_chain_with_a_notifier_tells_of_the_ends_itself(tmp_path, monkeypatch):
    in_a_chain(monkeypatch, tmp_path, f"cat >> {tmp_path}/notes")
    train(tmp_path / "r", None)
    with pytest.raises(ValueError, match="no"):
        train(tmp_path / "r", None, error=ValueError("no"))
    assert not (tmp_path / "notes").exists()


def test_in_a_chain_without_a_notifier_a_stop_is_no_news(tmp_path, monkeypatch, notes):
    in_a_chain(monkeypatch, tmp_path, "")
    with pytest.raises(SystemExit):
        train(tmp_path / "r", notes.append, code=75)
    assert notes == []
    train(tmp_path / "r", notes.append)
    assert [each["event"] for each in notes] == ["finished"]


def test_a_disk_that_is_nearly_full_is_told_of_once_also_in_a_chain(tmp_path, monkeypatch):
    in_a_chain(monkeypatch, tmp_path, f"cat >> {tmp_path}/notes")
    space = SimpleNamespace(f_bavail=10**9, f_frsize=1)
    with checkpointer(tmp_path / "r", None) as run:
        run.step(run.restore() + 1)
        run.wait()
        monkeypatch.setattr(os, "statvfs", lambda path: space)
        run.step(2)  # there is room
        run.wait()
        space.f_bavail = 1000
        run.step(3)
        run.step(4)
    [note] = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert note["event"] == "disk_nearly_full"
    assert note["chain"] == str(tmp_path / "chain")
    assert note["attempt"] == 3
    assert note["line"].startswith(f"run {tmp_path}/r: the disk is nearly full: 1000 B are free, and a save takes ")
    events, _ = read_journal(journal_path(tmp_path / "r"))
    assert [each["free_bytes"] for each in events if each["event"] == "disk_nearly_full"] == [1000]


@pytest.mark.parametrize("notify", ["", " \n", "a\0b", 3, ["mail", "me"]])
def test_what_is_no_notifier(notify, tmp_path):
    with pytest.raises(ckptman.ConfigError, match="notify is a command for the shell"):
        checkpointer(tmp_path / "r", notify)
    assert not (tmp_path / "r").exists()


STALL = """
import sys, time, torch, ckptman
with ckptman.Checkpointer("r", {"n": torch.zeros(4)}, save_policy=1, watchdog=1.0, notify=sys.argv[1]) as run:
    run.restore()
    run.step(1)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", "; sleep 1000"], ids=["good", "hangs"])
def test_a_run_that_stalls(after, tmp_path):
    command = [sys.executable, "-c", STALL, f"cat > {tmp_path}/note{after}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == EXIT_STALLED, done.stderr
    note = json.loads((tmp_path / "note").read_text())
    assert (note["event"], note["attempt"], note["step"]) == ("stalled", 1, 1)
    assert note["line"].startswith(f"run {tmp_path}/r: stalled after step 1: no sign of life for ")
