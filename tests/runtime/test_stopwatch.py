"""What a run says it took is what a clock outside shows."""

import types

import pytest
import torch

import ckptman
from ckptman.runtime import stopwatch
from ckptman.runtime.journal import read_journal
from ckptman.runtime.stopwatch import Stopwatch
from ckptman.storage.format.paths import journal_path


class Clock:
    """Stands still but for what is said to take its time."""

    seconds = 100.0

    def takes(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", types.SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def test_parts_add_up_to_the_whole(clock):
    watch = Stopwatch()
    for part, seconds in (("find", 1.0), ("read", 2.0), ("find", 0.5)):
        clock.takes(seconds)
        watch.ends(part)
    clock.takes(9)
    assert (watch.parts, watch.seconds) == ({"find": 1.5, "read": 2.0}, 3.5)


class Slow:
    """State that takes its time, in seconds of the clock."""

    def __init__(self, clock, tensor):
        self.clock, self.tensor = clock, tensor

    def state_dict(self):
        self.clock.takes(3)
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.clock.takes(50)
        self.tensor = state["tensor"]


@pytest.mark.parametrize("async_save", [True, False])
def test_lines_of_restores_and_saves_say_the_whole_time_of_the_call(tmp_path, clock, async_save):
    def run():
        state = {"slow": Slow(clock, torch.ones(9))}
        return ckptman.Checkpointer(tmp_path, state, async_save=async_save, deadline=None)

    with run() as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
        begun = clock.seconds
        checkpointer.step(2)
        step_seconds = clock.seconds - begun  # which a step without a save takes, too
        begun = clock.seconds
        checkpointer.save(3)
        saved_seconds = clock.seconds - begun - step_seconds
    with run() as checkpointer:
        begun = clock.seconds
        checkpointer.restore()
        restored_seconds = clock.seconds - begun
    events = {each["event"]: each for each in read_journal(journal_path(tmp_path))[0]}
    saved, restored = events["save_durable"], events["restored"]
    assert saved["stall_seconds"] == saved_seconds > 0
    assert saved["seconds"] >= saved_seconds if async_save else saved["seconds"] == saved_seconds
    assert restored["seconds"] == restored_seconds > 50
    for event in (saved, restored):
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"])
    assert {"agree", "find", "plan", "read", "fill", "prepare"} == {*events["restored"]["parts"]}
