"""What is asked of Slurm and how its answers are understood, by executables that pretend; and the options of sbatch."""

import os
from pathlib import Path

import pytest

from ckptman.errors import ConfigError, SchedulerError
from ckptman.forecast.save_costs import UNMEASURED_SECONDS, warning_seconds
from ckptman.jobs.slurm import commands as slurm_module
from ckptman.jobs.slurm.batch_script import (
    Warned,
    array_tasks,
    batch_file,
    in_force,
    limit_seconds,
    parse,
    read_options,
    remarks,
    warned,
)
from ckptman.jobs.slurm.commands import QueueFullError, Slurm, UnreachableError, submission_environment
from ckptman.policies.save_policies import BeforeDeadline
from tests.helpers.fake_slurm import FakeSlurm

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def fake(tmp_path):
    return FakeSlurm(tmp_path / "bin")


def test_directives_end_at_the_first_command():
    script = parse(
        "#!/bin/bash -l\n# words\n#SBATCH --time=1:00:00 -N 2\n\n#SBATCH -J 'a name'  # why\n#SBATCH --requeue\n"
        "#SBATCH --signal B:USR2@90\nset -e\n#SBATCH --nodes=9\n",
        "train.sbatch",
    )
    assert script.interpreter == ("/bin/bash", "-l")
    assert len(script.directives) == 4
    assert script.options == {
        "--time": "1:00:00",
        "-N": "2",
        "--job-name": "a name",
        "--requeue": "",
        "--signal": "B:USR2@90",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("#!/bin/bash\r\n#SBATCH --time=5\r\necho\r\n", r"DOS line breaks.*sed -i"),
        ("#!/bin/bash\necho\r\n", "DOS line breaks"),
        ("#!/bin/bash\necho \0\n", "NUL characters"),
        ("#!/bin/bash\n#" + "x" * 4 * 1024 * 1024, "more than 4 MiB"),
    ],
)
def test_what_sbatch_refuses_a_script_for_is_seen_here(text, told):
    with pytest.raises(ConfigError, match=told):
        parse(text, "train.sbatch")


@pytest.mark.parametrize("text", ["echo hello\n", "#!\n", "\n#!/bin/bash\n"])
def test_a_script_without_an_interpreter_is_refused(text):
    with pytest.raises(ConfigError, match="first line"):
        parse(text, "train.sbatch")


def test_a_directive_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="No closing quotation"):
        parse("#!/bin/bash\n#SBATCH --comment='open\n", "train.sbatch")


def test_options_in_all_their_spellings():
    assert read_options(["-t10", "-t", "20", "--time", "30", "--exclusive", "--array=0-3", "word"]) == {
        "--time": "30",
        "--exclusive": "",
        "--array": "0-3",
    }


def test_the_batch_file_holds_the_directives_and_quotes_what_it_names():
    script = parse("#!/bin/bash\n#SBATCH --time=5\necho\n", "s")
    lines = batch_file(script, "s", "/opt/a python", Path("/a/$(touch x)/'chain'"), Path("/a b")).splitlines()
    assert lines[:2] == ["#!/bin/bash", "#SBATCH --time=5"]
    assert "workdir='/a b' chain='/a/$(touch x)/'\"'\"'chain'\"'\"'' python='/opt/a python'" in lines


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:30", 86430),
        ("04:00:00", 14400),
        ("2-01:02:03", 176523),
        ("0", None),
        ("UNLIMITED", None),
        ("", None),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits(text, seconds):
    assert limit_seconds({"--time": text}) == seconds
    assert limit_seconds({}) is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("USR2@180", Warned("USR2", 180)),
        ("B:USR2@90", Warned("USR2", 90, True)),
        ("b:sigterm", Warned("TERM", 60, True)),
        ("R:10@5", Warned("10", 5)),
        ("RB:USR1@7", Warned("USR1", 7, True)),
        ("", None),
        ("@30", None),
        (f"USR2@{'9' * 400}", None),
    ],
)
def test_warnings(text, meant):
    assert warned({"--signal": text}) == meant


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0-3", [0, 1, 2, 3]), ("7", [7]), ("1,3,5-7", [1, 3, 5, 6, 7]), ("0-15:4", [0, 4, 8, 12]), ("2,1,2", [1, 2])],
)
def test_tasks_of_an_array(text, tasks):
    assert array_tasks(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-5:0", "0-3%2", "1,,2", "-1", "0-99999999999", "0-500,600-1200"])
def test_arrays_that_cannot_be_chains(text):
    with pytest.raises(ConfigError, match="--array="):
        array_tasks(text)


def test_the_command_line_counts_before_variables_and_those_before_the_script():
    script = read_options(["--time=10", "--signal=B:USR2@60", "-x", "n1", "--nodes=2"])
    variables = {"SBATCH_TIMELIMIT": "20", "SBATCH_SIGNAL": "B:USR2@70", "SBATCH_ARRAY_INX": "0-1"}
    found = in_force(script, variables, read_options(["--time", "30"]))
    assert found == {
        "--time": "30",
        "--signal": "B:USR2@70",
        "--exclude": "n1",
        "--nodes": "2",
        "--array": "0-1",
    }


def test_a_warning_leaves_room_for_what_the_last_save_needs():
    policy = BeforeDeadline()
    assert warning_seconds(None) == UNMEASURED_SECONDS
    for save in (0.0, 0.5, 10, 47, 600):
        found = warning_seconds(save)
        assert policy.safety * save + policy.margin_seconds + 30 <= found < policy.safety * save + 30 + 60
        assert found % 30 == 0


def test_what_a_user_should_know():
    assert [each for each in remarks({}) if "no --time" in each]
    assert list(remarks({"--time": "10"})) == []
    assert [each for each in remarks({"--time": "1", "--dependency": "afterok:17"}) if "afterok:17" in each]
    assert [each for each in remarks({"--time": "1", "--array": "0-3"}) if "SLURM_ARRAY_TASK_COUNT is 1" in each]
