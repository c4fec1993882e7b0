"""The run journal: what is in it stays in it, whatever kills the writer, and it never kills the run."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest

import ckptman
from ckptman import NotFoundError
from ckptman.runtime import journal as journal_module
from ckptman.runtime.journal import Journal, previous_path, read_journal
from ckptman.runtime.measurements import save_seconds
from ckptman.storage.format.paths import journal_path


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
