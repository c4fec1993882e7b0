"""How an attempt ended, by everything that is known of it."""

import json
import os
import signal
import sys

import pytest

from ckptman.jobs.causes import Cause
from ckptman.jobs.verdict import is_finished, judge
from ckptman.runtime.outcome import Outcome
from tests.helpers.slurm_chains import NOW, attempt, begin_and_be_killed, logs_to, outcome, submitted, supervisor

RUN_OUTCOMES = {
    state: Outcome(state, 10, reason, 0, "/root-of-a-run", 1, 0.0, 1, "n1")
    for state, reason in (
        ("finished", "the run ended"),
        ("stopped", "SIGTERM on rank 2"),
        ("failed", "CommitError: disk full"),
        ("running", ""),
    )
}


@pytest.mark.parametrize(
    ("returncode", "reported", "ending", "reason"),
    [
        (1, "finished", "finished", "the run ended"),
        (0, "finished", "finished", "the run ended"),
        (1, "stopped", "stopped", "SIGTERM on rank 2"),
        (0, "stopped", "stopped", "SIGTERM on rank 2"),
        (0, "failed", "crashed", "CommitError: disk full"),
        (-9, "running", "crashed", "killed by SIGKILL, and the run did not say that it ended"),
        (0, "running", "crashed", "exit code 0, and the run did not say that it ended: use the Checkpointer in a "),
        (75, "running", "stopped", "exit code 75"),
        (0, None, "finished", "exit code 0"),
        (75, None, "stopped", "exit code 75"),
        (-40, None, "crashed", "killed by signal 40"),
        (137, None, "crashed", "exit code 137"),
    ],
)
def test_the_outcome_wins_over_the_exit_code(returncode, reported, ending, reason):
    verdict = judge(returncode, RUN_OUTCOMES.get(reported), [], None)
    assert verdict.ending == ending
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("returncode", "reported", "ending", "reason"),
    [
        (0, None, "stopped", "SIGTERM was passed on (exit code 0)"),
        (1, None, "interrupted", "SIGTERM was passed on (exit code 1)"),
        (-9, "running", "interrupted", "SIGTERM was passed on (killed by SIGKILL)"),
        (75, None, "stopped", "exit code 75"),
        (1, "stopped", "stopped", "SIGTERM on rank 2"),
        (0, "finished", "finished", "the run ended"),
        (1, "failed", "crashed", "CommitError: disk full"),
    ],
)
def test_an_attempt_that_was_asked_to_stop(returncode, reported, ending, reason):
    asked = Cause("asked", "SIGTERM was passed on", (), "again")
    verdict = judge(returncode, RUN_OUTCOMES.get(reported), [], asked)
    assert (verdict.ending, verdict.reason) == (ending, reason)


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        ("here", True),
        ("her?", True),
        ("gone", False),
        ("test -e here", True),
        ("test -e gone", False),
        ("sleep 60", False),
        ("no-such-program x", False),
    ],
)
def test_what_finished_means(tmp_path, monkeypatch, done, expected):
    monkeypatch.setattr("ckptman.jobs.verdict.DONE_SECONDS", 2.0)
    (tmp_path / "here").touch()
    is_done, why = is_finished(done, str(tmp_path), dict(os.environ))
    assert is_done is expected
    assert "--done" in why


@pytest.mark.parametrize(("code", "ending"), [(0, "stopped"), (1, "interrupted")])
def test_who_was_asked_to_stop_has_not_finished(tmp_path, fake, code, ending):
    chain = submitted(tmp_path, fake, f"kill -TERM $PPID; sleep 1; exit {code}")
    attempt(chain, fake, 1)
    assert chain.state.state == "active"
    end = chain.ends()[1]
    assert (end.ending, end.reason) == (ending, f"SIGTERM from Slurm (exit code {code})")


def test_a_warning_that_only_the_tasks_get_is_known_by_the_clock(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 0", options=("--time=5", "--signal=TERM@20"))
    clock = iter([NOW, *[NOW + 250.0] * 50])
    job = supervisor(chain, fake)
    job._clock = lambda: next(clock)
    job.run()
    assert (chain.ends()[1].ending, chain.state.state) == ("stopped", "active")
    assert "--signal warned it 20 s before the time limit" in chain.ends()[1].reason


@pytest.mark.parametrize(
    ("state", "told"), [("TIMEOUT", "the time limit"), ("PREEMPTED", "preempted"), ("NODE_FAIL", "a node failed")]
)
def test_slurm_says_why_it_ended_a_job(tmp_path, fake, state, told):
    chain = submitted(tmp_path, fake, "exit 0")
    fake.plan("squeue", (0, f"101|{state}|None||x\n", ""))
    attempt(chain, fake, 1)
    assert (chain.ends()[1].ending, chain.ends()[1].reason) == ("stopped", f"{told} (exit code 0)")


def test_done_decides_for_a_program_that_always_exits_with_0(tmp_path, fake):
    chain = submitted(tmp_path, fake, "echo >> seen; exit 0", done="test $(wc -l < seen) = 3")
    for number in range(1, 4):
        attempt(chain, fake, number)
    assert [each.ending for each in chain.ends().values()] == ["stopped", "stopped", "finished"]
    assert chain.state.state == "finished"


@pytest.mark.parametrize(
    ("state", "ending", "reason"),
    [
        ("TIMEOUT", "interrupted", "the time limit"),
        ("PREEMPTED", "interrupted", "preempted"),
        ("NODE_FAIL", "interrupted", "a node failed"),
        ("CANCELLED", "interrupted", "cancelled"),
        ("FAILED", "crashed", "killed (FAILED, NonZeroExitCode)"),
        ("OUT_OF_MEMORY", "crashed", "the job ran out of host memory: OUT_OF_MEMORY"),
        (None, "interrupted", "killed; the cause is unknown, as Slurm no longer knows job 101"),
    ],
)
def test_how_an_attempt_ended_that_was_killed(tmp_path, fake, state, ending, reason):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, f"101|{state}|NonZeroExitCode||x\n" if state else "", ""))
    attempt(chain, fake, 2)
    assert (chain.ends()[1].ending, chain.ends()[1].reason) == (ending, reason)
    assert chain.ends()[2].ending == "stopped"


@pytest.mark.parametrize(
    ("row", "log", "reason", "cause"),
    [
        ("101|PREEMPTED|None||x", "", "preempted (SIGTERM on rank 1)", "preempted"),
        ("101|COMPLETING|TimeLimit||x", "", "the time limit (SIGTERM on rank 1)", "time-limit"),
        ("101|NODE_FAIL|None||x", "", "a node failed (SIGTERM on rank 1)", "node"),
        (
            "101|RUNNING|None||x",
            "slurmstepd: error: *** JOB 101 ON n1 CANCELLED AT 2026-11-30T02:38:25 ***",
            "cancelled with scancel (SIGTERM on rank 1)",
            "cancelled",
        ),
        ("101|RUNNING|None||x", "", "SIGTERM on rank 1", ""),
    ],
)
def test_a_run_that_was_asked_to_stop_says_by_whom(tmp_path, fake, monkeypatch, row, log, reason, cause):
    told = outcome("stopped", step=7, reason="SIGTERM on rank 1")
    chain = submitted(tmp_path, fake, f"{told}\necho '{log}' >> {tmp_path}/log\nexit 75")
    logs_to(tmp_path / "log", monkeypatch)
    fake.plan("squeue", (0, f"{row}\n", ""))
    attempt(chain, fake, 1)
    end = chain.ends()[1]
    assert (end.ending, end.reason, end.cause) == ("stopped", reason, cause)


def test_the_loss_of_a_rank_at_the_time_limit_is_no_crash(tmp_path, fake, monkeypatch):
    told = outcome("failed", reason="RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    line = "slurmstepd: error: *** JOB 101 ON n1 CANCELLED AT 2026-11-30T02:38:25 DUE TO TIME LIMIT ***"
    chain = submitted(tmp_path, fake, f"{told}\necho '{line}' >> {tmp_path}/log\nexit 1")
    logs_to(tmp_path / "log", monkeypatch)
    attempt(chain, fake, 1)
    assert (chain.ends()[1].ending, chain.ends()[1].reason) == ("interrupted", "the time limit")


def test_an_outcome_that_comes_after_the_script_has_ended_is_waited_for(tmp_path, fake):
    running = outcome("running", reason="").replace('"pid": 1', f'"pid": {os.getpid()}')
    chain = submitted(tmp_path, fake, f"{running}\nexit 138")
    job = supervisor(chain, fake)

    def sleep(_):  # the ranks save meanwhile
        told = {**json.loads(chain.outcome_path(1).read_text()), "state": "stopped", "reason": "SIGUSR1 on rank 0"}
        chain.outcome_path(1).write_text(json.dumps(told))

    job._sleep = sleep
    job.run()
    assert (chain.ends()[1].ending, chain.ends()[1].reason) == ("stopped", "SIGUSR1 on rank 0")


def test_a_warning_before_the_run_listens_is_no_crash(tmp_path, fake):
    chain = submitted(tmp_path, fake, f"{sys.executable} -S -c 'import os; os.kill(os.getpid(), 15)'; exit 143")
    job = supervisor(chain, fake, SLURM_JOB_NODELIST="")
    job._asked = signal.SIGTERM
    assert job.run() == 143
    assert (chain.ends()[1].ending, chain.state.state) == ("interrupted", "active")
    assert not fake.argv("scontrol")
