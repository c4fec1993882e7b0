"""Chains on a real Slurm: what is in the queue, who runs, and how it ends, whatever happens to the jobs."""

import json

import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import find_chains
from ckptman.jobs.slurm import batch_script
from tests.helpers.counting_run import counting, there
from tests.helpers.scenarios import SCENARIOS, SRUN, Scene, names, play, script, submit

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", names(real=True))
def test_the_list(lab, tmp_path, name):
    scene = play(SCENARIOS[name], lab, tmp_path, 90)
    if "requeue" in name:
        first, second = scene.chain.attempts()
        assert (first.job_id, second.restart) == (second.job_id, 1)


def test_a_chain_runs_until_it_is_finished(lab, tmp_path):
    chain = submit(script(tmp_path, 'echo "attempt $CKPTMAN_ATTEMPT"; [ "$CKPTMAN_ATTEMPT" = 3 ] || exit 75'))
    Scene(lab, chain).over(30)
    assert chain.state.state == "finished"
    assert [end.ending for end in chain.ends().values()] == ["stopped", "stopped", "finished"]
    log = (tmp_path / "log").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == [f"attempt {n}" for n in (1, 2, 3)]


def hurry(lab, chain, crashed):
    """End the delay after attempt `crashed`, a minute or more."""
    lab.wait(lambda: len(chain.ends()) == crashed, 60, "the attempt has not ended")
    job = chain.jobs()[crashed].job_id
    lab.wait(lambda: "BeginTime" in lab.ask("squeue", "-h", "-j", job, "-o", "%r"), 30, "no delay")
    lab.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


def test_a_script_that_always_crashes(lab, tmp_path, capsys):
    chain = submit(script(tmp_path, 'echo "ValueError: this is why, $CKPTMAN_ATTEMPT" >&2; exit 3'))
    for number in (1, 2):
        hurry(lab, chain, number)
    Scene(lab, chain).over(30)
    assert chain.state.state == "stopped"
    capsys.readouterr()
    assert main(["chain", "show"]) == 0
    shown = capsys.readouterr().out
    assert "3 attempts in a row crashed" in shown
    assert "ValueError: this is why, 3" in shown


def test_the_same_error_twice_ends_a_chain_and_is_explained(lab, tmp_path, capsys):
    chain = submit(script(tmp_path, "python3 -S -c 'raise KeyError(1)'; exit 3"), "--crash-limit", "9")
    hurry(lab, chain, 1)
    Scene(lab, chain).over(30)
    assert [end.cause for end in chain.ends().values()] == ["exception", "exception"]
    capsys.readouterr()
    assert main(["chain", "why"]) == 0
    shown = capsys.readouterr().out
    assert "  cause     KeyError: 1 [exception]\n" in shown
    assert "correct the program or its data; then ckptman chain resume" in shown


def running(lab, folder):
    """Wait until the first attempt is at its place; the id of its job."""
    lab.wait(there(folder, 1).exists, 60, "the run has not begun")
    return next(job for job, state in lab.queue().items() if state == "RUNNING")


def test_requeue_where_sbatch_is_forbidden(lab, tmp_path):
    chain = submit(script(tmp_path, f"{SRUN} {counting(tmp_path, 12, [5])}"), "--requeue")
    job = running(lab, tmp_path)
    lab.ask("scancel", "--signal=USR2", "--batch", job)
    Scene(lab, chain).over(30)
    assert chain.state.state == "finished"
    assert [each.job_id for each in chain.attempts()] == [job, job]


def test_twenty_at_once_paused_resumed_and_cancelled(lab, tmp_path, capsys):
    path = script(tmp_path, f"{SRUN} {counting(tmp_path, 12, [5])}")

    def shown(verb):
        assert main(["chain", verb]) == 0
        capsys.readouterr()
        assert main(["chain", "show", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        return facts["state"], {each["job_id"]: each["state"] for each in facts["queue"]}

    submit(path, "--upfront", "20")
    first = running(lab, tmp_path)
    state, queue = shown("show")
    assert (state, len(queue)) == ("active", 20)
    assert queue == lab.queue()
    state, queue = shown("pause")
    assert state == "paused"
    assert queue == lab.queue()
    held = lab.ask("squeue", "-h", "-t", "PENDING", "-o", "%r").split()
    assert held == ["JobHeldUser"] * 19
    assert shown("resume") == ("active", lab.queue())
    assert "JobHeldUser" not in lab.ask("squeue", "-h", "-t", "PENDING", "-o", "%r")
    assert queue[first] == "RUNNING"
    assert shown("cancel")[0] == "cancelled"
    lab.wait(lambda: not lab.queue(), 60, "the queue is not empty")
    assert shown("show") == ("cancelled", {})
    assert (tmp_path / "root/step").read_text() == "5"  # the attempt that ran could save


def test_names_with_everything_in_them(lab, tmp_path, monkeypatch):
    folder = tmp_path / "a 'b' \"c\" %j;$(touch x) `touch x`"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STRANGE", "a\nb 'c' $(touch x) %j;")
    path = folder / "train it.sbatch"
    path.write_text('#!/bin/bash\n#SBATCH --time=5 -o log\necho "$1|$STRANGE" > "seen-$CKPTMAN_ATTEMPT"; exit 75\n')
    assert main(["submit", "--max-attempts", "2", str(path), "x 'y' $(touch x)"]) == 0
    [chain] = find_chains(folder)
    Scene(lab, chain).over(30)
    for number in (1, 2):
        assert (folder / f"seen-{number}").read_text() == "x 'y' $(touch x)|a\nb 'c' $(touch x) %j;\n"
    assert not list(tmp_path.rglob("x"))


def test_what_sbatch_refuses(lab, tmp_path, capsys):
    assert main(["submit", str(script(tmp_path, "true", "--partition=none"))]) == 8
    told = capsys.readouterr().err
    assert "invalid partition" in told
    assert "sbatch --parsable" in told


@pytest.mark.slow
@pytest.mark.parametrize("may_requeue", [True, False])
def test_a_node_without_the_folder_of_the_chain_is_left_out(lab, tmp_path, monkeypatch, may_requeue):
    monkeypatch.setattr(batch_script, "TRIES", 2)
    monkeypatch.setattr(batch_script, "PAUSE_SECONDS", 0.2)
    options = ["--sbatch=--hold", *([] if may_requeue else ["--sbatch=--no-requeue"])]
    chain = submit(script(tmp_path, "echo all done"), *options)
    [job] = chain.jobs()
    chain.folder.rename(tmp_path / "hidden")
    lab.ask("scontrol", "release", job.job_id)
    log = tmp_path / "log"
    told = "requeued, without" if may_requeue else "another job was submitted, without"
    lab.wait(lambda: log.exists() and told in log.read_text(), 60, "the job is moved")
    (tmp_path / "hidden").rename(chain.folder)
    lab.wait(lambda: "RUNNING" not in lab.queue().values(), 60, "the first try is over")
    for waiting in lab.queue():
        lab.ask("scontrol", "update", f"JobId={waiting}", "StartTime=now")
        lab.ask("scontrol", "release", waiting)
    lab.wait(lambda: chain.state.state == "finished", 60, "the chain is finished")
    assert "all done" in log.read_text()
    (attempt,) = chain.attempts()
    assert attempt.nodes not in log.read_text().partition(told)[2].split()[0]
