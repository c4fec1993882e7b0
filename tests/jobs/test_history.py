"""What an attempt leaves for the next: bad nodes, the time of the warning, pauses, lost checkpoints; and arrays."""

import json
import shutil
from datetime import datetime

import pytest

from ckptman.cli.app import main
from ckptman.jobs.attempt import ROOT_LOOKS
from ckptman.jobs.chain_record import EndRecord
from ckptman.jobs.history import AVOIDED_SECONDS, avoided, restart_gaps, warned_too_late
from ckptman.runtime.journal import Journal, read_journal
from ckptman.runtime.outcome import OUTCOME_ENV, report_node, reported_nodes
from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import commit
from tests.jobs.test_attempt import NOW, attempt, begin_and_be_killed, fake, outcome, submitted

__all__ = ["fake"]
NODES = "n1\nn2\n"
DOWN = (
    "NodeName=n1 Arch=x86_64 State=IDLE ThreadsPerCore=1 BootTime=None\n"
    "NodeName=n2 Arch=x86_64 State=DOWN* ThreadsPerCore=1 Reason=it is broken [root@2026-11-22T10:03:38]\n"
)


def ended(chain, number):
    return chain.ends()[number]


def last_submission(fake):
    return [each for each in fake.argv("sbatch") if "--test-only" not in each][-1]


def asked_about_nodes(fake, attempts):
    """Each attempt asks for the states and the names of its nodes, delays the next one, and has it leave out nodes."""
    fake.plan("scontrol", *[(0, DOWN, ""), (0, NODES, ""), (0, "", ""), (0, "", "")] * attempts)


def test_a_node_that_slurm_says_is_down_is_left_out(tmp_path, fake):
    asked_about_nodes(fake, 3)
    tried = (0, "", "sbatch: Job 999 to start at 2026-11-22T10:00:00")
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""), tried, tried, (0, "103", ""), tried, (0, "104", ""))
    chain = submitted(tmp_path, fake, "exit 7", options=("--exclude=n9",))
    _, said = attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert ended(chain, 1).bad_nodes == {"n2": "DOWN* it is broken [root@2026-11-22T10:03:38]"}
    [update] = [each for each in fake.argv("scontrol") if each[-1].startswith("ExcNodeList")]
    assert update == ["update", "JobId=102", "ExcNodeList=n9,n2"]
    assert any("left out: n2 (DOWN*" in each for each in said)
    events, _ = read_journal(chain.folder / "events.jsonl")
    assert [list(each["nodes"]) for each in events if each["event"] == "avoided"] == [["n2"]]
    attempt(chain, fake, 2, NOW + 1, SLURM_JOB_NODELIST="n[1-2]")
    assert last_submission(fake)[-3] == "--exclude=n9,n2"
    attempt(chain, fake, 3, NOW + AVOIDED_SECONDS + 1, SLURM_JOB_NODELIST="n[1-2]")
    assert [job.job_id for job in chain.jobs()] == ["101", "102", "103", "104"]
    assert not [each for each in last_submission(fake) if each.startswith("--exclude=n9,n2")]


def test_bad_nodes_are_left_out_for_a_day_with_what_was_last_known(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 7")
    assert avoided(chain, 400.0) == {}
    end = {"ending": "crashed", "reason": "exit code 7", "returncode": 7, "root": "", "step": 0, "sequence": 0}
    chain.end(EndRecord(number=1, ended_seconds=200.0, bad_nodes={"n2": "DOWN"}, **end))
    chain.end(EndRecord(number=2, ended_seconds=100.0, bad_nodes={"n1": "ECC", "n2": "silent"}, **end))
    assert avoided(chain, 400.0) == {"n1": "ECC", "n2": "DOWN"}
    assert avoided(chain, 100.0 + AVOIDED_SECONDS) == {"n2": "DOWN"}
    assert avoided(chain, 200.0 + AVOIDED_SECONDS) == {}


def test_an_attempt_that_stopped_asks_nobody(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    attempt(chain, fake, 1)
    assert not fake.argv("scontrol")


def test_a_node_that_the_attempt_reports_is_left_out(tmp_path, fake):
    fake.plan("scontrol", (0, NODES, ""))
    body = 'echo "ECC\nerrors" > "$CKPTMAN_OUTCOME.node-n2"; echo > "$CKPTMAN_OUTCOME.node-elsewhere"; exit 75'
    chain = submitted(tmp_path, fake, body)
    attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert ended(chain, 1).bad_nodes == {"n2": "ECC errors"}
    assert fake.argv("scontrol")[-1] == ["update", "JobId=102", "ExcNodeList=n2"]


@pytest.mark.slow
def test_where_too_few_nodes_are_left_none_is_left_out(tmp_path, fake):
    asked_about_nodes(fake, 2)
    refused = (1, "", "sbatch: error: Batch job submission failed: Requested node configuration is not available")
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""), refused, refused, (0, "103", ""), refused)
    chain = submitted(tmp_path, fake, "exit 7", options=("--exclude=n9",))
    _, said = attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert any("without them it could not run now: n2 (DOWN*" in each for each in said)
    # What was left out before, and is needed now, is not left out any more.
    assert fake.argv("scontrol")[-1] == ["update", "JobId=102", "ExcNodeList=n9"]
    attempt(chain, fake, 2, NOW + 1, SLURM_JOB_NODELIST="n[1-2]")
    assert [job.job_id for job in chain.jobs()] == ["101", "102", "103"]
    assert [each for each in fake.argv("sbatch")[4] if each.startswith("--exclude")] == ["--exclude=n9"]


def test_where_most_nodes_are_bad_it_is_not_the_nodes(tmp_path, fake):
    fake.plan("scontrol", (0, DOWN.replace("State=IDLE", "State=DOWN"), ""), (0, NODES, ""))
    chain = submitted(tmp_path, fake, "exit 7")
    attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert ended(chain, 1).bad_nodes == {}


def test_a_file_of_nodes_to_leave_out_cannot_be_added_to(tmp_path, fake):
    asked_about_nodes(fake, 1)
    chain = submitted(tmp_path, fake, "exit 7", options=("--exclude=/etc/bad-nodes",))
    _, said = attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert any("--exclude=/etc/bad-nodes is a file" in each for each in said)
    assert fake.argv("scontrol")[-1][-1] == "ExcNodeList=/etc/bad-nodes"


def test_nodes_that_cannot_be_asked_about_stop_nothing(tmp_path, fake):
    fake.plan("scontrol", (1, "", "slurm_load_node error: Invalid node name specified"))
    chain = submitted(tmp_path, fake, "exit 7")
    attempt(chain, fake, 1)
    assert ended(chain, 1).bad_nodes == {}
    assert "nodes not known" in (chain.folder / "events.jsonl").read_text()


def test_reports_of_nodes(tmp_path):
    path = tmp_path / "outcome-1.json"
    report_node("n1", "no chain", {})
    report_node("../n1", "a way out", {OUTCOME_ENV: str(path)})
    assert not list(tmp_path.iterdir())
    report_node("n1", "first", {OUTCOME_ENV: str(path)})
    report_node("n1", "then\nthis" + "!" * 1000, {OUTCOME_ENV: str(path)})
    report_node("n2", "another attempt", {OUTCOME_ENV: str(tmp_path / "outcome-11.json")})
    found = reported_nodes(path)
    assert set(found) == {"n1"}
    assert found["n1"].startswith("then this!!")
    assert len(found["n1"]) <= 500


def measured(root, seconds):
    journal = Journal(journal_path(root))
    journal_path(root).parent.mkdir(parents=True, exist_ok=True)
    journal.record("save_durable", step=5, seconds=seconds)
    journal.close()
    return str(root)


def test_the_warning_is_as_early_as_the_measured_save_needs(tmp_path, fake):
    root = measured(tmp_path / "root", 100.0)
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=("--time=2:00:00",))
    assert "--signal=B:USR2@180" in last_submission(fake)
    attempt(chain, fake, 1)
    attempt(chain, fake, 2)
    assert "--signal=B:USR2@210" in last_submission(fake)


@pytest.mark.parametrize("options", [("--time=9",), ("--time=0",), ("--time=60", "--signal=USR1@30")])
def test_where_no_warning_is_added(tmp_path, fake, options):
    submitted(tmp_path, fake, "true", options=options)
    assert not [each for each in last_submission(fake) if each.startswith("--signal=B")]


@pytest.mark.parametrize(("own", "told"), [(60, True), (600, False)])
def test_a_warning_of_ones_own_that_is_too_late_is_told(tmp_path, fake, own, told):
    root = measured(tmp_path / "root", 100.0)
    options = (f"--signal=B:USR2@{own}", "--time=60")
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=options)
    assert warned_too_late(chain) == ""
    _, said = attempt(chain, fake, 1)
    assert any(f"warns {own} s before the end" in each and "--signal=B:USR2@210" in each for each in said) is told


def stopped_under(root, step=5):
    return outcome("stopped", str(root), step=step) + "\nexit 75"


@pytest.mark.slow
def test_a_root_that_was_deleted_ends_the_chain(tmp_path, fake, capsys):
    root = tmp_path / "root"
    chain = submitted(tmp_path, fake, stopped_under(root))
    commit(root, 5, time_seconds=NOW + 1)
    attempt(chain, fake, 1, NOW + 2)
    assert ended(chain, 1).sequence > 0
    assert ended(chain, 1).committed
    shutil.move(root, tmp_path / "elsewhere")
    _, said = attempt(chain, fake, 2, NOW + 3)
    assert chain.state.state == "stopped"
    assert "holds none now: it was moved, deleted, or is not mounted" in chain.state.reason
    assert len([each for each in said if "It is looked at again in 20 s" in each]) == ROOT_LOOKS - 1
    assert len(chain.attempts()) == 1
    assert fake.argv("scancel") == [["103"]]

    # To start over is a decision, and is not asked about again.
    fake.plan("squeue", (0, "", ""))
    assert main(["chain", "resume"]) != 0
    assert "ckptman chain resume --start-over" in capsys.readouterr().err
    assert chain.state.state == "stopped"
    assert main(["chain", "resume", "--start-over"]) == 0
    fake.plan("squeue", (0, "105|PENDING|Dependency|N/A|x\n", ""))
    assert attempt(chain, fake, 4, NOW + 4)[0] == 75
    assert attempt(chain, fake, 5, NOW + 5)[0] == 75


@pytest.mark.slow
@pytest.mark.parametrize("back", [True, False])
def test_after_a_pause_the_checkpoints_are_looked_for_too(tmp_path, fake, back):
    root = tmp_path / "root"
    chain = submitted(tmp_path, fake, stopped_under(root))
    commit(root, 5, time_seconds=NOW + 1)
    attempt(chain, fake, 1, NOW + 2)
    assert main(["chain", "pause"]) == 0
    shutil.move(root, tmp_path / "elsewhere")
    assert main(["chain", "resume"]) != 0
    shutil.move(tmp_path / "elsewhere", root)
    assert main(["chain", "resume"]) == 0
    if not back:
        shutil.move(root, tmp_path / "elsewhere")
    attempt(chain, fake, 2, NOW + 3)
    assert chain.state.state == ("active" if back else "stopped")


def test_a_run_may_go_on_under_another_root(tmp_path, fake):
    first, second = tmp_path / "first", tmp_path / "second"
    body = f"""if [ $CKPTMAN_ATTEMPT = 1 ]; then
{stopped_under(first)}
fi
{outcome("running", str(second))}
kill -9 $$"""
    chain = submitted(tmp_path, fake, body)
    for step in (1, 2, 3):
        commit(first, step, time_seconds=NOW + 1)
    attempt(chain, fake, 1, NOW + 2)
    attempt(chain, fake, 2, NOW + 3)  # killed before its first save
    assert (ended(chain, 2).root, ended(chain, 2).sequence) == (str(second), 0)
    attempt(chain, fake, 3, NOW + 4)
    commit(second, 9, time_seconds=NOW + 5)  # a lower sequence than under the other root: new all the same
    attempt(chain, fake, 4, NOW + 6)
    assert chain.state.state == "active", chain.state.reason
    assert [end.committed for end in chain.ends().values()] == [True, False, False, True]


def test_where_the_time_went(tmp_path, fake, capsys):
    root = tmp_path / "root"
    journal_path(root).parent.mkdir(parents=True)
    chain = submitted(tmp_path, fake, outcome("stopped", str(root)) + "\nexit 75")
    attempt(chain, fake, 1, NOW)
    attempt(chain, fake, 2, NOW + 30)
    moments = iter([NOW + 34, NOW + 36.5, NOW + 39])
    journal = Journal(journal_path(root), clock=lambda: next(moments))
    journal.bind(attempt=2)
    journal.record("attempt_started", job_id="102")
    journal.record("restored", step=5)
    journal.record("first_step", step=6)
    journal.close()
    [pause] = restart_gaps(chain)
    assert (pause.queue, pause.start_up, pause.restore, pause.first_step, pause.total) == (30, 4, 2.5, 2.5, 39)
    capsys.readouterr()
    assert main(["chain", "show", "--times"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["2", "30.0", "4.0", "2.5", "2.5", "39.0"]
    assert main(["chain", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pauses"][0]["total"] == 39
    attempt(chain, fake, 3, NOW + 50)
    assert [each.total for each in restart_gaps(chain)] == [39, None]


def test_the_end_of_a_killed_attempt_is_what_slurm_says(tmp_path, fake):
    chain = submitted(tmp_path, fake, "true")
    begin_and_be_killed(chain, fake)
    when = datetime.fromtimestamp(NOW + 20).isoformat()
    fake.plan("squeue", (0, f"101|NODE_FAIL|None|{when}|x\n", ""))
    attempt(chain, fake, 2, NOW + 50)
    assert ended(chain, 1).ended_seconds == NOW + 20


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


@pytest.mark.slow
def test_a_controller_that_is_away_does_not_end_the_chain(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"))
    assert attempt(chain, fake, 2, NOW + 50)[0] == 75
    assert (ended(chain, 1).ending, ended(chain, 2).ending) == ("interrupted", "stopped")
    assert [each.number for each in chain.jobs()] == [1, 2, 3]


def test_a_job_that_begins_while_another_attempt_runs_leaves(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "101|RUNNING|None|N/A|x\n", ""))
    code, said = attempt(chain, fake, 2, NOW + 50)
    assert code == 0
    assert any("attempt 1 of this chain still runs, as job 101" in each for each in said)
    assert not chain.ends()
    assert fake.argv("scancel") == [[chain.jobs()[-1].job_id]]


@pytest.mark.slow
def test_where_to_start_is_said_until_something_was_committed(tmp_path, fake):
    root = tmp_path / "root"
    body = f'echo "$@" >> given\n{outcome("running", str(root))}\nexit 7'
    chain = submitted(tmp_path, fake, body, first_arguments=("--from=/elsewhere",))
    attempt(chain, fake, 1, NOW)
    attempt(chain, fake, 2, NOW + 1)
    commit(root, 5, time_seconds=NOW + 2)
    attempt(chain, fake, 3, NOW + 3)
    chain.turn("active", "", NOW, forgiven=3)
    attempt(chain, fake, 4, NOW + 4)
    given = (chain.folder.parent / "given").read_text().splitlines()
    assert given == ["--from=/elsewhere"] * 3 + [""]
