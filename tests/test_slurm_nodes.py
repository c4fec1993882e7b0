"""What an attempt leaves for the next: bad nodes, the time of the warning, pauses, lost checkpoints; and arrays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.lifecycle.nodes import is_device_trouble, report_node, reported_nodes
from ckptman.lifecycle.outcome import OUTCOME_ENV
from ckptman.monitor.journal import Journal, read_journal
from ckptman.policy.avoidance import AVOIDED_SECONDS
from ckptman.scheduler.history import warned_too_late
from ckptman.scheduler.pauses import pauses
from ckptman.scheduler.record import Chain, EndRecord
from ckptman.store.names import journal_path
from tests.fake_checkpoint import commit
from tests.fake_slurm import FakeSlurm
from tests.test_slurm_chain import NOW, attempt, fake, outcome, submitted

__all__ = ["fake"]
NODES = "n1\nn2\n"
DOWN = (
    "NodeName=n1 Arch=x86_64 State=IDLE ThreadsPerCore=1 BootTime=None\n"
    "NodeName=n2 Arch=x86_64 State=DOWN* ThreadsPerCore=1 Reason=it is broken [root@2026-11-22T10:03:38]\n"
)


def ended(chain: Chain, number: int) -> EndRecord:
    return chain.ends()[number]


def last_submission(fake: FakeSlurm) -> list[str]:
    return [each for each in fake.argv("sbatch") if "--test-only" not in each][-1]


def test_a_node_that_slurm_says_is_down_is_left_out(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.plan("scontrol", (0, DOWN, ""))
    tried = (0, "", "sbatch: Job 999 to start at 2026-11-22T10:00:00")
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""), tried, (0, "103", ""), tried, (0, "104", ""))
    chain = submitted(tmp_path, fake, "exit 7", options=("--exclude=n9",))
    _, said = attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert ended(chain, 1).bad_nodes == {"n2": "DOWN* it is broken [root@2026-11-22T10:03:38]"}
    [update] = [each for each in fake.argv("scontrol") if each[-1].startswith("ExcNodeList")]
    assert update == ["update", "JobId=102", "ExcNodeList=n9,n2"]
    assert any("left out from now on: n2 (DOWN*" in each for each in said)
    events, _ = read_journal(chain.folder / "events.jsonl")
    assert [list(each["nodes"]) for each in events if each["event"] == "avoided"] == [["n2"]]
    attempt(chain, fake, 2, NOW + 1)
    assert last_submission(fake)[-3] == "--exclude=n9,n2"
    attempt(chain, fake, 3, NOW + AVOIDED_SECONDS + 1)
    assert not [each for each in last_submission(fake) if each.startswith("--exclude=n9,n2")]


def test_an_attempt_that_stopped_asks_nobody(tmp_path: Path, fake: FakeSlurm) -> None:
    chain = submitted(tmp_path, fake, "exit 75")
    attempt(chain, fake, 1)
    assert not fake.argv("scontrol")


def test_a_node_that_the_attempt_reports_is_left_out(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.plan("scontrol", (0, NODES, ""))
    body = 'echo "ECC\nerrors" > "$CKPTMAN_OUTCOME.node-n2"; echo > "$CKPTMAN_OUTCOME.node-elsewhere"; exit 75'
    chain = submitted(tmp_path, fake, body)
    attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert ended(chain, 1).bad_nodes == {"n2": "ECC errors"}
    assert fake.argv("scontrol")[-1] == ["update", "JobId=102", "ExcNodeList=n2"]


def test_where_too_few_nodes_are_left_none_is_left_out(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.plan("scontrol", (0, DOWN, ""))
    refused = (1, "", "sbatch: error: Batch job submission failed: Requested node configuration is not available")
    # The first job, its successor, the question, and the second successor with and without the exclusion.
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""), refused, refused, (0, "103", ""), refused)
    chain = submitted(tmp_path, fake, "exit 7")
    _, said = attempt(chain, fake, 1, SLURM_JOB_NODELIST="n[1-2]")
    assert any("there are not enough nodes" in each for each in said)
    assert not [each for each in fake.argv("scontrol") if each[-1].startswith("ExcNodeList")]
    attempt(chain, fake, 2, NOW + 1)
    assert [job.job_id for job in chain.jobs()] == ["101", "102", "103"]
    assert not [each for each in fake.argv("sbatch")[4] if each.startswith("--exclude")]


def test_nodes_that_cannot_be_asked_about_stop_nothing(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.plan("scontrol", (1, "", "slurm_load_node error: Invalid node name specified"))
    chain = submitted(tmp_path, fake, "exit 7")
    attempt(chain, fake, 1)
    assert ended(chain, 1).bad_nodes == {}
    assert "nodes not known" in (chain.folder / "events.jsonl").read_text()


def test_reports_of_nodes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("No CUDA GPUs are available: no CUDA-capable device is detected", True),
        ("Unable to determine the device handle: GPU is lost, it has fallen off the bus", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_a_device_and_errors_of_a_program(text: str, bad: bool) -> None:
    assert is_device_trouble(RuntimeError(text)) is bad
    assert not is_device_trouble(ValueError(text))


# ---- The warning ----------------------------------------------------------------------------------------------------


def measured(root: Path, seconds: float) -> str:
    journal = Journal(journal_path(root))
    journal_path(root).parent.mkdir(parents=True, exist_ok=True)
    journal.record("save_durable", step=5, seconds=seconds)
    journal.close()
    return str(root)


def test_the_warning_is_as_early_as_the_measured_save_needs(tmp_path: Path, fake: FakeSlurm) -> None:
    root = measured(tmp_path / "root", 100.0)
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=("--time=2:00:00",))
    assert "--signal=B:USR2@180" in last_submission(fake)
    attempt(chain, fake, 1)
    attempt(chain, fake, 2)
    assert "--signal=B:USR2@210" in last_submission(fake)


@pytest.mark.parametrize("options", [("--time=9",), ("--time=0",), ("--time=60", "--signal=USR1@30")])
def test_where_no_warning_is_added(tmp_path: Path, fake: FakeSlurm, options: tuple[str, ...]) -> None:
    submitted(tmp_path, fake, "true", options=options)
    assert not [each for each in last_submission(fake) if each.startswith("--signal=B")]


@pytest.mark.parametrize(("own", "told"), [(60, True), (600, False)])
def test_a_warning_of_ones_own_that_is_too_late_is_told(tmp_path: Path, fake: FakeSlurm, own: int, told: bool) -> None:
    root = measured(tmp_path / "root", 100.0)
    options = (f"--signal=B:USR2@{own}", "--time=60")
    chain = submitted(tmp_path, fake, outcome("stopped", root) + "\nexit 75", options=options)
    assert warned_too_late(chain) == ""
    _, said = attempt(chain, fake, 1)
    assert any(f"warns {own} s before the end" in each and "--signal=B:USR2@210" in each for each in said) is told


# ---- The checkpoints, and the time ----------------------------------------------------------------------------------


def test_a_root_that_was_deleted_ends_the_chain(tmp_path: Path, fake: FakeSlurm) -> None:
    root = tmp_path / "root"
    chain = submitted(tmp_path, fake, outcome("stopped", str(root), step=5) + "\nexit 75")
    commit(root, 5, time_seconds=NOW + 1)
    attempt(chain, fake, 1, NOW + 2)
    assert ended(chain, 1).sequence > 0
    shutil.move(root, tmp_path / "elsewhere")
    attempt(chain, fake, 2, NOW + 3)
    assert chain.state.state == "stopped"
    assert "was it moved or deleted?" in chain.state.reason
    assert len(chain.attempts()) == 1
    shutil.move(tmp_path / "elsewhere", root)
    fake.plan("squeue", (0, "", ""))
    assert main(["chain", "resume"]) == 0
    attempt(chain, fake, 4, NOW + 4)
    assert len(chain.attempts()) == 2


def test_where_the_time_went(tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
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
    [pause] = pauses(chain)
    assert (pause.queue, pause.start_up, pause.restore, pause.first_step, pause.total) == (30, 4, 2.5, 2.5, 39)
    capsys.readouterr()
    assert main(["chain", "show", "--times"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["2", "30.0", "4.0", "2.5", "2.5", "39.0"]
    assert main(["chain", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pauses"][0]["total"] == 39
    attempt(chain, fake, 3, NOW + 50)
    assert [each.total for each in pauses(chain)] == [39, None]


def test_the_end_of_a_killed_attempt_is_what_slurm_says(tmp_path: Path, fake: FakeSlurm) -> None:
    from datetime import datetime

    chain = submitted(tmp_path, fake, "true")
    record = attempt_that_was_killed(chain)
    when = datetime.fromtimestamp(NOW + 20).isoformat()
    fake.plan("squeue", (0, f"101|NODE_FAIL|None|{when}|x\n", ""))
    attempt(chain, fake, 2, NOW + 50)
    assert ended(chain, record).ended_seconds == NOW + 20


def attempt_that_was_killed(chain: Chain) -> int:
    from ckptman.scheduler.record import AttemptRecord

    facts = {"number": 1, "job": 1, "job_id": "101", "restart": 0, "nodes": "n1", "host": "n1", "log": ""}
    chain.begin(AttemptRecord.model_validate({**facts, "begun_seconds": NOW, "sequence_before": 0}))
    return 1


# ---- Arrays ---------------------------------------------------------------------------------------------------------


def test_each_task_of_an_array_becomes_a_chain(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_tasks_that_were_not_taken_are_named(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --time=5 --array=1-4\ntrue\n")
    full = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates limit"
    fake.plan("sbatch", (0, "101", ""), (1, "", full))
    assert main(["submit", str(script)]) == 8
    assert "Not submitted: --array=2,3,4" in capsys.readouterr().err
    fake.plan("sbatch", (0, "105", ""))
    assert main(["submit", "--chain-dir", "rest", "--sbatch", "--array=2,3,4", str(script)]) == 0
    assert {path.name for path in tmp_path.glob("rest-*")} == {"rest-task2", "rest-task3", "rest-task4"}
