"""The watchdog thread: what hangs is noticed in the stated time and ends the process, and what lives is left alone.

What ends a process is tried in processes of its own. Times are taken on the clock that all processes share.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest

from ckptman.errors import EXIT_STALLED
from ckptman.policies.hang_timeout import HangTimeout
from ckptman.runtime import watchdog as ending
from ckptman.runtime.watchdog import Watchdog

SLACK_SECONDS = 10.0
"""A machine that is busy with other tests starts threads late."""

HEAD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from ckptman.runtime.watchdog import end_process
from ckptman.runtime.watchdog import Watchdog
from ckptman.policies.hang_timeout import HangTimeout

def say(text):
    print(text, time.monotonic(), flush=True)

def watch(floor_seconds):
    stacks = Path("stacks.txt")
    watchdog = Watchdog(HangTimeout(floor_seconds), lambda stall, arm: end_process(f"rank 0: {stall}", stacks))
    watchdog.start()
    watchdog.beat("step", 7)
    return watchdog
"""


class Ended(NamedTuple):
    """How a script ended: its code, what it printed, and when that was."""

    code: int
    out: str
    err: str
    at: float

    def said(self, text):
        """When it said that."""
        return next(float(line.split()[-1]) for line in self.out.splitlines() if line.startswith(text))


def command(body):
    return [sys.executable, "-c", HEAD + body]


def run(body, folder):
    done = subprocess.run(command(body), cwd=folder, capture_output=True, text=True, timeout=240)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic())


def never(stall, arm):
    raise AssertionError(f"taken for stuck: {stall}")


HANGS = """
def read_from_a_dead_mount():
    say("hangs")
    threading.Event().wait()

watchdog = watch(1.0)
read_from_a_dead_mount()
"""


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_hang_is_noticed_in_time_and_the_stacks_name_it(is_writable, tmp_path):
    """Stacks that cannot be written to their file go to standard error."""
    if not is_writable:
        (tmp_path / "stacks.txt").mkdir()
    ended = run(HANGS, tmp_path)
    assert ended.code == EXIT_STALLED == 13
    assert 0.9 < ended.at - ended.said("hangs") < HangTimeout(1.0).notice_seconds("step") + SLACK_SECONDS
    if is_writable:
        stacks = (tmp_path / "stacks.txt").read_text()
        assert "in read_from_a_dead_mount" in stacks
        assert stacks.startswith("rank 0: no sign of life for 1.")
        assert "(limit 1.0 s) in what came after step 7: the next step, an evaluation" in stacks
        assert ended.err.strip().endswith("; stacks are in stacks.txt")
        assert len(ended.err.splitlines()) == 1
    else:
        assert "in read_from_a_dead_mount" in ended.err
        assert "stacks are in" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_a_hang_that_holds_the_interpreter_is_ended_by_the_backstop(forks, tmp_path):
    body = """
def touch_a_mapped_page():
    say("hangs")
    ctypes.PyDLL(None).sleep(60)

watchdog = watch(1.0)
threading.Event().wait(0.3)  # until it has looked, and armed the backstop for what a step may take
if FORKS:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
touch_a_mapped_page()
"""
    ended = run(body.replace("FORKS", str(forks)), tmp_path)
    assert ended.code == 1
    assert ended.at - ended.said("hangs") < 2 * 1.0 + SLACK_SECONDS
    assert "in touch_a_mapped_page" in ended.err
    assert not (tmp_path / "stacks.txt").exists()


def test_the_end_itself_cannot_hang(tmp_path):
    """The stacks go to a file system that hangs, standard error is a pipe that is full."""
    body = """
import ckptman.runtime.watchdog as stall
stall.PART_SECONDS = 0.3
stall.write_stacks = stall.say = lambda *args: threading.Event().wait()
say("hangs")
stall.end_process("stuck", Path("stacks.txt"), [(0.1, threading.Event().wait), (5.0, lambda: say("last part"))])
"""
    ended = run(body, tmp_path)
    assert ended.code == EXIT_STALLED
    assert ended.said("last part") - ended.said("hangs") < SLACK_SECONDS
    assert "most recent call first" in ended.err


@pytest.mark.slow
def test_a_process_that_is_suspended_is_not_stuck_when_it_goes_on(tmp_path):
    body = """
watchdog = watch(2.0)
say("begins")
sys.stdin.readline()
watchdog.beat("step", 8)
say("goes on")
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(body), cwd=tmp_path, **pipes, text=True) as process:
        assert process.stdout.readline().startswith("begins")
        process.send_signal(signal.SIGSTOP)
        time.sleep(HangTimeout(2.0).notice_seconds("step") + 0.5)  # what passes is what is tested; the backstop has 4 s
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate("\n", timeout=240)
    assert process.returncode == 0, err
    assert out.startswith("goes on")


def test_forked_children_have_no_watchdog_and_can_end(tmp_path):
    body = """
watchdog = watch(30.0)
while watchdog.awake_seconds == 0:  # it has looked, so the backstop is armed
    threading.Event().wait(0.01)
child = os.fork()
if child == 0:
    assert not watchdog.watching
    assert threading.active_count() == 1
    watchdog.beat("step", 8)
    watchdog.close()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert watchdog.watching
watchdog.close()
say("ends")
"""
    ended = run(body, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("ends")


def test_off_closed_or_thrown_away_it_has_no_thread():
    before = set(threading.enumerate())
    off, closed, dropped = (Watchdog(patience, never) for patience in (None, HangTimeout(1.0), HangTimeout(1.0)))
    off.start()
    assert not off.watching
    assert set(threading.enumerate()) == before
    off.beat("step", 1)
    with off.saving(1):
        pass
    closed.start()
    dropped.start()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    closed.close()
    del dropped
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def looking(patience):
    """A watchdog that is told the time, and what it found. The backstop must not be left armed in this process."""
    found = []
    watchdog = Watchdog(patience, lambda stall, arm: found.append(stall))
    try:
        yield watchdog, found
    finally:
        watchdog.close()


def test_a_long_save_or_evaluation_within_its_allowance_is_no_stall():
    with looking(HangTimeout(10.0)) as (watchdog, found):
        watchdog.beat("step", 1)
        for _ in range(19):  # an evaluation of 9.5 s
            assert not watchdog.look(0.5)
        watchdog.beat("save", 2)
        for _ in range(59):  # a save of 29.5 s
            assert not watchdog.look(0.5)
        watchdog.beat("step", 2)
        for _ in range(57):  # three evaluations' time
            assert not watchdog.look(0.5)
        assert watchdog.look(0.5)
    assert (found[0].limit_seconds, found[0].waited_seconds) == (28.5, 29.0)


@pytest.mark.parametrize(
    ("beats", "looks", "passed_seconds", "counted_seconds"),
    [(100, 9, 1.0, 1.0), (1, 4, 3600.0, 2 * 0.5 + 1.0)],
    ids=["an evaluation with signs of life", "time in which the process did not run"],
)
def test_what_is_no_stall(beats, looks, passed_seconds, counted_seconds):
    with looking(HangTimeout(10.0)) as (watchdog, found):
        for step in range(beats):
            watchdog.beat("step", step)
            for _ in range(looks):
                assert not watchdog.look(passed_seconds)
    assert watchdog.awake_seconds == beats * looks * counted_seconds
    assert not found


def test_a_part_of_the_end_that_fails_or_hangs_is_left_behind(tmp_path, monkeypatch):
    done = []
    hangs = threading.Event()

    def fails():
        raise OSError("gone")

    parts = [(0.1, hangs.wait), (5.0, fails), (5.0, lambda: done.append("part"))]
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", done.append)
        ending.end_process("stuck", tmp_path / "deep" / "stacks.txt", parts)
    hangs.set()
    assert done == ["part", 13]
    assert "test_a_part_of_the_end" in (tmp_path / "deep" / "stacks.txt").read_text()
    assert not ending.within(5.0, fails)
    assert ending.within(5.0, lambda: None)


def test_the_stacks_of_two_ends_are_kept_and_no_link_is_followed(tmp_path):
    path = tmp_path / "stacks.txt"
    ending.write_stacks(path, "first\x1b")
    ending.write_stacks(path, "second")
    assert path.read_text().startswith("first\\x1b\n\n")
    assert "\nsecond\n" in path.read_text()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        ending.write_stacks(tmp_path / "link", "third")
    assert not os.path.lexists(tmp_path / "elsewhere")
