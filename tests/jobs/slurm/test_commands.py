"""What is asked of Slurm and how its answers are understood, by executables that pretend."""

import os
from pathlib import Path

import pytest

from ckptman.errors import SchedulerError
from ckptman.jobs.slurm import commands as slurm_module
from ckptman.jobs.slurm.commands import QueueFullError, Slurm, UnreachableError, submission_environment

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("out", ["17\n", "17;cluster\n", "a word of the site\n17\n"])
def test_the_id_of_a_job(fake, out):
    fake.plan("sbatch", (0, out, ""))
    assert fake.client().submit(Path("/c/batch.sh"), 2, ["--nodes=2"]) == "17"
    assert fake.argv("sbatch") == [["--parsable", "--nodes=2", "/c/batch.sh", "2"]]


def test_nothing_passes_through_a_shell(fake, tmp_path):
    fake.plan("sbatch", (0, "1", ""))
    evil = f"--job-name=a b;'\"%j\n$(touch {tmp_path}/here) `touch {tmp_path}/here`"
    fake.client().submit(tmp_path / "a $(touch here);b" / "batch.sh", 1, [evil])
    assert fake.argv("sbatch")[0][1:3] == [evil, f"{tmp_path}/a $(touch here);b/batch.sh"]
    assert not (tmp_path / "here").exists()


def test_a_refusal_has_the_words_of_sbatch_and_the_command(fake):
    fake.plan("sbatch", (1, "", "sbatch: error: invalid partition specified: gpu"))
    with pytest.raises(
        SchedulerError, match=r"invalid partition specified: gpu.*sbatch --parsable '--comment=a b'"
    ) as e:
        fake.client().submit(Path("/c/batch.sh"), 1, ["--comment=a b"])
    assert e.value.exit_code == 8
    assert len(fake.calls) == 1


def test_no_id_is_an_error(fake):
    fake.plan("sbatch", (0, "Submitted\n", ""))
    with pytest.raises(SchedulerError, match="no job id"):
        fake.client().submit(Path("/c/batch.sh"), 1, [])


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nBatch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)",
        "sbatch: error: AssocMaxSubmitJobLimit",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
    ],
)
def test_a_full_queue_is_told_apart(fake, said):
    fake.plan("sbatch", (1, "", said))
    with pytest.raises(QueueFullError):
        fake.client().submit(Path("/c/batch.sh"), 1, [])
    assert len(fake.calls) == 1


def test_a_lost_answer_is_never_submitted_twice(fake):
    fake.plan("sbatch", (1, "", TIMED_OUT), (0, "99", ""))
    rows = "7|PENDING|Dependency|afterany:6|/c/batch.sh 3\n8|PENDING|Dependency||/c/batch.sh 33\n"
    fake.plan("squeue", (0, rows, ""))
    assert fake.client().submit(Path("/c/batch.sh"), 3, []) == "7"
    assert len(fake.argv("sbatch")) == 1


def test_a_submission_that_was_not_taken_is_tried_again_with_back_off(fake):
    fake.plan("sbatch", (1, "", TIMED_OUT), (1, "", DOWN), (1, "", TIMED_OUT), (0, "99", ""))
    fake.plan("squeue", (1, "", DOWN), (0, "5|COMPLETED|None||/c/batch.sh 3\n", ""))
    slept = []
    assert fake.client(slept=slept).submit(Path("/c/batch.sh"), 3, []) == "99"
    assert slept == [1.0, 1.0, 2.0, 4.0]  # the second of them for squeue


def test_a_controller_that_is_gone_is_given_up(fake):
    fake.plan("squeue", (1, "", DOWN))
    slept = []
    with pytest.raises(UnreachableError, match="Unable to contact"):
        fake.client(slept=slept).jobs(["1"])
    assert slept[:6] == [1, 2, 4, 8, 16, 30]
    assert 120 <= sum(slept) < 160


def test_a_call_that_hangs_counts_as_lost(fake, monkeypatch):
    monkeypatch.setattr(slurm_module, "CALL_SECONDS", 0.5)
    fake.plan("scancel", (0, "", "", 60), (0, "", ""))
    fake.client().cancel(["1"])
    assert len(fake.argv("scancel")) == 2


def test_jobs_by_id(fake):
    rows = "1|RUNNING|None||/c/batch.sh 1\n2|PENDING|Dependency|afterany:1(unfulfilled)|/c|d/batch.sh 2\nnoise\n"
    fake.plan("squeue", (0, rows, ""))
    found = fake.client().jobs(["1", "2"])
    assert (found["1"].waits, found["1"].over) == (False, False)
    assert found["2"].waits
    assert found["2"].command == "/c|d/batch.sh 2"
    assert fake.argv("squeue")[0][:5] == ["-h", "-t", "all", "-j", "1,2"]


def test_jobs_that_slurm_has_forgotten(fake):
    fake.plan("squeue", (1, "", "slurm_load_jobs error: Invalid job id specified"))
    assert fake.client().jobs(["1"]) == {}
    assert fake.client().jobs([]) == {}


def test_without_slurm_the_remedy_is_named(tmp_path):
    with pytest.raises(SchedulerError, match=r"sbatch is not on PATH.*--scheduler local"):
        Slurm({"PATH": str(tmp_path)}).submit(Path("/c/batch.sh"), 1, [])


def test_a_folder_that_is_gone_is_not_taken_for_a_missing_slurm(fake, tmp_path):
    with pytest.raises(SchedulerError, match="gone"):
        Slurm(fake.environ, str(tmp_path / "gone")).jobs(["1"])


def test_no_trace_of_the_job_that_submits(fake):
    environ = {
        "PATH": os.environ["PATH"],
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_RESTART_COUNT": "3",
        "SLURM_MEM_PER_NODE": "1",
        "SBATCH_PARTITION": "of the job",
        "CKPTMAN_ATTEMPT": "2",
        "CKPTMAN_OUTCOME": "/x",
        "CKPTMAN_IO_THREADS": "2",
        "HOME": "/home/me",
    }
    assert submission_environment(environ, {"SBATCH_ACCOUNT": "mine"}) == {
        "PATH": os.environ["PATH"],
        "SLURM_CONF": "/etc/slurm.conf",
        "CKPTMAN_IO_THREADS": "2",
        "HOME": "/home/me",
        "SBATCH_ACCOUNT": "mine",
    }
