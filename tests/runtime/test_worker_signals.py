"""Worker processes that live through a stop request, and end when their parent ends them or is gone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.utils.data import DataLoader

from ckptman import SignalHandler
from ckptman.runtime import worker_signals
from ckptman.runtime.signals import STOP_SIGNALS, free_signals

METHODS = ("fork", "spawn", "forkserver")
WAIT = 60.0
ENDED = (-signal.SIGTERM, -signal.SIGKILL)
"""Of a worker that was terminated. It is killed if it is too slow to react, as on a machine that is busy."""


def say_and_wait(pipe, own_handler=False):
    if own_handler:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    pipe.send("ready")
    while pipe.recv():
        pipe.send("alive")


def start_grandchild(pipe):
    process = subprocess.Popen(["sleep", "100"])
    process.terminate()
    pipe.send(process.wait(WAIT))


def worker(method, target=say_and_wait, *arguments):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def is_alive(pipe):
    pipe.send(True)
    return pipe.poll(WAIT) and pipe.recv() == "alive"


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_ignores_what_its_parent_notes_and_can_be_terminated(method):
    with SignalHandler():
        process, pipe = worker(method)
        for number in STOP_SIGNALS:  # as soon as it is there
            os.kill(process.pid, number)
        assert pipe.recv() == "ready"
        for number in STOP_SIGNALS:
            os.kill(process.pid, number)
        assert is_alive(pipe)
        process.terminate()
        process.join(WAIT)
        assert process.exitcode in ENDED


@pytest.mark.parametrize("method", METHODS)
def test_one_that_has_only_just_been_started_can_be_terminated(method):
    with SignalHandler() as outer, SignalHandler() as inner:
        for process in [worker(method)[0] for _ in range(10 if method == "fork" else 1)]:
            process.terminate()
            process.join(WAIT)
            assert process.exitcode in ENDED
        assert not outer.requested
        assert not inner.requested
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.parametrize("method", METHODS)
def test_outside_of_the_block_and_for_other_signals_all_is_as_ever(method):
    with SignalHandler([signal.SIGUSR2]):
        inside, pipe = worker(method)
        assert pipe.recv() == "ready"
        os.kill(inside.pid, signal.SIGUSR2)
        assert is_alive(pipe)
        os.kill(inside.pid, signal.SIGUSR1)
        inside.join(WAIT)
    outside, pipe = worker(method)
    assert pipe.recv() == "ready"
    os.kill(outside.pid, signal.SIGUSR2)
    outside.join(WAIT)
    assert (inside.exitcode, outside.exitcode) == (-signal.SIGUSR1, -signal.SIGUSR2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_handler_of_its_own_is_called(method):
    with SignalHandler():
        process, pipe = worker(method, say_and_wait, True)
        assert pipe.recv() == "ready"
        process.terminate()
        process.join(WAIT)
        assert process.exitcode == 3


def sleep_beside_a_thread(pipe):
    threading.Thread(target=time.sleep, args=(WAIT,), daemon=True).start()
    pipe.send("ready")
    time.sleep(WAIT)


def test_one_with_another_thread_can_be_terminated():
    with SignalHandler():
        for _ in range(10):
            process, pipe = worker("fork", sleep_beside_a_thread)
            assert pipe.recv() == "ready"
            process.terminate()
            process.join(WAIT / 2)
            assert process.exitcode in ENDED


def test_programs_that_a_worker_starts_can_be_terminated():
    with SignalHandler():
        process, pipe = worker("fork", start_grandchild)
        assert pipe.recv() == -signal.SIGTERM
        process.join(WAIT)


def own_state(self):
    return {name: value for name, value in vars(self).items() if name in ("_identity", "_config", "_target", "_args")}


def restore_own_state(self, state):
    type(self).__base__.__init__(self)
    vars(self).update(state)


class Spawned(multiprocessing.get_context("spawn").Process):
    """A process that decides what is pickled of it."""

    __getstate__, __setstate__ = own_state, restore_own_state


class Served(multiprocessing.get_context("forkserver").Process):
    """The same for a forkserver."""

    __getstate__, __setstate__ = own_state, restore_own_state


@pytest.mark.parametrize("kind", [Spawned, Served])
def test_a_process_that_decides_what_is_pickled_of_it(kind):
    ours, theirs = multiprocessing.Pipe()
    with SignalHandler():
        process = kind(target=say_and_wait, args=(theirs,))
        process.start()
        assert ours.recv() == "ready"
        os.kill(process.pid, signal.SIGTERM)
        assert is_alive(ours)
        process.terminate()
        process.join(WAIT)
        assert process.exitcode in ENDED


def run_no_handler(pipe):
    signal.pthread_sigmask(signal.SIG_BLOCK, [worker_signals.RELEASE])  # as while a library is stuck
    pipe.send("ready")
    time.sleep(WAIT)


def test_one_that_is_stuck_outside_of_python_is_killed(monkeypatch):
    monkeypatch.setattr(worker_signals, "RETRY_SECONDS", 0.1)
    with SignalHandler():
        process, pipe = worker("fork", run_no_handler)
        assert pipe.recv() == "ready"
        process.terminate()
        process.join(WAIT / 2)
        assert process.exitcode == -signal.SIGKILL


def clean_up_at_leisure(pipe):
    def clean_up(*_):
        pipe.send("cleaning")
        pipe.recv()
        sys.exit(3)

    signal.signal(signal.SIGTERM, clean_up)
    say_and_wait(pipe)


def test_one_that_cleans_up_is_given_its_time(monkeypatch):
    judged = threading.Event()
    real = worker_signals._insist
    monkeypatch.setattr(worker_signals, "RETRIES", 0)
    monkeypatch.setattr(worker_signals, "_insist", lambda *arguments: (real(*arguments), judged.set()))
    with SignalHandler():
        process, pipe = worker("fork", clean_up_at_leisure)
        assert pipe.recv() == "ready"
        process.terminate()
        assert pipe.recv() == "cleaning"
        assert judged.wait(WAIT)
        pipe.send(True)
        process.join(WAIT)
        assert process.exitcode == 3


def listen_itself(pipe):
    free, taken = free_signals()
    with SignalHandler(free) as signals:
        pipe.send((len(free), taken))
        pipe.recv()
        pipe.send(signals.requested)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_can_listen_for_itself(method):
    with SignalHandler():
        process, pipe = worker(method, listen_itself)
        assert pipe.recv() == (len(STOP_SIGNALS), [])
        os.kill(process.pid, signal.SIGTERM)
        pipe.send(True)
        assert pipe.recv() is True
        process.join(WAIT)
        assert process.exitcode == 0


def test_a_plain_fork_has_the_handlers_from_before():
    with SignalHandler():
        pid = os.fork()
        if not pid:
            time.sleep(WAIT)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


ORPHANS = """
import multiprocessing, os, sys, time
from ckptman import SignalHandler
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    with SignalHandler():
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        os.write(1, f"{process.pid}\\n".encode())
        time.sleep(60)
"""


@pytest.mark.parametrize("method", METHODS)
def test_an_orphan_dies_of_a_signal(method, tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    command = [sys.executable, str(tmp_path / "orphans.py"), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        end = os.pidfd_open(pid)
        parent.kill()
        parent.wait(WAIT)
        signal.pidfd_send_signal(end, signal.SIGTERM)
        poll = multiprocessing.connection.wait([end], WAIT)
        assert poll == [end]
        os.close(end)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_the_workers_of_a_loader(method, is_persistent):
    loader = DataLoader(
        range(8), num_workers=1, multiprocessing_context=method, persistent_workers=is_persistent, prefetch_factor=1
    )
    with SignalHandler():
        batches = iter(loader)
        next(batches)
        (pid,) = [each.pid for each in multiprocessing.active_children() if each.pid]
        for number in STOP_SIGNALS:
            os.kill(pid, number)
        assert len(list(batches)) == 7
    del batches, loader


AT_EXIT = """
import sys
from torch.utils.data import DataLoader
from ckptman import SignalHandler
if __name__ == "__main__":
    loader = DataLoader(range(8), num_workers=1, multiprocessing_context=sys.argv[1], persistent_workers=True)
    with SignalHandler():
        batches = iter(loader)
        next(batches)
"""


@pytest.mark.parametrize("method", METHODS)
def test_workers_that_are_there_at_exit_end_in_silence(method, tmp_path):
    (tmp_path / "program.py").write_text(AT_EXIT)
    command = [sys.executable, str(tmp_path / "program.py"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    assert (done.stdout, done.stderr) == ("", "")
