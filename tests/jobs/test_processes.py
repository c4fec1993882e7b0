"""The processes of an attempt, and signals."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from ckptman.jobs.local import LocalScheduler
from ckptman.jobs.processes import ATTEMPT_ID_ENV, ProcessTree, SignalQueue


def test_a_member_that_hides_its_environment_is_known_from_before():
    # A process that sets its title overwrites its environment; here it never had one, and its parent dies first.
    hidden = "import os, signal; os.write(1, b'ready\\n'); signal.pause()"
    parent = (
        "import subprocess, sys, signal; "
        f"subprocess.Popen([sys.executable, '-c', {hidden!r}], env={{}}, start_new_session=True); signal.pause()"
    )
    attempt_id = uuid.uuid4().hex
    leader = subprocess.Popen(
        [sys.executable, "-c", parent],
        env={**os.environ, ATTEMPT_ID_ENV: attempt_id},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert leader.stdout is not None
    with leader, leader.stdout:
        family = ProcessTree(leader.pid, attempt_id)
        try:
            assert leader.stdout.readline() == b"ready\n"
            assert len(family.look()) == 2
            leader.kill()
            while leader.pid in {member.pid for member in family.look()}:
                pass
            assert len(family.look()) == 1
        finally:
            family.kill()
        assert family.look() == set()
        assert leader.stdout.read() == b""


def test_a_chain_inside_a_chain_belongs_to_both(tmp_path):
    script = f"import os; print(os.environ['{ATTEMPT_ID_ENV}'], file=open('{tmp_path}/id', 'w'))"
    with SignalQueue() as signals:
        scheduler = LocalScheduler([].append, signals)
        assert scheduler.run_attempt([sys.executable, "-c", script], {**os.environ, ATTEMPT_ID_ENV: "outer"}) == 0
    outer, inner = (tmp_path / "id").read_text().strip().split(":")
    assert outer == "outer"
    assert len(inner) == 32


def test_handlers_and_the_wakeup_pipe_are_given_back():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    open_files = set(Path("/proc/self/fd").iterdir())
    with SignalQueue() as signals:
        scheduler = LocalScheduler([].append, signals)
        assert scheduler.stop_asked() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert scheduler.stop_asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert scheduler.stop_asked() is signal.SIGTERM
    assert [signal.getsignal(number) for number in numbers] == before
    assert set(Path("/proc/self/fd").iterdir()) == open_files
    assert signal.set_wakeup_fd(-1) == -1
    with SignalQueue() as signals:
        assert LocalScheduler([].append, signals).stop_asked() is None
