"""Chains on this machine: the decisions with processes that only pretend, the signals with real ones."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ckptman import ExistsError, RootError, SchedulerError
from ckptman.jobs import chain_record, history, local
from ckptman.jobs.chain_record import Wish, new_chain_dir
from ckptman.jobs.evidence import newest_sequence, passed_over_text
from ckptman.jobs.local import run_chain
from ckptman.jobs.slurm import control
from ckptman.runtime.outcome import Outcome, write_outcome
from ckptman.storage.format.manifest import Nonfinite
from tests.helpers.checkpoints import commit

# ---- Decisions ------------------------------------------------------------------------------------------------------


def outcome(state, reason="", root="/root-of-a-run"):
    return Outcome(state, 10, reason, 0, str(root), 1, 0.0, 1, "n1")


class Pretended:
    """Ends each attempt as planned: with an exit code and, if there is one, an outcome or the bytes of one; and before
    that does what there is to do."""

    def __init__(self, *plan, stop_after=None):
        self.plan, self.stop_after = plan, stop_after
        self.seen, self.asked = [], None

    def stop_asked(self):
        return signal.SIGTERM if self.stop_after is not None and len(self.seen) >= self.stop_after else None

    def run_attempt(self, command, env):
        returncode, wrote, *acts = self.plan[len(self.seen)]
        self.seen.append(dict(env))
        for act in acts:
            act()
        path = Path(env["CKPTMAN_OUTCOME"])
        if isinstance(wrote, Outcome):
            write_outcome(path, wrote)
        elif wrote is not None:
            path.write_bytes(wrote)
        return returncode


def chain(tmp_path, *plan, stop_after=None, **wish):
    """Exit code, what was said, and the number of attempts."""
    scheduler, told = Pretended(*plan, stop_after=stop_after), []
    with pretending(scheduler):
        code = run_chain(["train"], tmp_path / "chain", told.append, Wish(**wish))
    return code, told, len(scheduler.seen)


@contextlib.contextmanager
def pretending(scheduler):
    """Have chains run on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "LocalScheduler", lambda say, signals: scheduler)
        yield patch


def saving(root, step):
    """Commit a checkpoint of now."""
    return lambda: commit(root, step, time_seconds=time.time() + 1)


@pytest.mark.parametrize(
    ("returncode", "wrote", "said"),
    [
        (1, outcome("finished", "the run ended"), "attempt 1 finished: the run ended"),
        (0, outcome("stopped", "SIGTERM on rank 2"), "attempt 1 stopped: SIGTERM on rank 2"),
        (0, outcome("running"), "attempt 1 crashed: exit code 0, and the run did not say that it ended: use the"),
    ],
)
def test_the_outcome_wins_over_the_exit_code(tmp_path, returncode, wrote, said):
    code, told, attempts = chain(tmp_path, (returncode, wrote), (0, None))
    assert told[0].startswith(said)
    assert (code, attempts) == (0, 1 if "finished" in told[0] else 2)


def test_a_chain_that_is_held_starts_no_further_attempt(tmp_path):
    class Held(Pretended):
        def run_attempt(self, command, env):
            control.hold(chain_record.Chain(Path(env["CKPTMAN_CHAIN"])), 0.0)
            return super().run_attempt(command, env)

    told = []
    with pretending(Held((75, None), (0, None))):
        assert run_chain(["train"], tmp_path / "chain", told.append) == 75
    assert "submit again" in told[-1]
    assert chain_record.Chain(tmp_path / "chain").state.state == "stopped"


def test_a_crash_that_committed_something_does_not_count(tmp_path):
    root = tmp_path / "root"
    crash = (1, outcome("running", root=root))
    saves = [(*crash, saving(root, step)) for step in (10, 20, 30)]
    with pytest.raises(SchedulerError, match="attempt 7"):
        chain(tmp_path, saves[0], saves[1], crash, saves[2], crash, crash, crash)


def test_another_root_begins_anew(tmp_path):
    """One that a run has not named before may hold fewer checkpoints than the last one."""
    first, second = tmp_path / "first", tmp_path / "second"
    plan = [(1, outcome("running", root=first), saving(first, 1), saving(first, 2)), (1, None)]
    plan += [(1, outcome("running", root=second), saving(second, 1)), (0, None)]
    assert chain(tmp_path, *plan, crash_limit=2)[0] == 0
    ends = chain_record.Chain(tmp_path / "chain").ends().values()
    assert [(Path(end.root).name, end.sequence, end.committed) for end in ends] == [
        ("first", 2, True),
        ("first", 2, False),
        ("second", 1, True),
        ("second", 1, False),
    ]


def test_no_attempt_starts_over_where_the_checkpoints_are_gone(tmp_path):
    root = tmp_path / "root"
    stopped = outcome("stopped", root=root)
    saved, gone = (75, stopped, saving(root, 1)), lambda: root.rename(tmp_path / "elsewhere")
    with pytest.raises(SchedulerError, match="root held checkpoints of earlier attempts and holds none now"):
        chain(tmp_path, saved, (75, stopped, saving(root, 2)), (75, stopped, gone), (0, None))
    # A run that is finished may have moved them itself.
    (tmp_path / "elsewhere").rename(tmp_path / "seen")
    finished = (0, outcome("finished", root=root), gone)
    assert chain(tmp_path / "again", saved, finished)[0] == 0


def test_a_root_that_cannot_be_read_is_no_progress(tmp_path, monkeypatch):
    def unreadable(root, since_seconds=0.0):
        raise RootError(5, "the checkpoint root cannot be read")

    monkeypatch.setattr(history, "newest_sequence", unreadable)
    crash = (1, outcome("running"))
    with pytest.raises(SchedulerError, match=r"3 attempts in a row.* cannot be read.*; counted as no progress"):
        chain(tmp_path, crash, crash, crash)


def test_what_cannot_be_recorded_keeps_no_attempt_from_running(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "chain"
    crash = (1, outcome("running", root=root))

    def full():  # no record can be made, and none of before can be read
        folder.rename(tmp_path / "hidden")
        folder.mkdir()
        (folder / "attempt-0002.json").mkdir()
        (folder / "ended-0001.json").mkdir()

    told = []
    plan = [(*crash, full), crash, crash, (0, None)]
    with pretending(Pretended(*plan)), pytest.raises(SchedulerError, match="3 attempts in a row"):
        run_chain(["train"], folder, told.append)
    assert any("cannot be recorded in" in each for each in told)


def test_the_records_hold_no_secrets(tmp_path, monkeypatch):
    token = "hf_" + "a1" * 15
    seen = Pretended((0, None))
    with pretending(seen):
        wish = Wish(notify=f"echo {token}", done=f"echo {token}")
        assert run_chain(["train", f"--token={token}", token], tmp_path / "chain", [].append, wish) == 0
    assert token not in (tmp_path / "chain/chain.json").read_text()
    assert seen.seen[0]["CKPTMAN_NOTIFY"] == f"echo {token}"


def test_an_outcome_that_cannot_be_read_is_told_and_passed_over(tmp_path):
    code, told, _ = chain(tmp_path, (75, b"{"), (0, None))
    assert code == 0
    assert "not an outcome" in told[0]
    assert told[1] == "attempt 1 stopped: exit code 75"


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


def test_a_crash_loop_over_old_checkpoints_ends_after_three_attempts_too(tmp_path):
    commit(tmp_path / "root", 10, time_seconds=time.time() - 60)
    crash = (1, outcome("running", root=str(tmp_path / "root")))
    with pretending(Pretended(crash, crash, crash)), pytest.raises(SchedulerError, match="3 attempts in a row"):
        run_chain(["train"], tmp_path / "chain", [].append)


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
        run_chain(["train"], tmp_path / "chain", [].append, Wish(stall_limit=2))
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


def test_nothing_heavy_is_imported():
    code = (
        "import sys, json, ckptman.jobs.verdict, ckptman.jobs.local, ckptman.runtime.journal, "
        "ckptman.runtime.signals, ckptman.runtime.deadline; print(json.dumps(sorted(sys.modules)))"
    )
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"torch", "numpy", "pydantic", "rich", "psutil", "typer"} & set(modules)
