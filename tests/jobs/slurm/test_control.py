"""Looking at a chain, holding it, letting it go on, ending it; and the command line."""

import json
import time

import pytest

from ckptman.cli.app import main
from ckptman.errors import ConfigError
from ckptman.jobs.attempt import Supervisor
from ckptman.jobs.chain_record import Chain, JobRecord, Spec
from ckptman.jobs.slurm import control
from tests.helpers.slurm_chains import NOW, attempt, submitted


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
