"""What cannot take back a step gets each once, in order, whatever becomes of the attempts."""

import threading

import pytest

from ckptman.errors import ConfigError
from ckptman.integrations import append_only
from ckptman.integrations.append_only import AppendOnlyTracker, require
from ckptman.integrations.mlflow import MLflowTracker
from ckptman.integrations.tensorboard import TensorBoardTracker
from ckptman.integrations.wandb import WandbTracker
from ckptman.runtime.tracker import TrackedRun
from ckptman.storage.format.paths import DOT, run_folder
from tests.helpers.tracked_run import settle


class RecordedStep(AppendOnlyTracker):
    """Keeps what it gets in a list that outlives it."""

    _name = "kept"

    def __init__(self, given, live=False, begins_anew=True):
        super().__init__(live)
        self.given, self.begins_anew, self.went_back = given, begins_anew, False

    def _open(self, run, went_back):
        self.went_back = went_back
        if went_back and self.begins_anew:
            self.given.clear()
        return went_back and self.begins_anew

    def _hand_on(self, steps):
        self.given += [(each.step, each.metrics["loss"]) for each in steps]

    def _close(self, end):
        self.end = end


@pytest.fixture
def attempt(tmp_path):
    """Begins an attempt. The one before is over, killed unless it was closed."""
    run_folder(tmp_path).mkdir()
    made = []

    def kill():
        while made:
            each = made.pop()
            if each._file is not None:
                settle(each._thread)
                each._thread.leave()
                each._file.close()

    def begin(given, step, **more):
        kill()
        made.append(RecordedStep(given, **more))
        made[-1].start(TrackedRun("run", tmp_path, 1, step, 1))
        settle(made[-1]._thread)
        return made[-1]

    yield begin
    kill()


def do(tracker, steps, value):
    for step in steps:
        tracker.log(step, {"loss": value})
    settle(tracker._thread)


def saved(tracker, step):
    tracker.event("save_durable", {"step": step})
    settle(tracker._thread)


def test_a_step_is_given_when_a_checkpoint_has_it(attempt, tmp_path):
    given = []
    tracker = attempt(given, 0)
    saved(tracker, 3)  # before the steps of it have come
    do(tracker, range(1, 6), 1.0)
    assert given == [(1, 1.0), (2, 1.0), (3, 1.0)]
    saved(tracker, 4)
    assert given[3:] == [(4, 1.0)]
    # Killed, and the run goes on from a checkpoint in memory: what it does not go back behind was in a file.
    with open(tmp_path / DOT / "kept-steps.jsonl", "a") as file:
        file.write('[6, 1.0, {"lo')
    tracker = attempt(given, 5)
    assert given[4:] == [(5, 1.0)]
    do(tracker, range(6, 8), 2.0)
    tracker = attempt(given, 5)
    do(tracker, range(6, 8), 3.0)
    tracker.event("finished", {})
    tracker.close()
    assert given[5:] == [(6, 3.0), (7, 3.0)]
    assert tracker.end == "finished"


class Loading(RecordedStep):
    """Its library takes as long as the test wants."""

    def __init__(self, given, loaded):
        super().__init__(given)
        self.loaded = loaded

    def _open(self, run, went_back):
        self.loaded.wait(60)
        return super()._open(run, went_back)


def test_steps_are_in_the_file_while_the_library_is_loaded(tmp_path, monkeypatch):
    run_folder(tmp_path).mkdir()
    given = []
    killed, loaded = Loading([], threading.Event()), threading.Event()
    killed.start(TrackedRun("run", tmp_path, 1, 0, 1))
    for step in range(1, 8):
        killed.log(step, {"loss": 1.0})
        killed.event("save_durable", {"step": min(step, 5)})
    slow = Loading(given, loaded)
    slow.start(TrackedRun("run", tmp_path, 2, 5, 1))
    for step in range(6, 9):
        slow.log(step, {"loss": 2.0})
    slow.event("finished", {})
    assert given == []
    loaded.set()
    slow.close()
    assert given == [*((step, 1.0) for step in range(1, 6)), *((step, 2.0) for step in range(6, 9))]
    monkeypatch.setattr(append_only, "CLOSE_SECONDS", 0.0)
    before = (tmp_path / DOT / "kept-steps.jsonl").read_text()
    killed.close()  # as at the end of a run whose library does not come back in time
    killed.loaded.set()
    assert killed._thread.wait(60)
    assert killed.given == []
    assert (tmp_path / DOT / "kept-steps.jsonl").read_text() == before


def test_what_fails_behind_is_raised_where_the_tracker_is_called(attempt):
    tracker = attempt([], 0, live=True)
    tracker.given = None
    do(tracker, range(1, 2), 1.0)
    with pytest.raises(TypeError):
        tracker.event("progress", {})


def test_a_rollback_begins_anew_or_leaves_what_is_there(attempt):
    given = []
    tracker = attempt(given, 0)
    do(tracker, range(1, 9), 1.0)
    saved(tracker, 8)
    tracker.close()
    tracker = attempt(given, 4)
    assert tracker.went_back
    assert given == [(step, 1.0) for step in range(1, 5)]
    do(tracker, range(5, 7), 2.0)
    saved(tracker, 6)
    tracker = attempt(given, 4, begins_anew=False)
    do(tracker, range(5, 9), 3.0)
    saved(tracker, 8)
    assert given[4:] == [(5, 2.0), (6, 2.0), (7, 3.0), (8, 3.0)]
    assert not attempt(given, 8).went_back


def test_live_gives_each_at_once_and_none_twice(attempt):
    given = []
    do(attempt(given, 0, live=True), range(1, 4), 1.0)
    do(attempt(given, 2, live=True, begins_anew=False), range(3, 6), 2.0)
    assert given == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_a_loop_that_goes_back_by_itself_counts_as_it_was_last(attempt):
    given = []
    tracker = attempt(given, 0)
    do(tracker, range(1, 6), 1.0)
    do(tracker, range(3, 5), 2.0)
    saved(tracker, 4)
    assert given == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: WandbTracker("project"), r"needs wandb, which is not installed: pip install 'ckptman\[wandb\]'"),
        (lambda: MLflowTracker("runs"), r"needs mlflow, which is not installed: pip install 'ckptman\[mlflow\]'"),
        (TensorBoardTracker, r"needs tensorboard, .*: pip install 'ckptman\[tensorboard\]'"),
    ],
)
def test_a_library_that_is_missing_is_named(make, what, monkeypatch):
    monkeypatch.setattr("ckptman.integrations.append_only.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=what):
        make()


def test_a_folder_of_its_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "nowhere_else").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs nowhere_else"):
        require("nowhere_else", "wandb")
