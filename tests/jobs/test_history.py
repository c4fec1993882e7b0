"""What an attempt leaves for the next: its end, limits, bad nodes, lost checkpoints."""

import shutil
from datetime import datetime

import pytest

from ckptman.cli.app import main
from ckptman.errors import BusyError
from ckptman.jobs.attempt import ROOT_LOOKS
from ckptman.jobs.chain_record import EndRecord
from ckptman.jobs.history import AVOIDED_SECONDS, History
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import OUTCOME_ENV, report_node, reported_nodes
from tests.helpers.checkpoints import commit
from tests.helpers.slurm_chains import NOW, attempt, begin_and_be_killed, logs_to, outcome, submitted


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


def test_hours_in_the_queue_do_not_make_an_attempt_long(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75", stall_limit=1)
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "", ""))
    attempt(chain, fake, 2, NOW + 7200)
    end = chain.ends()[1]
    assert (end.ended_seconds, end.seen_seconds, end.committed) == (NOW + 7200, NOW, None)
    assert "1 attempt ended within 10 min" in chain.state.reason


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


def test_a_busy_root_is_waited_for(tmp_path, fake):
    told = "BusyError: another run writes to it"
    busy = outcome("failed", str(tmp_path / "root"), reason=told, exit_code=BusyError.exit_code)
    chain = submitted(tmp_path, fake, busy + "\nexit 1", crash_limit=1)
    attempt(chain, fake, 1)
    assert (chain.ends()[1].cause, chain.ends()[1].reaction, chain.state.state) == ("busy", "wait", "active")
    assert ["update", "JobId=102", "StartTime=now+300"] in fake.argv("scontrol")
    assert told in chain.ends()[1].reason


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
    logs_to(tmp_path / "log", monkeypatch)
    fake.plan("scontrol", (0, "", ""), (0, "n1\nn2\nn3\n", ""), (0, "", ""))
    attempt(chain, fake, 1)
    end = chain.ends()[1]
    assert (end.cause, end.reaction, end.bad_nodes) == ("ecc", "elsewhere", {"n2": "a GPU is faulty"})


NODES = "n1\nn2\n"


DOWN = (
    "NodeName=n1 Arch=x86_64 State=IDLE ThreadsPerCore=1 BootTime=None\n"
    "NodeName=n2 Arch=x86_64 State=DOWN* ThreadsPerCore=1 Reason=it is broken [root@2026-11-22T10:03:38]\n"
)


def ended(chain, number):
    return chain.ends()[number]


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
    assert fake.submissions[-1][-3] == "--exclude=n9,n2"
    attempt(chain, fake, 3, NOW + AVOIDED_SECONDS + 1, SLURM_JOB_NODELIST="n[1-2]")
    assert [job.job_id for job in chain.jobs()] == ["101", "102", "103", "104"]
    assert not [each for each in fake.submissions[-1] if each.startswith("--exclude=n9,n2")]


def test_bad_nodes_are_left_out_for_a_day_with_what_was_last_known(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 7")
    assert History.read(chain).avoided(400.0) == {}
    end = {"ending": "crashed", "reason": "exit code 7", "returncode": 7, "root": "", "step": 0, "sequence": 0}
    chain.end(EndRecord(number=1, ended_seconds=200.0, bad_nodes={"n2": "DOWN"}, **end))
    chain.end(EndRecord(number=2, ended_seconds=100.0, bad_nodes={"n1": "ECC", "n2": "silent"}, **end))
    assert History.read(chain).avoided(400.0) == {"n1": "ECC", "n2": "DOWN"}
    assert History.read(chain).avoided(100.0 + AVOIDED_SECONDS) == {"n2": "DOWN"}
    assert History.read(chain).avoided(200.0 + AVOIDED_SECONDS) == {}


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


def test_the_end_of_a_killed_attempt_is_what_slurm_says(tmp_path, fake):
    chain = submitted(tmp_path, fake, "true")
    begin_and_be_killed(chain, fake)
    when = datetime.fromtimestamp(NOW + 20).isoformat()
    fake.plan("squeue", (0, f"101|NODE_FAIL|None|{when}|x\n", ""))
    attempt(chain, fake, 2, NOW + 50)
    assert ended(chain, 1).ended_seconds == NOW + 20


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
