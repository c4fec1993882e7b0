"""The journal and the trackers hear of the steps that end, and the loop does not wait for either."""

import gc
import os
import signal
import subprocess
import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.errors import ConfigError
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.session import step_reporter
from ckptman.session.step_reporter import TrackerQueue
from ckptman.storage.format.paths import journal_path, outcome_path
from tests.helpers.fake_device import fake_devices
from tests.helpers.tracked_run import drain, settle


class Recorder(ckptman.Tracker):
    def __init__(self):
        self.calls = []

    def start(self, run):
        self.calls.append(("start", run.attempt, run.step))

    def log(self, step, metrics):
        self.calls.append(("log", step, metrics))

    def event(self, name, fields):
        self.calls.append(("event", name, fields))

    def close(self):
        self.calls.append(("close",))

    def of(self, kind):
        return [each[1:] for each in self.calls if each[0] == kind]


class Odd:
    def __float__(self):
        raise KeyError("not a number")


class Raising(ckptman.Tracker):
    def log(self, step, metrics):
        raise OSError("no room")


class Hanging(ckptman.Tracker):
    def __init__(self):
        self.leave = threading.Event()

    def log(self, step, metrics):
        self.leave.wait(60)


def progress(root):
    return [each for each in read_journal(journal_path(root))[0] if each["event"] == "progress"]


def checkpointer_in(root, *trackers, **more):
    state = {"model": torch.nn.Linear(2, 2)}
    more = {"save_policy": ckptman.EverySteps(1000), **more}
    return ckptman.Checkpointer(root, state, trackers=trackers, **more)


@pytest.fixture
def each_step(monkeypatch):
    monkeypatch.setattr(step_reporter, "PROGRESS_SECONDS", 0.0)


def test_progress_after_the_first_step_and_at_the_end(tmp_path):
    with checkpointer_in(tmp_path) as checkpointer:
        start = checkpointer.restore()
        for step in range(start + 1, 8):
            checkpointer.step(step, {"loss": torch.tensor(step / 2), "label": "x", "odd": Odd(), "many": torch.ones(2)})
        checkpointer.save(7)
        checkpointer.wait()
    events = [each["event"] for each in read_journal(journal_path(tmp_path))[0]]
    first, last = progress(tmp_path)
    assert (first["step"], first["steps"], first["metrics"]) == (1, 1, {"loss": 0.5})
    assert (last["step"], last["steps"], last["metrics"]) == (7, 6, {"loss": 3.5})
    assert 0 <= last["stall_seconds"] < 60
    assert last["seconds"] >= 0
    assert events[-2:] == ["progress", "finished"]


def test_what_saves_block_is_added_up(tmp_path, each_step):
    with checkpointer_in(tmp_path, save_policy=ckptman.EverySteps(2), async_save=False) as checkpointer:
        for step in range(1, 6):
            checkpointer.step(step)
    events, _ = read_journal(journal_path(tmp_path))
    stalls = [each["stall_seconds"] for each in events if each["event"] == "save_durable"]
    told = progress(tmp_path)
    assert [each["step"] for each in told] == [1, 2, 3, 4, 5]
    assert [each["steps"] for each in told] == [1] * 5
    assert told[0]["stall_seconds"] == 0.0
    assert events[-1]["stall_seconds"] >= sum(stalls) > 0
    assert told == sorted(told, key=lambda each: each["stall_seconds"])


@pytest.mark.parametrize("how", ["raise", "stop", "nothing"])
def test_the_end_is_told_however_it_comes(how, tmp_path):
    recorder = Recorder()
    with suppress(KeyboardInterrupt), checkpointer_in(tmp_path, recorder, signals=True) as checkpointer:
        checkpointer.restore()
        for step in range(1, 5):
            checkpointer.step(step, {"loss": 1.0})
            if how == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.should_stop():
                break
        if how == "raise":
            raise KeyboardInterrupt
    end = {"raise": "failed", "stop": "stopped", "nothing": "finished"}[how]
    told = [each["event"] for each in read_journal(journal_path(tmp_path))[0]]
    assert told[-1] == end
    assert sum(each["steps"] for each in progress(tmp_path)) == checkpointer._timings.previous_step
    assert recorder.calls[0] == ("start", 1, 0)
    assert [step for step, _ in recorder.of("log")] == [*range(1, checkpointer._timings.previous_step + 1)]
    assert [name for name, _ in recorder.of("event")][-1] == end
    assert recorder.calls[-1] == ("close",)


def test_a_loop_that_ends_no_step_tells_nothing(tmp_path):
    recorder = Recorder()
    with checkpointer_in(tmp_path, recorder) as checkpointer:
        checkpointer.restore()
    assert progress(tmp_path) == []
    assert [each[0] for each in recorder.calls if each[0] != "event"] == ["start", "close"]


def test_trackers_hear_of_each_attempt_and_of_going_back(tmp_path):
    for attempt in (1, 2):
        recorder = Recorder()
        with checkpointer_in(tmp_path, recorder, save_policy=ckptman.EverySteps(1)) as checkpointer:
            start = checkpointer.restore()
            assert recorder.of("log") == []
            for step in (start + 1, start + 2, start + 3):
                checkpointer.step(step, {"loss": float(step)} if step != start + 2 else None)
            checkpointer.save(start + 3)
            checkpointer.wait()
            checkpointer.restore(start + 2)
            checkpointer.step(start + 3, {"loss": 0.0})
        assert recorder.of("start") == [(attempt, start), (attempt, start + 2)]
        assert recorder.of("log") == [
            (start + 1, {"loss": float(start + 1)}),
            (start + 3, {"loss": float(start + 3)}),
            (start + 3, {"loss": 0.0}),
        ]


def test_a_tracker_that_raises_or_hangs_is_told_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(step_reporter, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(step_reporter, "MOST_WAITING", 5)
    monkeypatch.setattr(step_reporter, "LOOK_SECONDS", 0.0)
    recorder, hanging = Recorder(), Hanging()
    with checkpointer_in(tmp_path, Raising(), hanging, recorder) as checkpointer:
        for step in range(1, 21):
            checkpointer.step(step, {"loss": 1.0})
            drain_but(checkpointer, hanging)
    hanging.leave.set()
    failed = [each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "tracker_failed"]
    assert {(each["tracker"], each["cause"].partition(":")[0]) for each in failed} == {
        ("Raising", "OSError in log()"),
        ("Hanging", "it is too slow"),
    }
    assert len(failed) == 2
    assert recorder.of("log")[-1] == (20, {"loss": 1.0})
    assert len([each for each in caplog.messages if "it did not end within 0.5 s" in each]) == 1
    assert len([each for each in caplog.messages if "no room" in each]) == 1


def drain_but(checkpointer, but):
    """Let all have what there is now, but for one."""
    assert checkpointer._reporter is not None
    outlets = [each for each in checkpointer._reporter._trackers._threads if each.tracker is not but]
    for thread in [checkpointer._reporter._thread, *(each.thread for each in outlets)]:
        done = threading.Event()
        thread.put(done.set)
        assert done.wait(60)


def test_what_a_tracker_starts_does_not_end_by_what_asks_the_run_to_stop(tmp_path):
    class Starting(ckptman.Tracker):
        def start(self, run):
            self.process = subprocess.Popen(["sleep", "60"])

        def close(self):
            self.process.kill()
            self.process.wait()

    starting = Starting()
    with checkpointer_in(tmp_path, starting) as checkpointer:
        checkpointer.restore()
        drain(checkpointer)
        status = Path(f"/proc/{starting.process.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert blocked & 1 << (signal.SIGTERM - 1)


def test_metrics_on_a_device_are_not_waited_for(tmp_path, each_step):
    with fake_devices() as device, checkpointer_in(tmp_path, Recorder()) as checkpointer:
        with device.main.held():
            for step in range(1, 4):
                checkpointer.step(step, {"loss": device.tensor(torch.tensor(step / 2)), "rate": 0.5})
            drain_but(checkpointer, None)
            assert progress(tmp_path) == []
        with device.capture():  # which breaks where any thread asks the device
            drain_but(checkpointer, None)
    told = progress(tmp_path)
    assert (told[-1]["step"], told[-1]["metrics"]) == (3, {"loss": 1.5, "rate": 0.5})
    assert sum(each["steps"] for each in told) == 3


def test_what_a_device_that_fails_had_is_left_out(tmp_path):
    with (
        fake_devices() as device,
        suppress(ZeroDivisionError),
        device.main.held(),
        checkpointer_in(tmp_path) as checkpointer,
    ):
        checkpointer.step(1, {"loss": device.tensor(torch.tensor(1.5)), "rate": 0.5})
        raise ZeroDivisionError
    assert [(each["step"], each["metrics"]) for each in progress(tmp_path)] == [(1, {})]


@pytest.mark.leaves("ckptman-")
def test_a_checkpointer_that_nobody_has_any_more_goes_away(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = checkpointer_in(tmp_path, Recorder(), signals=False)
        checkpointer.step(1, {"loss": 1.0})
        gone = weakref.ref(checkpointer)
        del checkpointer
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("trackers", [Recorder(), [Recorder], ["wandb"]])
def test_what_is_no_tracker_is_refused(trackers, tmp_path):
    with pytest.raises(ConfigError, match=r"ckptman\.Tracker"):
        ckptman.Checkpointer(tmp_path, {"step": 0}, trackers=trackers)


@pytest.mark.parametrize("how", ["finished", "failed"])
@pytest.mark.leaves("ckptman-")
def test_ctrl_c_while_the_end_is_told_leaves_an_outcome_and_a_free_root(tmp_path, monkeypatch, how):
    def interrupted(self, *, wait):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt, ValueError):
        patch.setattr(step_reporter.StepReporter, "finish", interrupted)
        with checkpointer_in(tmp_path / "root") as checkpointer:
            checkpointer.step(1, {"loss": 1.0})
            if how == "failed":
                raise ValueError("boom")
    outcome = read_outcome(outcome_path(tmp_path / "root"))
    assert outcome is not None
    assert outcome.state == how
    with checkpointer_in(tmp_path / "root") as checkpointer:
        checkpointer.restore()


def test_a_saved_step_is_handed_on_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(step_reporter, "LOOK_SECONDS", 3600.0)
    told = threading.Event()

    class Waiting(Recorder):
        def log(self, step, metrics):
            super().log(step, metrics)
            if step == 5:
                told.set()

    tracker = Waiting()
    with checkpointer_in(tmp_path / "root", tracker, save_policy=ckptman.EverySteps(5)) as checkpointer:
        for step in range(1, 8):
            checkpointer.step(step, {"loss": 1 / step})
        assert told.wait(30)
        assert [step for step, _ in tracker.of("log")] == [1, 2, 3, 4, 5]


class NoTextError(Exception):
    def __str__(self):
        raise ValueError("no text")


class Speechless(ckptman.Tracker):
    def log(self, step, metrics):
        raise NoTextError


def test_an_error_without_a_text_is_told_of_by_its_name(tmp_path, caplog):
    with ckptman.Checkpointer(tmp_path, {"step": 0}, signals=None, trackers=[Speechless()]) as checkpointer:
        checkpointer.step(1, {"loss": 1.0})
    assert "NoTextError in log(). Training goes on without it" in caplog.text


def test_what_waits_is_bounded_by_its_numbers(monkeypatch):
    monkeypatch.setattr(step_reporter, "MOST_NUMBERS", 10)
    thread, got = TrackerQueue("a test"), list[int]()
    thread.put(got.append, 0)  # no step: it is not dropped
    for step in (1, 2, 3, 4):
        thread.put(got.append, step, numbers=4)
    thread.start()
    settle(thread)
    assert (got, thread.dropped) == ([0, 3, 4], 2)
    thread.put(got.append, 5, numbers=10)
    thread.end()
    assert thread.wait(60)
    assert (got, thread.dropped) == ([0, 3, 4, 5], 2)


def test_a_thread_that_was_left_makes_no_further_call():
    thread, begun, leave, got = TrackerQueue("a test"), threading.Event(), threading.Event(), list[int]()

    def hang():
        begun.set()
        leave.wait(60)

    thread.put(hang)
    thread.put(got.append, 1)
    thread.start()
    assert begun.wait(60)
    thread.leave()
    thread.put(got.append, 2)
    leave.set()
    assert thread.wait(60)
    assert got == []


def test_a_tracker_is_given_once(tmp_path):
    tracker = Raising()
    with pytest.raises(ConfigError, match="trackers has the same Raising twice: each needs its own object"):
        ckptman.Checkpointer(tmp_path, {"step": 0}, trackers=[tracker, Raising(), tracker])


def run(root, measured, saved=(), policy=10):
    """What is warned of, where a metric is given at some steps, and some are saved by hand."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keeps = ckptman.KeepLast(2) | ckptman.KeepBest("val_loss")
        with ckptman.Checkpointer(root, {"n": 0}, save_policy=policy, retention=keeps, deadline=None) as checkpointer:
            for step in range(1, 40):
                metrics = {"loss": 1.0, **({"val_loss": 2.0} if step in measured else {})}
                checkpointer.step(step, metrics)
                if step in saved:
                    checkpointer.save(step, metrics)
    return [str(each.message) for each in told if "KeepBest" in str(each.message)]


@pytest.mark.parametrize(("measured", "saved"), [((), ()), ((10, 20), ()), ((7,), (7,)), ((5, 10, 15, 20), ())])
def test_a_metric_that_saves_have_is_no_news(tmp_path, measured, saved):
    assert run(tmp_path, measured, saved) == []


def test_a_metric_that_no_save_has_is_told_once(tmp_path):
    (told,) = run(tmp_path, (7, 14, 21, 28))
    assert "val_loss was given at step 7, which was not saved, and not at step 10, which is" in told
    assert "save(step, metrics)" in told
