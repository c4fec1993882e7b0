"""Work in a process of its own: its result, its error, its death, its silence; and that nothing of it is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.errors import CkptmanError, CommitError
from ckptman.storage.io.isolated_process import Died, IsolatedProcess, NoAnswer, run_isolated

# The child cannot be killed, as one that waits for a dead file server: what the caller prints must end all the same.
UNKILLABLE = """
import os, sys, time
from ckptman.storage.io import isolated_process as module
os.kill = os.killpg = lambda pid, number: None
module._die_with = lambda parent: None
def stuck():
    os.write(1, b"this must not be seen")
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
try:
    module.run_isolated(stuck, 0.5)
except module.NoAnswer as error:
    print(error)
"""


def _wait_for_death(pid):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return
    raise AssertionError(f"{pid} still lives")


def _raise(error):
    raise error


def test_what_it_returns_comes_back():
    assert run_isolated(lambda: {"pid": os.getpid()}, 10)["pid"] != os.getpid()
    assert run_isolated(lambda: b"x" * 10_000_000, 10) == b"x" * 10_000_000, "more than a pipe holds"


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error", "/x"), CommitError(3, 1, "disk full"), NoAnswer(7.0), KeyError("a")]
)
def test_what_it_raises_comes_back(error):
    with pytest.raises(type(error)) as raised:
        run_isolated(lambda: _raise(error), 10)
    assert str(raised.value) == str(error)


def test_an_error_that_cannot_travel_comes_as_text():
    class Local(Exception):
        pass

    with pytest.raises(CkptmanError, match="Local: what it was"):
        run_isolated(lambda: _raise(Local("what it was")), 10)


def test_silence_ends_at_the_limit_and_leaves_nothing(tmp_path):
    def hang():
        with IsolatedProcess(lambda pipe: time.sleep(60)) as other:
            (tmp_path / "pids").write_text(f"{os.getpid()} {other.pid}")
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(NoAnswer, match=r"does not answer within 0\.3 s"):
        run_isolated(hang, 0.3)
    assert time.monotonic() - began < 5
    for pid in (tmp_path / "pids").read_text().split():
        _wait_for_death(int(pid))


@pytest.mark.parametrize(
    ("die", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed by SIGKILL \(out of memory\?\)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_death_is_told_with_its_signal_or_exit_code(die, told):
    with pytest.raises(Died, match=told):
        run_isolated(die, 10)


def test_ctrl_c_of_the_caller_ends_it(monkeypatch):
    pids = []
    end, receive = IsolatedProcess.end, IsolatedProcess.receive
    monkeypatch.setattr(IsolatedProcess, "end", lambda self: (pids.append(self.pid), end(self)))

    def receive_interrupted(self, seconds):
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # not within the fork, whose hooks of logging it would end
        return receive(self, seconds)

    monkeypatch.setattr(IsolatedProcess, "receive", receive_interrupted)
    signal.signal(signal.SIGALRM, lambda number, frame: _raise(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_isolated(lambda: time.sleep(60), 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _wait_for_death(pids[0])


def test_it_has_no_terminal_no_output_and_plain_signals():
    def look():
        print("this must not be seen", flush=True)
        links = {str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (0, 1, 2)}
        return {"links": links, "session": os.getsid(0) == os.getpid(), "int": signal.getsignal(signal.SIGINT)}

    found = run_isolated(look, 10)
    assert found == {"links": {os.devnull}, "session": True, "int": signal.SIG_DFL}


def test_it_dies_with_its_parent(tmp_path):
    def parent():
        child = IsolatedProcess(lambda pipe: time.sleep(60))
        (tmp_path / "pid").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Died):
        run_isolated(parent, 10)
    _wait_for_death(int((tmp_path / "pid").read_text()))


def test_what_may_outlive_is_left_to_finish(tmp_path):
    done = tmp_path / "done"

    def work():
        time.sleep(0.4)
        done.touch()

    with pytest.raises(NoAnswer):
        run_isolated(work, 0.05, outlive=True)
    deadline = time.monotonic() + 240
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nobody_waits_for_one_that_cannot_be_killed(tmp_path):
    told = tmp_path / "pid"
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", UNKILLABLE, str(told)], capture_output=True, text=True, timeout=240)
    seconds = time.monotonic() - began
    pid = int(told.read_text())
    try:
        os.kill(pid, 0)  # it is there
    finally:
        os.kill(pid, signal.SIGKILL)
    assert (ran.stdout, ran.returncode) == ("does not answer within 0.5 s\n", 0), ran.stderr
    assert seconds < 20


def test_another_process_answers_and_its_errors_are_raised():
    def serve(pipe):
        pipe.send(pipe.recv() + 1)
        pipe.send(OSError(5, "Input/output error"))
        os._exit(4)

    with IsolatedProcess(serve, duplex=True) as other:
        other.pipe.send(1)
        assert other.receive() == 2
        with pytest.raises(OSError, match="Input/output"):
            other.receive()
        with pytest.raises(Died, match="exit code 4"):
            other.receive()
    with IsolatedProcess(lambda pipe: time.sleep(60)) as other, pytest.raises(NoAnswer):
        other.receive(0.05)


def test_no_descriptor_is_lost():
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        run_isolated(lambda: None, 10)
        with contextlib.suppress(NoAnswer):
            run_isolated(lambda: time.sleep(60), 0.01)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
