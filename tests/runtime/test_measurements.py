"""What a journal says about earlier attempts; and attempts with a deadline close by that go by it."""

import json
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch

import ckptman
from ckptman import checkpointer as checkpointer_module
from ckptman.policies.save_policies import SavePolicy
from ckptman.runtime.journal import Journal, read_journal
from ckptman.runtime.measurements import save_seconds, steps_per_second, typical_save_seconds
from ckptman.runtime.outcome import reported_nodes
from ckptman.session.timings import Timings
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.durable_files import DISK, Disk
from tests.helpers.faulty_disk import on_disk


def durable(*seconds):
    return [{"time": 1.0, "event": "save_durable", "attempt": 1, "step": 1, "seconds": each} for each in seconds]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        (durable(3), 3.0),
        (durable(3.0, 90.0), 90.0),
        (durable(90.0, 80.0, 5.0, 1.0, 2.0, 3.0, 4.0), 4.0),
        ([{"time": 1.0, "event": "save_staged", "seconds": 7.0}, *durable(2.0)], 2.0),
    ],
)
def test_a_save_takes_what_the_longest_but_one_of_the_last_five_took(events, expected):
    assert typical_save_seconds(events) == expected


def test_steps_per_second_are_those_of_training_alone():
    def event(name, time, attempt=1, **more):
        return {"event": name, "time": time, "attempt": attempt, **more}

    assert steps_per_second([]) is None
    saves = [event("first_step", 100.0, step=1), event("save_begun", 110.0, step=21)]
    assert steps_per_second(saves[:1]) is None
    assert steps_per_second(saves) == 2.0
    saves += [event("save_durable", 115.0, step=21, stall_seconds=5.0), event("save_begun", 135.0, step=61)]
    assert steps_per_second(saves) == 2.0
    pace = [*saves, event("pace_changed", 136.0, step=62, step_seconds=0.25)]
    assert steps_per_second(pace) == 4.0
    # The first `progress` has the slow first step in it, and saves stalled the last one for 10 s.
    progress = [
        event("progress", 200.0, 2, steps=1, seconds=40.0, stall_seconds=1.0),
        event("progress", 230.0, 2, steps=240, seconds=30.0, stall_seconds=1.0),
        event("progress", 260.0, 2, steps=160, seconds=30.0, stall_seconds=11.0),
    ]
    assert steps_per_second([*pace, *progress]) == 8.0
    assert steps_per_second([*pace, *progress[:1]]) == 4.0, "the attempt before tells more"
    assert steps_per_second([event("progress", 1.0, steps="x", seconds=None), event("pace_changed", 2.0)]) is None


GARBAGE = [None, True, "12", "nan", float("nan"), float("inf"), -1, -0.5, 10**400, [3], {"s": 3}]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda each: repr(each)[:9])
def test_garbage_is_passed_over(garbage):
    assert typical_save_seconds(durable(garbage)) is None
    assert typical_save_seconds(durable(4.0, *[garbage] * 9)) == 4.0
    assert typical_save_seconds([{"time": 1.0, "event": garbage, "seconds": 5.0}, {"time": 1.0}]) is None


def test_a_journal_that_is_not_there_or_cannot_be_read_says_nothing(tmp_path):
    path = journal_path(tmp_path)
    assert save_seconds(tmp_path) is None
    assert save_seconds(str(tmp_path / "nowhere")) is None
    path.mkdir(parents=True)
    assert save_seconds(tmp_path) is None, "a folder"
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    assert save_seconds(tmp_path) is None, "a link"
    path.unlink()
    path.write_bytes(b'\xff\0{"torn\n[1]\n' + json.dumps(durable(2.5)[0]).encode() + b'\n{"time": 1, "event')
    assert save_seconds(tmp_path) == 2.5


STEP_SECONDS = 1.0


def train(root, left_seconds, policy, disk=DISK, **options):
    """One attempt, on simulated time with steps of 1 s: the steps it saved at, and why; until it is told to stop."""
    now, saved, state = [time.time()], [], {"x": torch.zeros(3)}
    deadline = None if left_seconds is None else now[0] + left_seconds
    clock = lambda: now[0]  # noqa: E731
    with (
        mock.patch.object(checkpointer_module, "Timings", partial(Timings, monotonic=clock, wall=clock)),
        on_disk(disk),
        ckptman.Checkpointer(root, state, save_policy=policy, deadline=deadline, **options) as checkpointer,
    ):
        start = checkpointer.restore()
        for step in range(start + 1, start + 301):
            state["x"] += 1
            now[0] += STEP_SECONDS
            if reason := checkpointer.step(step):
                saved.append((step - start, reason))
            if checkpointer.should_stop():
                return saved
    return saved


def test_the_first_attempt_measures_a_save_and_then_trains_on_until_shortly_before_its_end(tmp_path):
    first, last = train(tmp_path, 100.0, ckptman.BeforeDeadline(), async_save=False)
    assert first[0] == 1
    assert first[1].startswith("first save, to measure its cost: 99 s left before the deadline, 211 s needed")
    assert 40 < last[0] <= 70, "about 30 s are left: the margin"
    assert "1.5 x save of " in last[1]


def test_the_next_attempt_goes_by_the_journal(tmp_path):
    train(tmp_path, None, ckptman.AtStep(3))
    journal = Journal(journal_path(tmp_path))
    for seconds in (500.0, 400.0, 20.0, 1.0, 2.0, 3.0):
        journal.record("save_durable", step=1, seconds=seconds)
    journal.close()
    [(steps, reason)] = train(tmp_path, 100.5, ckptman.BeforeDeadline())
    assert (steps, reason) == (
        40,
        "60.5 s left before the deadline, 61 s needed (1.5 x save of 20 s + margin of 30 s + step of 1 s)",
    )


def test_an_interval_that_measures_what_a_save_blocks_still_does_so_in_each_attempt(tmp_path):
    for _ in range(2):
        saved = train(tmp_path, None, ckptman.DalyInterval(mtbf_seconds=1e9))
        assert saved[0][1] == "first save, to measure its cost"


class HeldDisk(Disk):
    """A disk on which nothing becomes durable before it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def rename(self, source, target):
        if target.name.startswith("step-"):
            self.go.wait(60)
        super().rename(source, target)


class LettingGo(SavePolicy):
    """The policy behind it; lets go of the disk when that wants to leave."""

    def __init__(self, policy, disk):
        self.policy, self.disk = policy, disk

    def decide(self, facts):
        decision = self.policy.decide(facts)
        if decision is not None and decision.stop:
            self.disk.go.set()
        return decision


def test_a_first_save_that_takes_long_is_not_waited_for_beyond_what_leaves_time_for_the_last(tmp_path):
    disk = HeldDisk()
    first, last = train(tmp_path, 100.5, LettingGo(ckptman.BeforeDeadline(), disk), disk)
    assert first[0] == 1
    assert last == (
        28,  # the first with 100.5 - step < 1.5 x step + 30 + 1
        "72.5 s left before the deadline, 73 s needed (1.5 x save under way of 28 s + margin of 30 s + step of 1 s)",
    )
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-0000000001", "step-0000000028"}


def test_the_journal_says_when_an_attempt_was_under_way(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = time.time()
    for _ in range(2):
        train(tmp_path, None, ckptman.EverySteps(100))
    events, _ = read_journal(journal_path(tmp_path))
    steps = [each for each in events if each["event"] == "first_step"]
    assert [(each["attempt"], each["step"]) for each in steps] == [(1, 1), (2, 301)]
    assert all(each["init_seconds"] >= STEP_SECONDS for each in steps)
    [restored] = [each for each in events if each["event"] == "restored"]
    assert 0 < restored["seconds"] < time.time() - before
    first, second = (each["time"] for each in events if each["event"] == "attempt_started")
    assert before <= first <= steps[0]["time"] <= second <= restored["time"] <= steps[1]["time"]


def test_a_run_that_starts_from_a_checkpoint_of_another_one_says_how_long_that_took(tmp_path):
    train(tmp_path / "old", None, ckptman.AtStep(3))
    state = {"x": torch.zeros(3)}
    with ckptman.Checkpointer(tmp_path / "new", state, deadline=None) as checkpointer:
        assert checkpointer.restore(path=tmp_path / "old" / "step-0000000003") == 3
    events, _ = read_journal(journal_path(tmp_path / "new"))
    [restored] = [each for each in events if each["event"] == "restored"]
    assert (restored["step"], restored["seconds"] > 0) == (3, True)


@pytest.mark.parametrize(
    ("text", "reported"), [("CUDA error: uncorrectable ECC error encountered", True), ("shapes do not fit", False)]
)
def test_an_error_of_a_device_is_told_to_the_chain(tmp_path, monkeypatch, text, reported):
    outcome = tmp_path / "outcome-1.json"
    monkeypatch.setenv("CKPTMAN_OUTCOME", str(outcome))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with pytest.raises(RuntimeError, match=text), ckptman.Checkpointer(tmp_path / "root", {"a": 1}):
        raise RuntimeError(text)
    assert reported_nodes(outcome) == ({"n7": text} if reported else {})
