"""Batch scripts: what sbatch reads in one, and the file that is submitted in its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptman.errors import ConfigError
from ckptman.forecast.save_costs import UNMEASURED_SECONDS, warning_seconds
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
from ckptman.policies.save_policies import BeforeDeadline
from tests.helpers.slurm_chains import submitted


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
    assert limit_seconds(text) == seconds
    assert limit_seconds("") is None


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
