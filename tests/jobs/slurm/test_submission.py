"""What is put into the queue: the first job of a chain, the next ones, each task of an array; and what is refused."""

import pytest

from ckptman.cli.app import main
from ckptman.errors import ConfigError, ExistsError, NotFoundError, SchedulerError
from ckptman.jobs.chain_record import find_chains
from ckptman.jobs.history import History
from ckptman.jobs.slurm.submission import Submission, prepare, submit_chain
from ckptman.runtime.journal import Journal
from ckptman.storage.format.paths import journal_path
from tests.helpers.slurm_chains import NOW, attempt, outcome, submitted


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


def test_a_submission_that_was_killed_is_no_chain_that_goes_on(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    for job in chain.folder.glob("job-*.json"):
        job.unlink()
    with pytest.raises(ExistsError):  # it may be on its way
        prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW + 10)
    assert prepare(Submission(script=tmp_path / "train.sbatch"), None, {}, NOW + 1000)


def measured(root, seconds):
    journal = Journal(journal_path(root))
    journal_path(root).parent.mkdir(parents=True, exist_ok=True)
    journal.record("save_durable", step=5, seconds=seconds)
    journal.close()
    return str(root)


def test_the_warning_is_as_early_as_the_measured_save_needs(tmp_path, fake):
    root = measured(tmp_path / "root", 100.0)
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=("--time=2:00:00",))
    assert "--signal=B:USR2@180" in fake.submissions[-1]
    attempt(chain, fake, 1)
    attempt(chain, fake, 2)
    assert "--signal=B:USR2@210" in fake.submissions[-1]


@pytest.mark.parametrize("options", [("--time=9",), ("--time=0",), ("--time=60", "--signal=USR1@30")])
def test_where_no_warning_is_added(tmp_path, fake, options):
    submitted(tmp_path, fake, "true", options=options)
    assert not [each for each in fake.submissions[-1] if each.startswith("--signal=B")]


@pytest.mark.parametrize(("own", "told"), [(60, True), (600, False)])
def test_a_warning_of_ones_own_that_is_too_late_is_told(tmp_path, fake, own, told):
    root = measured(tmp_path / "root", 100.0)
    options = (f"--signal=B:USR2@{own}", "--time=60")
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=options)
    assert History.read(chain).warned_too_late() == ""
    _, said = attempt(chain, fake, 1)
    assert any(f"warns {own} s before the end" in each and "--signal=B:USR2@210" in each for each in said) is told


def test_each_task_of_an_array_becomes_a_chain(tmp_path, fake, capsys):
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --time=5 --array=1,3\ntrue\n")
    assert main(["submit", str(script)]) == 0
    assert [[each for each in argv if each.startswith("--array")] for argv in fake.argv("sbatch")] == [
        ["--array=1"],
        ["--array=3"],
    ]
    shown = capsys.readouterr().out
    assert "-task1" in shown
    assert "-task3" in shown
    assert main(["submit", "--dry-run", "--another", str(script)]) == 0
    assert capsys.readouterr().out.count("would submit:") == 2
    assert main(["submit", str(script)]) == 5
    assert "goes on already" in capsys.readouterr().err


def test_tasks_that_were_not_taken_are_named(tmp_path, fake, capsys):
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --time=5 --array=1-4\ntrue\n")
    full = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates limit"
    fake.plan("sbatch", (0, "101", ""), (1, "", full))
    assert main(["submit", str(script)]) == 8
    assert "Not submitted: --array=2,3,4" in capsys.readouterr().err
    fake.plan("sbatch", (0, "105", ""))
    assert main(["submit", "--chain-dir", "rest", "--sbatch", "--array=2,3,4", str(script)]) == 0
    assert {path.name for path in tmp_path.glob("rest-*")} == {"rest-task2", "rest-task3", "rest-task4"}
