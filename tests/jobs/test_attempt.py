"""Chains of Slurm jobs: what each attempt does and decides, with a Slurm that only pretends and real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ckptman.cli.app import main
from ckptman.errors import BusyError, ConfigError, ExistsError, NotFoundError, SchedulerError
from ckptman.jobs.attempt import Supervisor
from ckptman.jobs.attempt_log import logs_of
from ckptman.jobs.chain_notes import notes_of
from ckptman.jobs.chain_record import AttemptRecord, Chain, JobRecord, Spec, find_chains
from ckptman.jobs.slurm import control
from ckptman.jobs.slurm.accounting import jobs_of_chains
from ckptman.jobs.slurm.submission import Submission, prepare, submit_chain
from ckptman.runtime.journal import read_journal
from ckptman.storage.io.durable_files import DISK
from tests.helpers.checkpoints import commit
from tests.helpers.fake_slurm import FakeSlurm

NOW = 1_000_000.0


@pytest.fixture
def fake(tmp_path, monkeypatch):
    found = FakeSlurm(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", found.environ["PATH"])
    found.plan("sbatch", *[(0, str(number), "") for number in range(101, 130)])
    found.plan("squeue", (0, "".join(f"{number}|RUNNING|None||x\n" for number in range(101, 130)), ""))
    return found


def submitted(tmp_path, fake, body, **wish):
    """A chain whose script is `body`, after its submission as job 101."""
    script = tmp_path / "train.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --time=5\n{body}\n")
    [made] = prepare(Submission(script=script, **wish), None, {}, NOW)
    submit_chain(made, fake.client(), NOW)
    return made.chain


def supervisor(chain, fake, number=1, now=NOW, say=print, **environ):
    """What runs job `number` of a chain, whose id is 100 and that number."""
    job = {"SLURM_JOB_ID": str(100 + number), "SLURM_JOB_NODELIST": "n1", **fake.environ, **environ}
    workdir = str(chain.folder.parent)
    return Supervisor(chain, number, job, fake.client(), workdir, say=say, clock=lambda: now, sleep=lambda _: None)


def attempt(chain, fake, number, now=NOW, **environ):
    """Run a job: its exit code and what was said."""
    said = []
    return supervisor(chain, fake, number, now, said.append, **environ).run(), said


def begin_and_be_killed(chain, fake):
    assert supervisor(chain, fake)._begin() is not None
    os.utime(chain.folder / "attempt-0001.json", (NOW, NOW))  # its last sign


def outcome(state, root="", step=0, reason="it said so", exit_code=0):
    """A line of a script that writes the outcome of its run."""
    facts = {"state": state, "step": step, "reason": reason, "exit_code": exit_code, "root": root}
    facts |= {"attempt": 1, "time_seconds": 0.0, "pid": 1, "host": "n1"}
    return f"cat > \"$CKPTMAN_OUTCOME\" <<'END'\n{json.dumps(facts)}\nEND"


# ---- Submitting -----------------------------------------------------------------------------------------------------


def test_a_submission(tmp_path, fake):
    chain = submitted(tmp_path, fake, "true", arguments=("a b",), options=("--nodes=2",))
    [argv] = fake.argv("sbatch")
    usual = ["--parsable", "--job-name=train.sbatch", "--open-mode=append"]
    assert argv == [*usual, "--nodes=2", str(chain.batch_file), "1"]
    assert [(job.number, job.job_id) for job in chain.jobs()] == [(1, "101")]
    assert chain.state.state == "active"
    assert chain.spec.arguments == ("a b",)


def test_what_sbatch_refuses_leaves_a_chain_that_has_stopped(tmp_path, fake):
    fake.plan("sbatch", (1, "", "sbatch: error: invalid account"))
    with pytest.raises(SchedulerError, match="invalid account"):
        submitted(tmp_path, fake, "true")
    [chain] = find_chains(tmp_path)
    assert chain.state.state == "stopped"


def test_upfront(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75", mode="upfront", upfront=3)
    assert [each[3:-2] for each in fake.argv("sbatch")] == [
        [],
        ["--dependency=afterany:101"],
        ["--dependency=afterany:102"],
    ]
    attempt(chain, fake, 1)
    assert len(fake.argv("sbatch")) == 3


def test_where_the_queue_takes_fewer_jobs_the_last_one_has_the_next_follow(tmp_path, fake, capsys):
    full = (1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""), full, (0, "103", ""))
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\n#SBATCH --time=5\nexit 75\n")
    assert main(["submit", "--upfront", "3", "train.sbatch"]) == 0
    assert "no more than 2 for now" in capsys.readouterr().out
    [chain] = find_chains(tmp_path)
    assert [each.job_id for each in chain.jobs()] == ["101", "102"]
    attempt(chain, fake, 1)
    assert len(chain.jobs()) == 2
    attempt(chain, fake, 2)
    assert [each.job_id for each in chain.jobs()] == ["101", "102", "103"]
    attempt(chain, fake, 3)
    assert len(chain.jobs()) == 3


def test_the_same_script_twice_is_refused(tmp_path, fake):
    first = submitted(tmp_path, fake, "true")
    with pytest.raises(ExistsError, match="goes on already"):
        prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW)
    prepare(Submission(script=tmp_path / "train.sbatch", another=True), None, {}, NOW)
    prepare(Submission(script=tmp_path / "train.sbatch", arguments=("other",)), None, {}, NOW)
    first.turn("finished", "", NOW)
    prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW)


def test_of_two_submissions_at_once_one_is_refused(tmp_path, fake):
    """Both were checked before either had left a trace."""
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\ntrue\n")
    folders = [tmp_path / "ckptman-chains" / name for name in ("one", "two")]
    both = [prepare(Submission(script=tmp_path / "train.sbatch"), each, {}, NOW)[0] for each in folders]
    submit_chain(both[0], fake.client(), NOW)
    with pytest.raises(ExistsError, match="goes on already"):
        submit_chain(both[1], fake.client(), NOW)
    assert not folders[1].exists()
    assert len(fake.argv("sbatch")) == 1


@pytest.mark.parametrize(
    ("script", "kind", "told"),
    [
        (None, NotFoundError, "no batch script"),
        (b"\xff\xfe\x00", ConfigError, "binary"),
        (b"#!/bin/bash\n#SBATCH -a 0-3%2\n", ConfigError, "leave the % out"),
        (b"#!/bin/bash\n#SBATCH -o out/%j.log\n", NotFoundError, "mkdir -p"),
    ],
)
def test_what_cannot_be_submitted(tmp_path, fake, script, kind, told):
    if script is not None:
        (tmp_path / "train.sbatch").write_bytes(script)
    with pytest.raises(kind, match=told):
        prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW)
    assert not (tmp_path / "ckptman-chains").exists()
    if told == "mkdir -p":
        (tmp_path / "out").mkdir()
        prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW)


# ---- An attempt -----------------------------------------------------------------------------------------------------


def test_an_attempt_submits_the_next_before_the_script_runs(tmp_path, fake):
    chain = submitted(tmp_path, fake, f'wc -l < "{fake.folder}/calls.jsonl" > seen; pwd >> seen; exit 75')
    code, said = attempt(chain, fake, 1, SLURM_RESTART_COUNT="0")
    assert code == 75
    assert (chain.folder.parent / "seen").read_text().split() == ["2", str(chain.folder.parent)]
    assert fake.argv("sbatch")[1][3:] == ["--dependency=afterany:101", str(chain.batch_file), "2"]
    assert not [name for name in fake.calls[1]["environ"] if name.startswith(("SLURM_JOB", "CKPTMAN"))]
    assert [job.job_id for job in chain.jobs()] == ["101", "102"]
    assert said[-2:] == ["attempt 1 stopped: exit code 75", "the chain goes on: job 102 is in the queue"]
    assert not fake.argv("scancel")


def test_a_finished_run_takes_its_successor_out_of_the_queue(tmp_path, fake):
    chain = submitted(tmp_path, fake, outcome("finished"))
    assert attempt(chain, fake, 1)[0] == 0
    assert chain.state.state == "finished"
    assert fake.argv("scancel") == [["102"]]


def test_a_successor_that_could_not_be_cancelled_leaves_at_once(tmp_path, fake):
    chain = submitted(tmp_path, fake, outcome("finished"))
    fake.plan("scancel", (1, "", "scancel: error: no permission"))
    attempt(chain, fake, 1)
    code, said = attempt(chain, fake, 2)
    assert (code, len(chain.attempts())) == (0, 1)
    assert "the chain is finished" in said[0]
    assert len(fake.argv("sbatch")) == 2


def test_what_an_attempt_is_told(tmp_path, fake):
    body = 'echo "$CKPTMAN_ATTEMPT $CKPTMAN_OUTCOME $CKPTMAN_CHAIN $TORCH_ELASTIC_SHUTDOWN_TIMEOUT|$*" >> seen; exit 75'
    chain = submitted(tmp_path, fake, body, arguments=("--lr", "1 $(x)"), first_arguments=("--start-step", "0"))
    attempt(chain, fake, 1)
    attempt(chain, fake, 2)
    folder = chain.folder
    assert (folder.parent / "seen").read_text().splitlines() == [
        f"1 {folder}/outcome-1.json {folder} 600|--lr 1 $(x) --start-step 0",
        f"2 {folder}/outcome-2.json {folder} 600|--lr 1 $(x)",
    ]


def test_three_crashes_end_the_chain_with_the_reason(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 7")
    codes = [attempt(chain, fake, number)[0] for number in (1, 2, 3)]
    assert codes == [7, 7, 7]
    assert chain.state.state == "stopped"
    assert "3 attempts in a row crashed within 10 min, with no known checkpoint" in chain.state.reason
    assert fake.argv("scancel") == [["102", "103", "104"][2:]]
    # A minute, and then two: what fails before its first save is not tried again at once.
    updates = [each[-1] for each in fake.argv("scontrol") if each[0] == "update"]
    assert updates == ["StartTime=now+60", "StartTime=now+120"]


def test_a_crash_after_a_commit_does_not_count(tmp_path, fake):
    chain = submitted(tmp_path, fake, f"{outcome('running', root=str(tmp_path / 'root'))}\nexit 7")
    for number in range(1, 6):
        commit(tmp_path / "root", 10 * number, time_seconds=NOW + number)
        assert attempt(chain, fake, number)[0] == 7
    assert chain.state.state == "active"
    assert [end.sequence for end in chain.ends().values()] == [1, 2, 3, 4, 5]


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


def test_hours_in_the_queue_do_not_make_an_attempt_long(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75", stall_limit=1)
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "", ""))
    attempt(chain, fake, 2, NOW + 7200)
    end = chain.ends()[1]
    assert (end.ended_seconds, end.seen_seconds, end.committed) == (NOW + 7200, NOW, None)
    assert "1 attempt ended within 10 min" in chain.state.reason


def test_a_requeued_job_keeps_its_successor(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "102|PENDING|Dependency|afterany:101|x\n", ""))
    attempt(chain, fake, 1, SLURM_RESTART_COUNT="1")
    assert [(each.number, each.job, each.restart) for each in chain.attempts()] == [(1, 1, 0), (2, 1, 1)]
    assert chain.ends()[1].reason == "the job was requeued"
    assert len(fake.argv("sbatch")) == 2


def test_a_job_that_was_submitted_twice_by_mistake_leaves(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    code, said = attempt(chain, fake, 1, SLURM_JOB_ID="999")
    assert (code, chain.attempts()) == (0, [])
    assert "job 101 is job 1" in said[0]


def test_a_full_queue_does_not_lose_the_chain(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    fake.plan("sbatch", (1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit"), (0, "102", ""))
    _, said = attempt(chain, fake, 1)
    assert any("no successor yet" in each for each in said)
    assert [job.job_id for job in chain.jobs()] == ["101", "102"]  # taken at the end


@pytest.mark.parametrize(
    ("wish", "later", "why"),
    [
        ({"max_attempts": 2}, 0.0, "no more than 2 attempts"),
        ({"until_seconds": NOW + 50}, 100.0, "date until"),
        ({"stall_limit": 2}, 0.0, "2 attempts in a row ended within 10 min, with no known checkpoint"),
    ],
)
def test_limits(tmp_path, fake, wish, later, why):
    chain = submitted(tmp_path, fake, "exit 75", **wish)
    attempt(chain, fake, 1)
    attempt(chain, fake, 2, now=NOW + later)
    assert chain.state.state == "stopped"
    assert why in chain.state.reason


@pytest.mark.parametrize(("used", "state"), [(59.0, "active"), (60.0, "stopped")])
def test_the_time_that_attempts_took(tmp_path, fake, used, state):
    chain = submitted(tmp_path, fake, "exit 75", max_walltime_seconds=60.0)
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "101|TIMEOUT|None||x\n", ""))
    attempt(chain, fake, 2, now=NOW + used)
    assert chain.state.state == state
    assert len(chain.attempts()) == (2 if state == "active" else 1)
    assert state == "active" or "no more were allowed" in chain.state.reason


def test_a_job_is_requeued_where_sbatch_is_forbidden(tmp_path, fake):
    chain = submitted(tmp_path, fake, '[ "$CKPTMAN_ATTEMPT" = 2 ] && exit 0; exit 75', mode="requeue")
    assert "--requeue" in fake.argv("sbatch")[0]
    attempt(chain, fake, 1)
    assert fake.argv("scontrol") == [["requeue", "101"]]
    attempt(chain, fake, 1, SLURM_RESTART_COUNT="1")
    assert chain.state.state == "finished"
    assert len(fake.argv("sbatch")) == len(fake.argv("scontrol")) == 1


# ---- Signals --------------------------------------------------------------------------------------------------------

CATCHES = "trap 'echo caught {0} >> seen; kill $!; exit 75' {0}; echo ready > ready; sleep 60 & wait"
PYTHON = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
    "open('ready', 'w').write('ready'); time.sleep(60)"
)
TELLS = f'{sys.executable} -S -c "{PYTHON}"; code=$?; echo told $code >> seen; exit $code'


@pytest.mark.parametrize(
    ("body", "sent", "seen", "steps", "job"),
    [
        (CATCHES.format("TERM"), signal.SIGTERM, "caught TERM", False, "JobState=COMPLETING"),
        (CATCHES.format("USR2"), signal.SIGUSR2, "caught USR2", False, ""),
        (TELLS, signal.SIGTERM, "told 75", False, "JobState=COMPLETING"),
        (TELLS, signal.SIGTERM, "told 75", False, "JobState=RUNNING PreemptTime=2026-11-29T23:00:00"),
        (TELLS, signal.SIGTERM, "told 75", True, "JobState=RUNNING PreemptTime=None"),
        (TELLS, signal.SIGUSR2, "told 75", True, ""),
    ],
)
def test_signals_reach_whoever_understands_them(tmp_path, fake, body, sent, seen, steps, job):
    fake.plan("scontrol", (0, job, ""))
    chain = submitted(tmp_path, fake, body)
    environ = {**os.environ, "SLURM_JOB_ID": "101", "SLURM_JOB_NODELIST": "n1"}
    command = [sys.executable, "-m", "ckptman.jobs.attempt", str(chain.folder), "1", str(tmp_path)]
    running = subprocess.Popen(command, env=environ)
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(sent)
        assert running.wait(30) == 75
    finally:
        running.kill()
    assert (tmp_path / "seen").read_text().strip() == seen
    assert fake.argv("scancel") == ([["--signal=SIGTERM", "101"]] if steps else [])
    assert chain.ends()[1].ending == "stopped"


def test_a_warning_before_the_run_listens_is_no_crash(tmp_path, fake):
    chain = submitted(tmp_path, fake, f"{sys.executable} -S -c 'import os; os.kill(os.getpid(), 15)'; exit 143")
    job = supervisor(chain, fake, SLURM_JOB_NODELIST="")
    job._asked = signal.SIGTERM
    assert job.run() == 143
    assert (chain.ends()[1].ending, chain.state.state) == ("interrupted", "active")
    assert not fake.argv("scontrol")


# ---- Records and submissions that fail ------------------------------------------------------------------------------


def test_a_full_disk_under_the_chain_ends_nothing(tmp_path, fake, monkeypatch):
    chain = submitted(tmp_path, fake, "echo >> ../seen; exit 75")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("create_whole_file", "replace_file"):
            patch.setattr(type(DISK), name, full)
        code, told = attempt(chain, fake, 1)
        assert code == 75
        assert any("that this attempt began cannot be recorded" in each for each in told)
        assert told[-1] == "the chain goes on: job 102 is in the queue"
    assert len(fake.argv("sbatch")) == 2  # none twice
    assert not chain.attempts()
    code, told = attempt(chain, fake, 2)
    assert (code, chain.state.state) == (75, "active")
    assert [each.job_id for each in chain.jobs()] == ["101", "102", "103"]
    with monkeypatch.context() as patch:  # and one that finishes takes its successor out of the queue
        for name in ("create_whole_file", "replace_file"):
            patch.setattr(type(DISK), name, full)
        chain.script.write_text("#!/bin/bash\nexit 0\n")
        attempt(chain, fake, 3)
    assert fake.argv("scancel")[-1] == ["104"]


def test_a_site_that_refuses_sbatch_on_its_nodes_has_the_job_requeued(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    fake.plan("sbatch", (1, "", "sbatch: error: Access/permission denied"))
    _, told = attempt(chain, fake, 1)
    assert fake.argv("scontrol") == [["requeue", "101"]]
    assert any("--requeue" in each for each in told)
    assert told[-1] == "the chain goes on with this job, which is requeued"
    fake.plan("scontrol", (1, "", "Job is pending execution for job 101"))
    assert attempt(chain, fake, 1)[1][-1] == "the chain goes on with this job, which is requeued"
    assert [each.job_id for each in chain.jobs()] == ["101"]


# ---- A node that lacks something ------------------------------------------------------------------------------------


def run_batch_file(fake, *replaces):
    """Run what is submitted, as job 101 on node n7; nobody sleeps. Its exit code and output."""
    sleep = fake.folder / "sleep"
    if not sleep.exists():
        sleep.write_text("#!/bin/bash\n")
        sleep.chmod(0o755)
    job = {"SLURM_JOB_ID": "101", "SLURMD_NODENAME": "n7", "SLURM_JOB_NODELIST": "n7", "SLURM_NTASKS": "4"}
    batch = fake.folder / "slurm_script"  # as Slurm does, from a place of its own
    done = subprocess.run(
        ["bash", batch, "1", *replaces], env={**os.environ, **fake.environ, **job}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("lost", ["folder", "python"])
def test_a_job_whose_node_lacks_the_chain_runs_elsewhere(tmp_path, fake, lost):
    chain = submitted(tmp_path, fake, "exit 75", options=("--nodes=2",))
    text = chain.batch_file.read_text()
    (fake.folder / "slurm_script").write_text(text.replace(sys.executable, "/no/python") if lost == "python" else text)
    if lost == "folder":
        chain.folder.rename(tmp_path / "hidden")
    fake.plan("scontrol", (0, "JobId=101 ExcNodeList=n9 NodeList=n7 Comment=ckptman-moved-3\n", ""), (0, "", ""))
    moved = "Comment=ckptman-moved-4"
    code, told = run_batch_file(fake)
    assert code == 0
    assert "try 10 of 10" in told
    assert "this job was requeued, without n7" in told
    assert fake.argv("scontrol")[1:] == [["requeue", "101"], ["update", "JobId=101", "ExcNodeList=n9,n7", moved]]
    # Where a job may not be requeued, another one takes its place.
    fake.plan("scontrol", (0, "JobId=101 ExcNodeList=(null)\n", ""), (1, "", "Requested operation is disabled"))
    code, told = run_batch_file(fake)
    assert "another job was submitted, without n7" in told
    call = fake.calls[-1]
    where = f"--chdir={tmp_path}"
    added = [where, "--dependency=afterany:101", "--exclude=n7", str(fake.folder / "slurm_script"), "1", "101"]
    assert call["argv"][1:] == ["--job-name=train.sbatch", "--open-mode=append", "--nodes=2", *added]
    assert "SLURM_NTASKS" not in call["environ"]
    assert "PATH=" not in told  # nothing of the environment is printed
    _, told = run_batch_file(fake, "90,91")  # it was itself in the place of others
    assert fake.calls[-1]["argv"][-2:] == ["1", "90,91,101"]
    code, told = run_batch_file(fake, ",".join(map(str, range(80, 90))))
    assert code == 1
    assert "10 nodes could not be used: ckptman chain resume continues the chain" in told


def test_a_mount_that_comes_late_costs_a_moment(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    (fake.folder / "slurm_script").write_text(chain.batch_file.read_text())
    (fake.folder / "sleep").write_text(f"#!/bin/bash\nmv {tmp_path}/hidden {chain.folder}\n")
    (fake.folder / "sleep").chmod(0o755)
    chain.folder.rename(tmp_path / "hidden")
    code, told = run_batch_file(fake)
    assert code == 75
    assert "try 1 of 10" in told
    assert chain.ends()[1].ending == "stopped"


def test_the_job_in_place_of_another_takes_its_number(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    assert "this one is left over" in attempt(chain, fake, 1, SLURM_JOB_ID="777")[1][0]
    job = supervisor(chain, fake, 1, SLURM_JOB_ID="777")
    job._replaces = "101"
    assert job.run() == 75
    assert chain.jobs()[0].job_id == "777"


def test_a_busy_root_is_waited_for(tmp_path, fake):
    told = "BusyError: another run writes to it"
    busy = outcome("failed", str(tmp_path / "root"), reason=told, exit_code=BusyError.exit_code)
    chain = submitted(tmp_path, fake, busy + "\nexit 1", crash_limit=1)
    attempt(chain, fake, 1)
    assert (chain.ends()[1].cause, chain.ends()[1].reaction, chain.state.state) == ("busy", "wait", "active")
    assert ["update", "JobId=102", "StartTime=now+300"] in fake.argv("scontrol")
    assert told in chain.ends()[1].reason


# ---- Control --------------------------------------------------------------------------------------------------------


def test_pause_and_resume(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    attempt(chain, fake, 1)
    fake.plan("squeue", (0, "102|PENDING|Dependency||x\n", ""))
    control.pause(chain, fake.client(), NOW)
    assert chain.state.state == "paused"
    assert fake.argv("scontrol") == [["uhold", "102"]]
    assert "the chain is paused" in attempt(chain, fake, 2)[1][0]
    fake.plan("squeue", (0, "102|PENDING|JobHeldUser||x\n", ""))
    control.resume(chain, fake.client(), NOW)
    assert fake.argv("scontrol")[-1] == ["release", "102"]
    assert chain.state.state == "active"


@pytest.mark.parametrize("mode", ["successor", "requeue"])
def test_a_chain_that_is_held_while_its_attempt_runs(tmp_path, fake, monkeypatch, mode):
    chain = submitted(tmp_path, fake, "exit 75", mode=mode)
    monkeypatch.setattr(Supervisor, "_run_script", lambda *_: control.hold(chain, NOW) or 75)
    said = attempt(chain, fake, 1)[1]
    assert said[-1].startswith("the chain is paused: paused by")
    assert "requeue" not in [each[0] for each in fake.argv("scontrol")]
    assert "the chain is paused" in attempt(chain, fake, 2)[1][0]
    assert len(chain.attempts()) == 1


def test_resume_after_crashes_counts_anew(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 7")
    for number in (1, 2, 3):
        attempt(chain, fake, number)
    fake.plan("squeue", (0, "", ""))
    control.resume(chain, fake.client(), NOW)
    assert chain.jobs()[-1].number == 5
    assert attempt(chain, fake, 5)[0] == 7
    assert chain.state.state == "active"


def test_cancel_takes_out_those_that_wait_before_those_that_run(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    chain.put_job(JobRecord(number=2, job_id="102", time_seconds=NOW))
    fake.plan("squeue", (0, "101|RUNNING|None||x\n102|PENDING|Dependency||x\n", ""))
    control.cancel(chain, fake.client(), NOW)
    assert fake.argv("scancel") == [["102", "101"]]
    assert chain.state.state == "cancelled"
    with pytest.raises(ConfigError, match="submit its script again"):
        control.resume(chain, fake.client(), NOW)
    with pytest.raises(ConfigError, match="nothing to pause"):
        control.pause(chain, fake.client(), NOW)


@pytest.mark.parametrize(
    ("own", "after", "state"),
    [
        ("COMPLETING", "CANCELLED", "stopped"),
        ("CANCELLED", "CANCELLED", "stopped"),
        ("COMPLETING", "PENDING", "active"),  # this attempt alone
        ("RUNNING", "CANCELLED", "active"),
    ],
)
def test_who_cancels_all_jobs_of_a_chain_means_the_chain(tmp_path, fake, own, after, state):
    fake.plan("squeue", (0, f"101|{own}|None||x\n102|{after}|None||x\n", ""))
    chain = submitted(tmp_path, fake, "kill -TERM $PPID; sleep 1; exit 75")
    _, told = attempt(chain, fake, 1)
    assert chain.state.state == state
    assert len(fake.argv("sbatch")) == (3 if (own, after) == ("RUNNING", "CANCELLED") else 2)
    if state == "stopped":
        assert "its jobs were cancelled (scancel). ckptman chain why explains it; ckptman chain resume" in told[-1]


def test_a_submission_that_was_killed_is_no_chain_that_goes_on(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    for job in chain.folder.glob("job-*.json"):
        job.unlink()
    with pytest.raises(ExistsError):  # it may be on its way
        prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW + 10)
    assert prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW + 1000)


@pytest.mark.parametrize(
    ("queue", "told"),
    [
        ("101|RUNNING|None||x\n", "active, running\n"),
        ("102|PENDING|Priority||x\n", "active, waiting in the queue\njob 102: pending, Priority\n"),
        (
            "102|PENDING|JobHeldAdmin||x\n",
            "job 102: pending, JobHeldAdmin: held by an administrator or by Slurm; scontrol",
        ),
        ("102|PENDING|JobHeldUser||x\n", "JobHeldUser: held; ckptman chain resume lets it run"),
        ("102|PENDING|BeginTime||x\n", "BeginTime: Slurm starts it later, as after a requeue; scontrol update"),
        ("", "active, but none of its jobs is in the queue: ckptman chain resume continues it"),
        (None, "Slurm does not answer: what is in the queue is unknown"),
    ],
)
def test_one_line_says_how_a_chain_is(tmp_path, fake, capsys, queue, told):
    chain = submitted(tmp_path, fake, "exit 75")
    chain.put_job(JobRecord(number=2, job_id="102", time_seconds=NOW))
    fake.plan("squeue", (1, "", "Unable to contact slurm controller") if queue is None else (0, queue, ""))
    assert main(["chain", "show"]) == 0
    shown = capsys.readouterr().out
    assert told in shown
    assert len(fake.argv("squeue")) == 1  # nobody waits for a controller that is away


def test_the_pause_after_a_crash_is_told_with_its_end(tmp_path, fake, capsys):
    chain = submitted(tmp_path, fake, "exit 1")
    attempt(chain, fake, 1, now=time.time())
    fake.plan("squeue", (0, "102|PENDING|BeginTime||x\n", ""))
    assert main(["chain", "show"]) == 0
    assert "BeginTime: a pause of 60 s after a crash with no new checkpoint, " in capsys.readouterr().out


# ---- Why it ended ---------------------------------------------------------------------------------------------------


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
    _logs_to(tmp_path / "log", monkeypatch)
    fake.plan("squeue", (0, f"{row}\n", ""))
    attempt(chain, fake, 1)
    end = chain.ends()[1]
    assert (end.ending, end.reason, end.cause) == ("stopped", reason, cause)


def test_a_job_held_its_nodes_until_its_batch_script_left(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    attempt(chain, fake, 1)
    os.utime(chain.folder / "attempt-0001.json", (NOW + 120, NOW + 120))  # it waited for the controller
    assert jobs_of_chains([chain.folder])[0][0].ended == NOW + 120
    os.utime(chain.folder / "attempt-0001.json", (NOW + 99_999, NOW + 99_999))  # a copy of the folder
    assert jobs_of_chains([chain.folder])[0][0].ended == NOW


def test_the_log_of_a_later_attempt_says_nothing_of_an_earlier_one(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\n")
    first, second = (
        AttemptRecord(
            number=n,
            job=n,
            job_id="1",
            restart=0,
            nodes="",
            host="",
            log=str(log),
            log_begin=begin,
            begun_seconds=NOW,
        )
        for n, begin in ((1, 4), (2, 8))
    )
    assert logs_of(first, [second]) == [[], ["two"]]
    assert logs_of(first) == [[], ["two", "three"]]


def test_the_loss_of_a_rank_at_the_time_limit_is_no_crash(tmp_path, fake, monkeypatch):
    told = outcome("failed", reason="RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    line = "slurmstepd: error: *** JOB 101 ON n1 CANCELLED AT 2026-11-30T02:38:25 DUE TO TIME LIMIT ***"
    chain = submitted(tmp_path, fake, f"{told}\necho '{line}' >> {tmp_path}/log\nexit 1")
    _logs_to(tmp_path / "log", monkeypatch)
    attempt(chain, fake, 1)
    assert (chain.ends()[1].ending, chain.ends()[1].reason) == ("interrupted", "the time limit")


def _logs_to(log, monkeypatch):
    log.touch()
    place = {"log": str(log), "log_begin": 0, "error_log": "", "error_begin": 0}
    monkeypatch.setattr("ckptman.jobs.attempt.logs_of_this_process", lambda: place)


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


def test_a_reaction_of_the_user_wins(tmp_path, fake):
    crash = outcome("failed", reason="OutOfMemoryError: CUDA out of memory") + "\nexit 1"
    chain = submitted(tmp_path, fake, crash, on={"oom": "again"}, crash_limit=1)
    attempt(chain, fake, 1)
    assert (chain.ends()[1].cause, chain.ends()[1].reaction, chain.state.state) == ("oom", "again", "active")
    assert not [each for each in fake.argv("scontrol") if "StartTime=now+60" in each]


def test_a_node_that_its_cause_blames_is_left_out(tmp_path, fake, monkeypatch):
    lines = ["[rank3]: RuntimeError: CUDA error: uncorrectable ECC error"]
    lines += ["srun: error: n2: task 3: Exited with exit code 1"]
    (tmp_path / "lines").write_text("\n".join(lines))
    chain = submitted(tmp_path, fake, f"cat {tmp_path}/lines >> {tmp_path}/log; exit 1")
    _logs_to(tmp_path / "log", monkeypatch)
    fake.plan("scontrol", (0, "", ""), (0, "n1\nn2\nn3\n", ""), (0, "", ""))
    attempt(chain, fake, 1)
    end = chain.ends()[1]
    assert (end.cause, end.reaction, end.bad_nodes) == ("ecc", "elsewhere", {"n2": "a GPU is faulty"})


@pytest.mark.parametrize(("body", "code"), [("exit 75", 0), ("exit 1", 1)])
def test_a_healthy_attempt_can_exit_with_0(tmp_path, fake, body, code):
    chain = submitted(tmp_path, fake, body, exit_zero=True)
    assert attempt(chain, fake, 1)[0] == code


# ---- The command line -----------------------------------------------------------------------------------------------


def test_the_whole_way_by_the_command_line(tmp_path, fake, capsys):
    script = tmp_path / "a name.sbatch"
    script.write_text("#!/bin/bash\necho 'ValueError: \x1b[31mno\x1b[0m' >&2; exit 7\n")
    assert main(["submit", "--dry-run", str(script)]) == 0
    assert "would submit: sbatch --parsable" in capsys.readouterr().out
    assert not (tmp_path / "ckptman-chains").exists()
    assert main(["submit", "--crash-limit", "1", str(script), "--its-own", "option"]) == 0
    out = capsys.readouterr().out
    assert "submitted job 101" in out
    assert "no --time" in out
    [folder] = (tmp_path / "ckptman-chains").glob("*-*")
    attempt(Chain(folder), fake, 1)
    for name in ([], [folder.name], ["101"], [str(folder)]):
        assert main(["chain", "show", *name]) == 0
        shown = capsys.readouterr().out
        assert "stopped, 1 attempt crashed within 10 min, with no known checkpoint" in shown
    assert main(["chain", "list"]) == 0
    assert "a name.sbatch" in capsys.readouterr().out
    assert main(["chain", "show", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["attempts"][0]["end"]["ending"]) == ("stopped", "crashed")
    assert main(["chain", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["jobs"] == ["101", "102"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "--max-walltime", "soon", "x"],
        ["submit", "--max-walltime", "-3h", "x"],
        ["submit", "--until", "soon", "x"],
        ["submit", "--until", "2020-01-01", "x"],
        ["submit", "--upfront", "0", "x"],
        ["submit", "--upfront", "2", "--requeue", "x"],
        ["submit", "--scheduler", "pbs", "x"],
        ["submit", "--scheduler", "local", "--requeue", "x"],
    ],
)
def test_wrong_usage(arguments, fake):
    assert main(arguments) == 2
    assert not fake.calls


def test_no_chain_here(tmp_path, fake, capsys):
    assert main(["chain", "show"]) == 3
    assert main(["chain", "cancel", "17"]) == 3
    assert main(["chain", "list"]) == 0
    assert "no chain was submitted" in capsys.readouterr().out


def test_a_record_that_is_damaged_is_told(tmp_path, fake, capsys):
    chain = submitted(tmp_path, fake, "true")
    (chain.folder / "state.json").write_text("{")
    assert main(["chain", "show"]) == 4
    assert "state.json is not what ckptman wrote" in capsys.readouterr().err
    assert isinstance(chain.spec, Spec)


# ---- Notes ----------------------------------------------------------------------------------------------------------


def noted(chain, fake, number, tmp_path, say=print, **environ):
    """Run a job as its batch script does: the events that its notifier was told of, and the notes."""
    path = tmp_path / f"notes-{number}"
    with notes_of(chain, f"cat >> {path}", say):
        supervisor(chain, fake, number, **environ).run()
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {each["event"] for each in notes}, notes


def test_a_note_of_a_crash_and_none_of_the_next_one_soon_after(tmp_path, fake):
    crash = outcome("failed", "/r", 7, "token=hf_" + "a1" * 15) + "\nexit 1"
    chain = submitted(tmp_path, fake, crash, notify="unused", on={"repeat": "count"})
    events, [note] = noted(chain, fake, 1, tmp_path)
    assert events == {"crashed"}
    assert (note["attempt"], note["job_id"], note["step"], note["root"]) == (1, "101", 7, "/r")
    assert note["chain"] == str(chain.folder)
    assert note["line"] == f"attempt 1 of chain {chain.folder.name} crashed: token=***"
    assert noted(chain, fake, 2, tmp_path)[0] == set(), "there was one just now"
    assert noted(chain, fake, 3, tmp_path)[0] == {"stopped"}, "the end is told in any case"


def test_no_note_of_an_attempt_that_saved_and_stopped(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    assert noted(chain, fake, 1, tmp_path)[0] == set()


def test_a_note_of_the_end_although_the_folder_of_the_chain_is_full(tmp_path, fake, monkeypatch):
    chain = submitted(tmp_path, fake, "exit 0")

    def full(path, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(DISK, "replace_file", full)
    assert noted(chain, fake, 1, tmp_path)[0] == {"finished"}


def test_a_note_of_a_bad_node(tmp_path, fake):
    chain = submitted(tmp_path, fake, 'echo "an Xid" > "$CKPTMAN_OUTCOME.node-n1"; exit 75')
    fake.plan("scontrol", (0, "n1\n", ""))
    events, notes = noted(chain, fake, 1, tmp_path)
    assert events == {"bad_node"}
    assert notes[0]["reason"] == "n1: an Xid"
    assert notes[0]["line"] == f"attempt 1 of chain {chain.folder.name}: node n1 is bad: an Xid"


def test_a_note_of_an_attempt_that_was_killed_comes_from_the_next_one(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "101|FAILED|NonZeroExitCode||x\n102|RUNNING|None||x\n", ""))
    events, [note] = noted(chain, fake, 2, tmp_path)
    assert events == {"crashed"}
    assert (note["attempt"], note["job_id"]) == (1, "101")


def test_the_run_gets_the_command_of_the_chain(tmp_path, fake):
    chain = submitted(tmp_path, fake, f'printf %s "$CKPTMAN_NOTIFY" > {tmp_path}/seen', notify="tell them")
    attempt(chain, fake, 1)
    assert (tmp_path / "seen").read_text() == "tell them"


def test_a_notifier_that_fails_leaves_a_line_and_an_event(tmp_path, fake):
    chain, said = submitted(tmp_path, fake, "exit 0"), []
    with notes_of(chain, "echo no route >&2; exit 9", said.append):
        assert attempt(chain, fake, 1)[0] == 0
    assert [line for line in said if "--notify failed (exit code 9: no route)" in line]
    assert chain.state.state == "finished"
    events, _ = read_journal(chain.events.path)
    assert [each["why"] for each in events if each["event"] == "notify failed"] == ["exit code 9: no route"]


def test_a_note_is_handed_on_before_the_job_requeues_itself(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 1", mode="requeue")
    with notes_of(chain, f"cat {fake.folder}/calls.jsonl > {tmp_path}/before", print):
        attempt(chain, fake, 1)
    assert ["requeue", "101"] in fake.argv("scontrol")
    assert '"requeue", "101"' not in (tmp_path / "before").read_text()
