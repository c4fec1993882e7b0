"""Chains: the decisions with a scheduler that only pretends, the processes and signals with real ones."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from ckptman import ExistsError, RootError, SchedulerError
from ckptman.jobs import chain_record, local
from ckptman.jobs.chain import new_chain_dir, newest_sequence, passed_over_text
from ckptman.jobs.local import LocalScheduler, run_chain
from ckptman.jobs.process_tree import ATTEMPT_ID_ENV, ProcessTree
from ckptman.jobs.signal_queue import SignalQueue
from ckptman.jobs.slurm import control
from ckptman.runtime.outcome import Outcome, write_outcome
from ckptman.storage.format.manifest import Nonfinite
from tests.helpers.checkpoints import commit, make_suspect

# ---- Decisions ------------------------------------------------------------------------------------------------------


def outcome(state, reason="", root="/root-of-a-run"):
    return Outcome(state, 10, reason, 0, root, 1, 0.0, 1, "n1")


class Pretended:
    """Ends each attempt as planned: with an exit code and, if there is one, an outcome or the bytes of one."""

    def __init__(self, *plan, stop_after=None):
        self.plan, self.stop_after = plan, stop_after
        self.seen, self.passed_on = [], None

    def stop_asked(self):
        return signal.SIGTERM if self.stop_after is not None and len(self.seen) >= self.stop_after else None

    def run_attempt(self, command, env):
        returncode, wrote = self.plan[len(self.seen)]
        self.seen.append(dict(env))
        path = Path(env["CKPTMAN_OUTCOME"])
        if isinstance(wrote, Outcome):
            write_outcome(path, wrote)
        elif wrote is not None:
            path.write_bytes(wrote)
        return returncode


def chain(tmp_path, *plan, stop_after=None, progress=lambda root: 0, crash_limit=3, max_attempts=None):
    """Exit code, what was said, and the number of attempts."""
    scheduler, told = Pretended(*plan, stop_after=stop_after), []
    with pretending(scheduler) as patch:
        # Whether anything is left at all is asked only where nothing new is.
        patch.setattr(local, "newest_sequence", lambda root, since_seconds=0.0: progress(root) if since_seconds else 0)
        code = run_chain(["train"], tmp_path / "chain", told.append, crash_limit=crash_limit, max_attempts=max_attempts)
    return code, told, len(scheduler.seen)


@contextlib.contextmanager
def pretending(scheduler):
    """Have chains run on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "LocalScheduler", lambda say, signals: scheduler)
        yield patch


@pytest.mark.parametrize(
    ("returncode", "wrote", "said"),
    [
        (1, outcome("finished", "the run ended"), "attempt 1 finished: the run ended"),
        (0, outcome("finished", "the run ended"), "attempt 1 finished: the run ended"),
        (1, outcome("stopped", "SIGTERM on rank 2"), "attempt 1 stopped: SIGTERM on rank 2"),
        (0, outcome("stopped", "SIGTERM on rank 2"), "attempt 1 stopped: SIGTERM on rank 2"),
        (0, outcome("failed", "CommitError: disk full"), "attempt 1 crashed: CommitError: disk full"),
        (-9, outcome("running"), "attempt 1 crashed: killed by SIGKILL, and the run did not say that it ended"),
        (0, outcome("running"), "attempt 1 crashed: exit code 0, and the run did not say that it ended: use the"),
        (75, outcome("running"), "attempt 1 stopped: exit code 75"),
        (-40, None, "attempt 1 crashed: killed by SIGRTMIN+6"),
        (137, None, "attempt 1 crashed: exit code 137"),
    ],
)
def test_the_outcome_wins_over_the_exit_code(tmp_path, returncode, wrote, said):
    code, told, attempts = chain(tmp_path, (returncode, wrote), (0, None))
    said = said.replace("SIGRTMIN+6", "signal 40")
    assert told[0].startswith(said)
    assert (code, attempts) == (0, 1 if "finished" in told[0] else 2)


def test_a_chain_that_is_held_starts_no_further_attempt(tmp_path):
    class LocalShard(Pretended):
        def run_attempt(self, command, env):
            control.hold(chain_record.Chain(Path(env["CKPTMAN_CHAIN"])), 0.0)
            return super().run_attempt(command, env)

    told = []
    with pretending(LocalShard((75, None), (0, None))):
        assert run_chain(["train"], tmp_path / "chain", told.append) == 75
    assert "submit again" in told[-1]
    assert chain_record.Chain(tmp_path / "chain").state.state == "stopped"


def test_an_outcome_that_cannot_be_read_is_told_and_passed_over(tmp_path):
    code, told, _ = chain(tmp_path, (75, b"{"), (0, None))
    assert code == 0
    assert "not an outcome" in told[0]
    assert told[1] == "attempt 1 stopped: exit code 75"


def test_a_crash_that_committed_something_does_not_count(tmp_path):
    crash = (1, outcome("running"))
    newest = iter([1, 2, 2, 3, 3, 3, 3])
    with pytest.raises(SchedulerError, match="attempt 7"):
        chain(tmp_path, *[crash] * 7, progress=lambda root: next(newest))


def test_progress_is_asked_for_the_root_that_the_run_named(tmp_path):
    asked = []

    def progress(root):
        asked.append(root)
        return len(asked)

    chain(tmp_path, (1, None), (1, outcome("running", root="/a")), (1, None), (0, None), progress=progress)
    assert asked == ["/a", "/a", "/a"]


def test_no_attempt_starts_over_where_the_checkpoints_are_gone(tmp_path):
    def progress(root):
        return next(found)

    stopped = (75, outcome("stopped", root="/a"))
    found = iter([1, 2, 0])
    with pytest.raises(SchedulerError, match="/a held checkpoints of earlier attempts and holds none now"):
        chain(tmp_path, stopped, stopped, stopped, (0, None), progress=progress)
    found = iter([1, 0])  # a run that is finished may have moved them itself
    assert chain(tmp_path / "again", stopped, (0, outcome("finished", root="/a")), progress=progress)[0] == 0


def test_a_root_that_cannot_be_read_is_no_progress(tmp_path):
    def progress(root):
        raise RootError(5, "the checkpoint root cannot be read")

    crash = (1, outcome("running"))
    with pytest.raises(SchedulerError, match="3 attempts in a row"):
        chain(tmp_path, crash, crash, crash, progress=progress)


def test_max_attempts(tmp_path):
    code, told, attempts = chain(tmp_path, (75, None), (75, None), max_attempts=2)
    assert (code, attempts) == (75, 2)
    assert "no more than 2 attempts" in told[-1]
    with pytest.raises(SchedulerError, match="no more than 1 attempts"):
        chain(tmp_path / "other", (1, None), max_attempts=1)


@pytest.mark.parametrize("returncode", [75, 1, -15])
def test_a_stop_ends_the_chain_with_75_unless_it_is_finished(tmp_path, returncode):
    code, told, attempts = chain(tmp_path, (75, None), (returncode, None), stop_after=2, crash_limit=1)
    assert (code, attempts) == (75, 2)
    assert "SIGTERM asked for it" in told[-1]
    assert chain(tmp_path / "none", stop_after=0)[::2] == (75, 0)
    assert chain(tmp_path / "all", (0, None), stop_after=1) == (0, ["attempt 1 finished: exit code 0"], 1)


def test_what_an_attempt_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheduler = Pretended((75, None), (0, None))
    environ = {"PATH": "/bin", "CKPTMAN_ATTEMPT": "9", "CKPTMAN_OUTCOME": "/elsewhere"}
    with pretending(scheduler) as patch:
        patch.setattr(os, "environ", environ)
        assert run_chain(["train"], Path("chain"), [].append) == 0
    folder = f"{tmp_path}/chain"
    told = {"PATH": "/bin", "CKPTMAN_CHAIN": folder, "CKPTMAN_NOTIFY": ""}
    assert scheduler.seen == [
        {**told, "CKPTMAN_ATTEMPT": str(n), "CKPTMAN_OUTCOME": f"{folder}/outcome-{n}.json"} for n in (1, 2)
    ]


def test_the_folder_of_an_earlier_chain_is_refused(tmp_path):
    chain(tmp_path, (0, outcome("finished")))
    with pytest.raises(ExistsError, match="earlier chain"):
        chain(tmp_path, (0, None))


def test_nobody_listens(tmp_path):
    def say(text):
        raise OSError(5, "Input/output error")

    with pretending(Pretended((75, None), (0, None))):
        assert run_chain(["train"], tmp_path, say) == 0


def test_the_name_of_a_new_chain_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = time.mktime((2026, 11, 21, 15, 3, 0, 5, 325, -1))
    assert new_chain_dir(now) == tmp_path / "ckptman-chains" / f"20261121-150300-{os.getpid()}"


def test_only_checkpoints_of_this_chain_are_progress(tmp_path):
    root = tmp_path / "root"
    assert newest_sequence(str(root)) == 0
    commit(root, 10, time_seconds=1000.0)
    commit(root, 20, time_seconds=2000.0)
    commit(root, 15, time_seconds=3000.0)
    assert newest_sequence(str(root)) == 3
    assert newest_sequence(str(root), since_seconds=2500.0) == 3
    assert newest_sequence(str(root), since_seconds=3500.0) == 0
    (root / "step-0000000015" / "manifest.json").unlink()
    assert newest_sequence(str(root), since_seconds=1500.0) == 2


def test_a_crash_loop_over_old_checkpoints_ends_after_three_attempts_too(tmp_path):
    commit(tmp_path / "root", 10, time_seconds=time.time() - 60)
    crash = (1, outcome("running", root=str(tmp_path / "root")))
    with pretending(Pretended(crash, crash, crash)), pytest.raises(SchedulerError, match="3 attempts in a row"):
        run_chain(["train"], tmp_path / "chain", [].append)


def test_a_chain_says_that_a_restore_goes_back_behind_a_suspect(tmp_path):
    for step in (10, 20):
        commit(tmp_path, step)
    assert passed_over_text(str(tmp_path)) == ""
    make_suspect(tmp_path, 20)
    assert passed_over_text(str(tmp_path)).startswith("step 20: attempts 1 and 2 loaded it and crashed both after")
    assert passed_over_text(str(tmp_path)).endswith("so the next attempt goes back to step 10")
    assert newest_sequence(str(tmp_path)) == 2, "going back is no loss of progress"
    make_suspect(tmp_path, 10)
    assert passed_over_text(str(tmp_path)).startswith("step 20 is all there is to restore, and attempts 1 and 2")


def test_checkpoints_that_are_not_finite_are_no_progress_and_the_chain_says_so(tmp_path):
    root, nan = tmp_path / "root", Nonfinite(tensors=("model.weight",))
    assert (newest_sequence(str(root)), passed_over_text(str(root))) == (0, "")
    commit(root, 10, nonfinite=nan)
    # Where none is finite, a run goes on from it.
    assert (newest_sequence(str(root)), passed_over_text(str(root))) == (1, "")
    commit(root, 20, metrics={"norm": math.inf}, nonfinite=Nonfinite(metrics=("norm",)), time_seconds=time.time() + 9)
    commit(root, 30, nonfinite=nan)
    commit(root, 40, nonfinite=nan)
    assert newest_sequence(str(root)) == 2
    stopped = (75, outcome("stopped", "SIGTERM", root=str(root)))
    with pretending(Pretended(*[stopped] * 3)), pytest.raises(SchedulerError) as ended:
        run_chain(["train"], tmp_path / "chain", [].append, stall_limit=2)
    assert (
        "2 attempts in a row ended with no new checkpoint; attempt 3 stopped: SIGTERM; its checkpoints from step 30 on "
        "are not finite (NaN or infinity in tensor model.weight), so the next attempt goes back to step 20"
    ) in str(ended.value)


# ---- Processes and signals ------------------------------------------------------------------------------------------

DRIVER = """
import sys
from pathlib import Path
from ckptman.errors import CkptmanError
from ckptman.jobs import local

def say(text):
    print("chain:", text, flush=True)

try:
    local.GRACE_SECONDS = float(sys.argv[2])
    sys.exit(local.run_chain(sys.argv[3:], Path(sys.argv[1]), say))
except CkptmanError as error:
    print("error:", error, flush=True)
    sys.exit(error.exit_code)
"""

JOB_HEAD = """
import os, signal, subprocess, sys, time
attempt = int(os.environ["CKPTMAN_ATTEMPT"])
def tell(*words):
    os.write(1, (" ".join(str(each) for each in words) + "\\n").encode())
def on(number, action):
    signal.signal(getattr(signal, number), lambda *_: action())
def start(code, **options):
    return subprocess.Popen([sys.executable, "-c", HEAD + code], **options)
def pause():
    while True:  # signal.pause() would miss a handler that is due just before it
        time.sleep(0.02)
"""


class Chain:
    """A chain in a process of its own. Its output ends when the last process that it started is gone."""

    def __init__(self, tmp_path, job, *command, grace_seconds=30.0):
        if job is not None:
            head = f"HEAD = {JOB_HEAD!r}\n{JOB_HEAD}"
            (tmp_path / "job.py").write_text(head + textwrap.dedent(job))
            command = (sys.executable, str(tmp_path / "job.py"))
        driver = [sys.executable, "-c", DRIVER, str(tmp_path / "chain"), str(grace_seconds), *command]
        self.process = subprocess.Popen(driver, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self.process.stdout is not None
        self._lines = iter(self.process.stdout)
        self.heard = []

    def hears(self, start):
        """The next line that starts so."""
        for line in self._lines:
            self.heard.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"{start!r} never came: {self.heard}")

    def signal(self, number):
        self.process.send_signal(number)

    def ends(self):
        self.heard += [line.rstrip() for line in self._lines]
        return self.process.wait()


@pytest.fixture
def start(tmp_path):
    chains = []

    def begin(job, *command, grace_seconds=30.0):
        chains.append(Chain(tmp_path, job, *command, grace_seconds=grace_seconds))
        return chains[-1]

    yield begin
    for each in chains:
        left = [process for process in psutil.process_iter() if str(tmp_path) in _environment(process)]
        for process in left:
            process.kill()
        each.process.kill()
        each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()
        assert not left, "processes of the chain survived it"


def _environment(process):
    try:
        return process.environ().get("CKPTMAN_OUTCOME", "")
    except psutil.Error:
        return ""


def test_a_real_chain_until_it_is_finished(start):
    chain = start("""
        tell("attempt", attempt, os.environ["CKPTMAN_OUTCOME"].rsplit("/", 1)[1], sys.stdin.read() == "")
        if attempt == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit({1: 75, 3: 0}[attempt])
    """)
    assert chain.ends() == 0
    assert [line for line in chain.heard if line.startswith("attempt")] == [
        f"attempt {n} outcome-{n}.json True" for n in (1, 2, 3)
    ]
    assert "chain: attempt 1 stopped: exit code 75" in chain.heard
    assert any(line.startswith("chain: attempt 2 crashed: killed by SIGKILL") for line in chain.heard)


@pytest.mark.parametrize(
    ("content", "mode", "remedy"),
    [
        (None, 0, "no such program"),
        ("#!/nowhere/python\n", 0o755, "no such interpreter"),
        ("#!/bin/sh\n", 0o644, "chmod"),
        ("exit 0\n", 0o755, "first line such as #!/bin/bash"),
    ],
)
def test_a_command_that_cannot_be_started_is_an_error_at_once(tmp_path, start, content, mode, remedy):
    program = tmp_path / "train"
    if content is not None:
        program.write_text(content)
        program.chmod(mode)
    chain = start(None, str(program))
    assert chain.ends() == 8
    assert len(chain.heard) == 1
    assert chain.heard[0].startswith(f"error: cannot start {str(program)!r}: ")
    assert remedy in chain.heard[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_goes_to_the_command_alone_and_ends_the_chain(start, number):
    # The helper, as a data loader would, shares the group of the command: it must not get the signal.
    chain = start(f"""
        def leave():
            tell("job got it")
            helper.kill()
            helper.wait()
            sys.exit(75)
        on("{number.name}", leave)
        helper = start('on("{number.name}", lambda: tell("helper got it")); tell("ready"); pause()')
        pause()
    """)
    chain.hears("ready")
    chain.signal(number)
    assert chain.ends() == 75
    assert chain.heard.count("job got it") == 1
    assert "helper got it" not in chain.heard
    assert chain.heard[-2:] == [
        "chain: attempt 1 stopped: exit code 75",
        f"chain: the chain ends, because {number.name} asked for it: submit again to go on from the newest checkpoint",
    ]


@pytest.mark.parametrize(
    ("handled", "sent", "got"),
    [
        ("SIGUSR1", signal.SIGUSR1, "SIGUSR1"),
        ("SIGUSR2", signal.SIGUSR2, "SIGUSR2"),
        ("SIGTERM", signal.SIGUSR1, "SIGTERM"),  # torchrun: SIGUSR1 would kill it and leave its workers behind
    ],
)
def test_a_warning_reaches_the_command_as_what_it_handles_and_the_chain_goes_on(start, handled, sent, got):
    chain = start(f"""
        if attempt == 2:
            sys.exit(0)
        on("SIGTERM", lambda: (tell("got SIGTERM"), sys.exit(75)))
        on("{handled}", lambda: (tell("got {handled}"), sys.exit(75)))
        tell("ready")
        pause()
    """)
    chain.hears("ready")
    chain.signal(sent)
    assert chain.ends() == 0
    assert [line for line in chain.heard if line.startswith("got")] == [f"got {got}"]
    assert f"chain: {sent.name}: passed on as {got}" in "\n".join(chain.heard)


def test_a_warning_that_the_command_ignores_stays_ignored(start):
    chain = start("""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        on("SIGTERM", lambda: (tell("got SIGTERM"), sys.exit(0)))
        tell("ready")
        pause()
    """)
    chain.hears("ready")
    chain.signal(signal.SIGUSR1)
    chain.hears("chain: SIGUSR1: passed on as SIGUSR1")
    chain.signal(signal.SIGTERM)
    assert chain.ends() == 75  # it exits with 0 because it was asked to
    assert chain.heard.count("got SIGTERM") == 1


def test_the_second_stop_kills_every_process_at_once(start):
    # The worker is in a session of its own, as torchrun's are.
    chain = start("""
        worker = start("on('SIGTERM', lambda: tell('worker got it')); tell('worker ready'); pause()",
                       start_new_session=True)
        on("SIGTERM", lambda: tell("job got it"))
        pause()
    """)
    chain.hears("worker ready")
    chain.signal(signal.SIGTERM)
    chain.hears("job got it")
    chain.signal(signal.SIGINT)
    assert chain.ends() == 75
    assert "worker got it" not in chain.heard
    assert any("SIGINT once more" in line for line in chain.heard)
    assert any("killed by SIGKILL" in line for line in chain.heard)


def test_what_an_attempt_leaves_behind_may_save_and_is_gone_before_the_next(start):
    # kill -9 of a launcher: its workers, in sessions of their own, run on.
    chain = start("""
        if attempt == 2:
            tell("second attempt")
            sys.exit(0)
        for name in ("w0", "w1"):
            start(f"on('SIGTERM', lambda: (tell('{name} saved'), sys.exit(75))); tell('{name} ready'); pause()",
                  start_new_session=name == "w1")
        pause()
    """)
    chain.hears("w")
    chain.hears("w")
    [job] = psutil.Process(chain.process.pid).children()
    job.kill()
    assert chain.ends() == 0
    assert chain.heard.index("second attempt") > max(chain.heard.index("w0 saved"), chain.heard.index("w1 saved"))


def test_what_ignores_the_stop_is_killed_after_the_grace_time(start):
    chain = start(
        """
        if attempt == 1:
            deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(int(sys.argv[1]), b'.'); pause()"
            read_end, write_end = os.pipe()
            subprocess.Popen([sys.executable, "-c", HEAD + deaf, str(write_end)], pass_fds=[write_end])
            os.read(read_end, 1)
        sys.exit(75 if attempt == 1 else 0)
        """,
        grace_seconds=0.2,
    )
    assert chain.ends() == 0, chain.heard


def test_a_second_stop_cuts_the_grace_time_short(start):
    chain = start(
        """
        deaf = "signal.signal(signal.SIGTERM, lambda *_: tell('deaf')); tell('ready'); pause()"
        start(deaf)
        on("SIGTERM", lambda: sys.exit(75))
        pause()
        """,
        grace_seconds=600.0,
    )
    chain.hears("ready")
    chain.signal(signal.SIGTERM)
    chain.hears("deaf")
    chain.signal(signal.SIGTERM)
    assert chain.ends() == 75


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


def test_nothing_heavy_is_imported():
    code = (
        "import sys, json, ckptman.jobs.chain, ckptman.jobs.local, ckptman.runtime.journal, "
        "ckptman.runtime.signals, ckptman.runtime.deadline; print(json.dumps(sorted(sys.modules)))"
    )
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"torch", "numpy", "pydantic", "rich", "psutil", "typer"} & set(modules)
