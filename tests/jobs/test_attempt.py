"""One attempt of a chain of Slurm jobs, with a Slurm that only pretends and real processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from ckptman.jobs.chain_record import Chain, JobRecord
from ckptman.jobs.slurm.accounting import jobs_of_chains
from ckptman.jobs.slurm.submission import slurm_of, submit_next
from ckptman.storage.io.durable_files import DISK
from tests.helpers.slurm_chains import NOW, attempt, begin_and_be_killed, outcome, submitted, supervisor


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


def test_a_job_is_requeued_where_sbatch_is_forbidden(tmp_path, fake):
    chain = submitted(tmp_path, fake, '[ "$CKPTMAN_ATTEMPT" = 2 ] && exit 0; exit 75', mode="requeue")
    assert "--requeue" in fake.argv("sbatch")[0]
    attempt(chain, fake, 1)
    assert fake.argv("scontrol") == [["requeue", "101"]]
    attempt(chain, fake, 1, SLURM_RESTART_COUNT="1")
    assert chain.state.state == "finished"
    assert len(fake.argv("sbatch")) == len(fake.argv("scontrol")) == 1


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


def test_a_successor_that_could_not_be_recorded_is_not_submitted_twice(tmp_path, fake, monkeypatch):
    chain = submitted(tmp_path, fake, "exit 75")
    chain.put_job(JobRecord(number=2, job_id="90", time_seconds=NOW))  # somebody has cancelled that one
    fake.plan("squeue", (0, "90|CANCELLED|None||x\n102|PENDING|Dependency||x\n101|RUNNING|None||x\n", ""))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DISK, "replace_file", full)
        assert attempt(chain, fake, 1)[1][-1] == "the chain goes on: job 102 is in the queue"
    assert len(fake.argv("sbatch")) == 2
    chain.put_unwritten()
    assert Chain(chain.folder).job(2).job_id == "102"


def test_a_successor_is_noted_as_soon_as_there_is_room(tmp_path, fake, monkeypatch):
    chain = submitted(tmp_path, fake, "exit 75")
    chain.put_job(JobRecord(number=2, job_id="90", time_seconds=NOW))
    fake.plan("squeue", (0, "102|PENDING|Dependency||x\n", ""))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(DISK, "replace_file", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        chain.put_job(JobRecord(number=2, job_id="102", time_seconds=NOW))
    assert submit_next(chain, slurm_of(chain.spec), 1, "101", NOW).job_id == "102"
    assert Chain(chain.folder).job(2).job_id == "102"


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


def test_the_job_in_place_of_another_takes_its_number(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    assert "this one is left over" in attempt(chain, fake, 1, SLURM_JOB_ID="777")[1][0]
    job = supervisor(chain, fake, 1, SLURM_JOB_ID="777")
    job._replaces = "101"
    assert job.run() == 75
    assert chain.jobs()[0].job_id == "777"


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


def test_a_job_held_its_nodes_until_its_batch_script_left(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    attempt(chain, fake, 1)
    os.utime(chain.folder / "attempt-0001.json", (NOW + 120, NOW + 120))  # it waited for the controller
    assert jobs_of_chains([chain.folder])[0][0].ended == NOW + 120
    os.utime(chain.folder / "attempt-0001.json", (NOW + 99_999, NOW + 99_999))  # a copy of the folder
    assert jobs_of_chains([chain.folder])[0][0].ended == NOW


@pytest.mark.parametrize(("body", "code"), [("exit 75", 0), ("exit 1", 1)])
def test_a_healthy_attempt_can_exit_with_0(tmp_path, fake, body, code):
    chain = submitted(tmp_path, fake, body, exit_zero=True)
    assert attempt(chain, fake, 1)[0] == code
