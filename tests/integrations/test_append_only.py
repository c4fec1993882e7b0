"""What cannot take back a step gets each once, in order, whatever becomes of the attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptman.errors import ConfigError
from ckptman.format.paths import DOT, run_folder
from ckptman.integrations.append_only import AppendOnlyTracker, Step, require
from ckptman.integrations.mlflow import MLflowTracker
from ckptman.integrations.tensorboard import TensorBoardTracker
from ckptman.integrations.wandb import WandbTracker
from ckptman.runtime.tracker import TrackedRun


class Kept(AppendOnlyTracker):
    """Keeps what it gets in a list that outlives it."""

    _name = "kept"

    def __init__(self, given: list[tuple[int, float]], live: bool = False, begins_anew: bool = True) -> None:
        super().__init__(live)
        self.given, self.begins_anew, self.went_back = given, begins_anew, False

    def _open(self, run: TrackedRun, went_back: bool) -> bool:
        self.went_back = went_back
        if went_back and self.begins_anew:
            self.given.clear()
        return went_back and self.begins_anew

    def _hand_on(self, steps: Sequence[Step]) -> None:
        self.given += [(each.step, each.metrics["loss"]) for each in steps]

    def _close(self, end: str) -> None:
        self.end = end


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    """Begins an attempt. The one before is over, killed unless it was closed."""
    run_folder(tmp_path).mkdir()
    made: list[Kept] = []

    def kill() -> None:
        for each in made:
            if each._file is not None:
                each._file.close()

    def begin(given: list[tuple[int, float]], step: int, **more: Any) -> Kept:
        kill()
        made.append(Kept(given, **more))
        made[-1].start(TrackedRun("run", tmp_path, 1, step, 1))
        return made[-1]

    yield begin
    kill()


def do(tracker: Kept, steps: range, value: float) -> None:
    for step in steps:
        tracker.log(step, {"loss": value})


def test_a_step_is_given_when_a_checkpoint_has_it(attempt: Callable[..., Kept], tmp_path: Path) -> None:
    given: list[tuple[int, float]] = []
    tracker = attempt(given, 0)
    tracker.event("save_durable", {"step": 3})  # before the steps of it have come
    do(tracker, range(1, 6), 1.0)
    assert given == [(1, 1.0), (2, 1.0), (3, 1.0)]
    tracker.event("save_durable", {"step": 4})
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


def test_a_rollback_begins_anew_or_leaves_what_is_there(attempt: Callable[..., Kept]) -> None:
    given: list[tuple[int, float]] = []
    tracker = attempt(given, 0)
    do(tracker, range(1, 9), 1.0)
    tracker.event("save_durable", {"step": 8})
    tracker.close()
    tracker = attempt(given, 4)
    assert tracker.went_back
    assert given == [(step, 1.0) for step in range(1, 5)]
    do(tracker, range(5, 7), 2.0)
    tracker.event("save_durable", {"step": 6})
    tracker = attempt(given, 4, begins_anew=False)
    do(tracker, range(5, 9), 3.0)
    tracker.event("save_durable", {"step": 8})
    assert given[4:] == [(5, 2.0), (6, 2.0), (7, 3.0), (8, 3.0)]
    assert not attempt(given, 8).went_back


def test_live_gives_each_at_once_and_none_twice(attempt: Callable[..., Kept]) -> None:
    given: list[tuple[int, float]] = []
    do(attempt(given, 0, live=True), range(1, 4), 1.0)
    do(attempt(given, 2, live=True, begins_anew=False), range(3, 6), 2.0)
    assert given == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_a_loop_that_goes_back_by_itself_counts_as_it_was_last(attempt: Callable[..., Kept]) -> None:
    given: list[tuple[int, float]] = []
    tracker = attempt(given, 0)
    do(tracker, range(1, 6), 1.0)
    do(tracker, range(3, 5), 2.0)
    tracker.event("save_durable", {"step": 4})
    assert given == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: WandbTracker("project"), r"needs wandb, which is not installed: pip install 'ckptman\[wandb\]'"),
        (lambda: MLflowTracker("runs"), r"needs mlflow, which is not installed: pip install 'ckptman\[mlflow\]'"),
        (TensorBoardTracker, r"needs tensorboard, .*: pip install 'ckptman\[tensorboard\]'"),
    ],
)
def test_a_library_that_is_missing_is_named(
    make: Callable[[], object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptman.integrations.append_only.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=what):
        make()


def test_a_folder_of_its_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nowhere_else").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs nowhere_else"):
        require("nowhere_else", "wandb")
