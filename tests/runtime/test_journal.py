"""The run journal: what is in it stays in it, whatever kills the writer, and it never kills the run."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch

import ckptman
from ckptman import NotFoundError
from ckptman import checkpointer as checkpointer_module
from ckptman.policies.save_policies import SavePolicy
from ckptman.runtime import journal as journal_module
from ckptman.runtime.journal import (
    Journal,
    events_of,
    previous_path,
    read_journal,
    save_seconds,
    steps_per_second,
    typical_save_seconds,
)
from ckptman.runtime.outcome import reported_nodes
from ckptman.session.timings import Timings
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.durable_files import DISK, Disk
from tests.helpers.faulty_disk import on_disk


def test_one_line_per_event(tmp_path):
    path = tmp_path / ".ckptman" / "journal.jsonl"
    journal = Journal(path, clock=iter([1.5, 2.5, 3.5]).__next__)
    assert not path.parent.exists(), "nothing is opened before the first event"
    journal.record("attempt_started", pid=7)
    journal.bind(attempt=2)
    journal.record("restored", step=100, attempt=2)
    journal.record("save_durable", sync=True, step=120, reason="every 20 steps")
    journal.close()
    assert path.read_text().splitlines()[1] == '{"time": 2.5, "event": "restored", "attempt": 2, "step": 100}'
    events, torn = read_journal(path)
    assert torn == 0
    assert events[0] == {"time": 1.5, "event": "attempt_started", "pid": 7}
    assert events[2] == {"time": 3.5, "event": "save_durable", "attempt": 2, "step": 120, "reason": "every 20 steps"}


def record(path, *names):
    """Write events by a journal of their own."""
    journal = Journal(path)
    for name in names:
        journal.record(name)
    journal.close()


def read_names(path):
    """The names of the events, and how many lines are torn."""
    events, torn = read_journal(path)
    return [event["event"] for event in events], torn


def test_appended_to_by_the_next_attempt_and_after_a_close(tmp_path):
    path = tmp_path / "journal.jsonl"
    record(path, "attempt_started")
    journal = Journal(path)
    journal.record("restored")
    journal.close()
    journal.close()
    journal.record("finished")
    journal.close()
    assert read_names(path) == (["attempt_started", "restored", "finished"], 0)


class Hostile:
    def __str__(self):
        raise RuntimeError("no text")


def test_values_that_json_does_not_know(tmp_path):
    fields = {
        "loss": (float("nan"), "nan"),
        "norms": ([float("inf"), -float("inf"), 1.5], ["inf", "-inf", 1.5]),
        "path": (Path("/scratch"), "/scratch"),
        "reason": ("two\nlines and a \udcff and ü", "two\nlines and a \udcff and ü"),
        "metrics": ({"loss": float("nan"), 3: {1}}, {"loss": "nan", "3": "{1}"}),
        "hostile": (Hostile(), "<Hostile>"),
        "nothing": (None, None),
        "sure": (True, True),
        "big": (2**70, 2**70),
        "step": (numpy.int64(3), 3),
        "scale": (numpy.float32(0.5), 0.5),
        "worst": (numpy.float32("nan"), "nan"),
    }
    journal = Journal(tmp_path / "journal.jsonl")
    journal.record("finished", **{name: written for name, (written, _) in fields.items()}, time="later")
    journal.close()
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) == 1
    [event], torn = read_journal(tmp_path / "journal.jsonl")
    assert torn == 0
    assert isinstance(event.pop("time"), float), "a field cannot take the place of the journal's own"
    assert event == {"event": "finished", **{name: read for name, (_, read) in fields.items()}}


@pytest.mark.parametrize("tail", [b'{"time": 2.0, "eve', b'{"time": 2.0, "event": "saved"}', b"\0\0\0\0", b"\xff"])
def test_a_torn_last_line_costs_nothing_but_itself(tmp_path, tail):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"time": 1.0, "event": "restored"}\n' + tail)
    record(path, "finished")
    saved = ["saved"] * tail.endswith(b"}")
    assert read_names(path) == (["restored", *saved, "finished"], 1 - len(saved))


@pytest.mark.parametrize("line", [b"17", b'"text"', b"[]", b"{}", b'{"event": "finished"}'])
def test_a_line_that_is_no_event_is_counted_as_torn(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + b"\n\n")
    assert read_journal(path) == ([], 1)


def test_no_journal(tmp_path):
    with pytest.raises(NotFoundError, match="no run has been started there"):
        read_journal(tmp_path / "journal.jsonl")


@pytest.mark.skipif(sys.platform != "linux", reason="there, reading the memory at address 0 is an I/O error")
def test_a_journal_that_the_disk_does_not_give_is_named():
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        read_journal("/proc/self/mem")


def test_a_full_disk_warns_once_and_the_run_goes_on(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: 1.0)
    journal.record("restored")
    full = True
    real = os.write

    def write(fd, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.warns(RuntimeWarning, match=r"No space left.*the run goes on"):
        journal.record("save_begun")
    journal.record("save_failed")  # no second warning: it would be an error here
    full = False
    journal.record("save_durable", sync=True)
    journal.close()
    assert read_names(journal.path) == (["restored", "save_durable"], 0)


def test_a_line_cut_short_by_a_full_disk_does_not_garble_the_next(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:12]))
    with pytest.warns(RuntimeWarning, match="only 12 of"):
        journal.record("save_begun")
    monkeypatch.undo()
    journal.record("finished")
    journal.close()
    assert read_names(journal.path) == (["finished"], 1)


def test_what_a_server_says_only_when_the_file_is_closed_is_a_warning(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.record("finished")
    real = os.close

    def close(fd):
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    with pytest.warns(RuntimeWarning, match=r"quota exceeded.*the run goes on"):
        journal.close()
    monkeypatch.undo()
    journal.close()


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "journal.jsonl")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        journal.record("restored")
    journal.record("finished")
    journal.close()


def test_threads_do_not_mix_lines(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")

    def write(name):
        for count in range(100):
            journal.record("save_staged", thread=name, count=count, padding="x" * 300)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    journal.close()
    events, torn = read_journal(journal.path)
    assert torn == 0
    for name in range(4):
        assert [event["count"] for event in events if event["thread"] == name] == list(range(100))


WRITER = """
import sys
from ckptman.runtime.journal import Journal
journal = Journal(sys.argv[1])
journal.bind(attempt=int(sys.argv[2]))
count = 0
while True:
    journal.record("save_begun", count=count, padding="x" * (count % 997))
    # Told after it was written: what we read here must be in the journal.
    sys.stdout.write(f"{count}\\n")
    sys.stdout.flush()
    count += 1
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])])
def test_kills_at_random_moments_lose_nothing_that_was_written(kills, tmp_path):
    generator = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    path = tmp_path / "journal.jsonl"
    acknowledged = []
    for attempt in range(kills):
        command = [sys.executable, "-c", WRITER, str(path), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(generator.randrange(1, 300)):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split("\n")
            acknowledged.append(int(rest[-2]) if len(rest) > 1 else 0)
    events, torn = read_journal(path)
    assert torn <= kills
    for attempt, last in enumerate(acknowledged):
        counts = [event["count"] for event in events if event["attempt"] == attempt]
        assert counts == list(range(len(counts))), f"attempt {attempt}: a line is missing or out of order"
        assert len(counts) > last
    assert len(path.read_bytes().splitlines()) == len(events) + torn


def test_of_a_journal_that_is_too_long_the_last_events_are_read(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps({"time": 1.0, "event": "saved", "step": step}) + "\n" for step in range(100)))
    monkeypatch.setattr(journal_module, "MOST_BYTES", 500)
    events, torn = read_journal(path)
    assert [event["step"] for event in events] == list(range(100 - len(events), 100))
    assert (5 < len(events) < 20, torn) == (True, 0)


def test_a_journal_full_of_nothing_is_not_read_whole(tmp_path, monkeypatch):
    """A sparse file of 6 GiB, as a crash of a file system may leave it."""
    path, read_bytes, real = tmp_path / "journal.jsonl", 0, os.read

    def read(fd, size):
        nonlocal read_bytes
        read_bytes += size
        return real(fd, size)

    path.touch()
    os.truncate(path, 6 * 2**30)
    with path.open("ab") as file:
        file.write(b'\n{"time": 1.0, "event": "finished"}\n')
    monkeypatch.setattr(os, "read", read)
    assert read_names(path)[0] == ["finished"]
    assert read_bytes <= journal_module.MOST_BYTES


def attempt(root, steps, fails=False):
    with ckptman.Checkpointer(root, {"x": 1}, save_policy=ckptman.EverySteps(10), deadline=None) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            checkpointer.step(step)
        if fails:
            raise ValueError("loss is NaN")


def test_an_attempt_begins_a_new_file_where_the_journal_is_too_large(tmp_path, monkeypatch):
    path = journal_path(tmp_path)
    attempt(tmp_path, 10)
    attempt(tmp_path, 20)
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN"):
            attempt(tmp_path, 22, fails=True)
    before, size = read_journal(path), path.stat().st_size
    assert not previous_path(path).exists()
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", size - 1)
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 20: attempts 3 and 4 loaded it and crash"):
        attempt(tmp_path, 11)
    assert previous_path(path).stat().st_size == size
    events, torn = read_journal(path)
    assert (events[: len(before[0])], torn) == before, "readers see both"
    new = events[len(before[0]) :]
    assert (new[0]["event"], new[0]["attempt"]) == ("attempt_started", 5)
    assert save_seconds(tmp_path) is not None
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 10)
    for number in (6, 7, 8):
        attempt(tmp_path, 12)
        assert {event["attempt"] for event in read_journal(path)[0]} == {number - 1, number}, "two files, and no more"
    path.unlink()
    assert {event["attempt"] for event in read_journal(path)[0]} == {7}, "a kill may come between the two"


def test_a_journal_that_cannot_be_renamed_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"time": 1.0, "event": "restored"}\n')
    previous_path(path).mkdir()
    (previous_path(path) / "x").touch()
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 10)
    journal = Journal(path)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        journal.rotate()
    journal.record("finished")
    journal.close()
    assert len(path.read_text().splitlines()) == 2


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


def test_a_journal_in_a_linked_folder_belongs_to_somebody_else(tmp_path):
    other, root = tmp_path / "other", tmp_path / "root"
    other.mkdir()
    root.mkdir()
    Journal(journal_path(other)).record("first_step")
    journal_path(root).parent.symlink_to(journal_path(other).parent)
    assert events_of(other)
    assert not events_of(root)
    with pytest.raises(NotFoundError, match="is a link: remove it"):
        read_journal(journal_path(root))
