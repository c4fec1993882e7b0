"""Stopping: one rank is asked, all stop at the same step, and what was done is on disk."""

import os
import signal
import time

import pytest
import torch.distributed as dist

import ckptman
from ckptman.checkpointer import Checkpointer
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import journal_path, outcome_path
from tests.helpers.apps import App
from tests.helpers.ranks import run_ranks

POLICY = ckptman.EverySteps(100) | ckptman.OnStop() | ckptman.BeforeDeadline(margin_seconds=1, assumed_save_seconds=1)


def run(root, when, until, seconds=None):
    """Train until told to stop; rank 1 gets SIGTERM `when`: "step 4", "before", "restore" or "never".

    `seconds`: the job has so many left when all ranks have their model.
    """
    mine = dist.get_rank() == 1
    app, losses, stopped = App((2,)), {}, None
    told = [None if seconds is None else time.time() + seconds]
    dist.broadcast_object_list(told)
    deadline = told[0]

    def ask(moment):
        if mine and moment == when:
            os.kill(os.getpid(), signal.SIGTERM)

    with ckptman.SignalHandler() as signals:
        ask("before")
        with Checkpointer(root, app.state, save_policy=POLICY, signals=signals, deadline=deadline) as checkpointer:
            try:
                start = checkpointer.restore()
            except SystemExit as leave:
                return {"left": leave.code, "exit_code": checkpointer.exit_code}
            ask("restore")
            for step in range(start + 1, until + 1):
                ask(f"step {step}")
                losses[step] = app.train_step()
                if deadline is not None:
                    time.sleep(0.05)
                reason = checkpointer.step(step)
                if checkpointer.should_stop():
                    stopped = (step, reason)
                    break
        left = None if deadline is None else deadline - time.time()
        return {"losses": losses, "stopped": stopped, "exit_code": checkpointer.exit_code, "seconds left": left}


def test_all_ranks_stop_at_the_same_step_and_the_run_goes_on_exactly(tmp_path):
    whole = run_ranks(2, run, str(tmp_path / "whole"), "never", 9)
    root = tmp_path / "parts"
    first = run_ranks(2, run, str(root), "step 4", 9)
    step, reason = first[0]["stopped"]
    assert [each["stopped"] for each in first] == [(step, reason)] * 2
    assert step in (4, 5, 6)
    assert reason == "stop asked: SIGTERM on rank 1"
    assert [each["exit_code"] for each in first] == [75, 75]
    outcome = read_outcome(outcome_path(root))
    assert (outcome.state, outcome.step, outcome.exit_code) == ("stopped", step, 75)
    second = run_ranks(2, run, str(root), "never", 9)
    for rank in range(2):
        assert first[rank]["losses"] | second[rank]["losses"] == whole[rank]["losses"]
    outcome = read_outcome(outcome_path(root))
    assert (outcome.state, outcome.exit_code, outcome.attempt) == ("finished", 0, 2)
    events = [event["event"] for event in read_journal(journal_path(root))[0]]
    assert events.count("attempt_started") == 2
    assert events.index("stop_asked") < events.index("stopped") < events.index("restored") < events.index("finished")


def test_a_signal_during_start_up_leaves_at_once_with_75(tmp_path):
    assert run_ranks(2, run, str(tmp_path), "before", 3) == [{"left": 75, "exit_code": 75}] * 2
    outcome = read_outcome(outcome_path(tmp_path))
    assert outcome.state == "stopped"
    assert not list(tmp_path.glob("step-*"))


def test_a_signal_before_the_first_step_ends_is_acted_on_in_that_step(tmp_path):
    results = run_ranks(2, run, str(tmp_path), "restore", 9)
    assert [each["stopped"] for each in results] == [(1, "stop asked: SIGTERM on rank 1")] * 2


def test_the_deadline_stops_in_time_without_a_signal(tmp_path):
    results = run_ranks(2, run, str(tmp_path), "never", 10_000, 8.0)
    assert all(each["seconds left"] > 0 for each in results)
    assert results[0]["stopped"] == results[1]["stopped"]
    assert results[0]["exit_code"] == 75
    step = results[0]["stopped"][0]
    assert (tmp_path / f"step-{step:010d}" / "manifest.json").exists()


def slow_saving(root):
    """A signal comes while a save is in the background: that save stays good, and the stop saves again."""
    app = App((2,))
    saved = []
    with ckptman.SignalHandler() as signals:
        policy = ckptman.AtStep(2) | ckptman.OnStop()
        with Checkpointer(root, app.state, save_policy=policy, signals=signals, deadline=None) as checkpointer:
            checkpointer.restore()
            for step in range(1, 20):
                app.train_step()
                reason = checkpointer.step(step)
                if reason:
                    saved.append((step, reason))
                if step == 2 and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if checkpointer.should_stop():
                    break
    return saved


def test_a_signal_during_a_save(tmp_path):
    first, second = run_ranks(2, slow_saving, str(tmp_path))
    assert first == second
    assert first[0] == (2, "at step 2")
    assert first[1][1] == "stop asked: SIGUSR2 on rank 0"
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_an_exception_in_the_loop_leaves_what_was_saved_and_says_so(tmp_path):
    app = App()
    with (
        pytest.raises(ValueError, match="bad batch"),
        Checkpointer(tmp_path, app.state, save_policy=ckptman.EverySteps(1), deadline=None) as checkpointer,
    ):
        checkpointer.restore()
        app.train_step()
        checkpointer.step(1)
        raise ValueError("bad batch")
    outcome = read_outcome(outcome_path(tmp_path))
    assert (outcome.state, outcome.exit_code, outcome.reason) == ("failed", 1, "ValueError: bad batch")
    with Checkpointer(tmp_path, App().state, deadline=None) as again:
        assert again.restore() == 1
