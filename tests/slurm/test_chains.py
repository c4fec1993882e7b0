"""Chains on a real Slurm: what is in the queue, who runs, and how it ends, whatever happens to the jobs."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.scheduler.record import Chain, find_chains
from tests.slurm.cluster import CRED_SECONDS, Cluster

pytestmark = pytest.mark.timeout(240)

# A run without torch: it counts steps on disk, and can be asked to stop, as a training loop with a Checkpointer.
RUN = """
import json, os, signal, sys, time
from pathlib import Path
number, outcome = int(os.environ["CKPTMAN_ATTEMPT"]), Path(os.environ["CKPTMAN_OUTCOME"])
root = Path(sys.argv[1])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))

def tell(state):
    facts = {"state": state, "step": step, "reason": state, "exit_code": 0, "root": str(root), "attempt": number,
             "time_seconds": time.time(), "pid": os.getpid(), "host": "lab"}
    part = outcome.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.rename(outcome)

root.mkdir(exist_ok=True)
step = int((root / "step").read_text()) if (root / "step").exists() else 0
with open(root / "running", "a") as log:
    log.write(f"begin {number} {step}\\n")
tell("running")
while step < int(sys.argv[2]) and not stop:
    time.sleep(0.1)
    step += 1
    if step == int(sys.argv[3]) and number == 1:
        (root / "there").touch()
        while not stop:
            time.sleep(0.05)
(root / "step").write_text(str(step))
tell("stopped" if stop else "finished")
with open(root / "running", "a") as log:
    log.write(f"end {number} {step}\\n")
sys.exit(75 if stop else 0)
"""


def script(folder: Path, body: str, *directives: str) -> Path:
    lines = ["#!/bin/bash", "#SBATCH --time=5", "#SBATCH --output=log", *(f"#SBATCH {each}" for each in directives)]
    path = folder / "train.sbatch"
    path.write_text("\n".join([*lines, textwrap.dedent(body)]) + "\n")
    return path


def counting(folder: Path, steps: int = 12, wait_at: int = 5, launcher: str = "srun") -> str:
    """The body of a script that counts to `steps`; its first attempt waits at `wait_at` until it is asked to stop."""
    (folder / "run.py").write_text(RUN)
    return f"{launcher} {sys.executable} -S run.py {folder / 'root'} {steps} {wait_at}"


def submit(path: Path, *options: str) -> Chain:
    assert main(["submit", *options, str(path)]) == 0
    return find_chains(path.parent)[-1]


def over(chain: Chain, lab: Cluster, timeout_seconds: float = 20) -> None:
    """Wait until the chain has ended and nothing is in the queue; meanwhile look that there is never more than one
    attempt that runs and one successor."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        queue = lab.queue()
        states = sorted(queue.values())
        running = [state for state in states if state not in ("PENDING", "COMPLETING")]
        assert len(running) <= 1, queue
        assert states.count("PENDING") <= (2 if not running else 1), queue  # a requeued one waits beside its successor
        if not queue and chain.state.state not in ("active", "paused"):
            return
        if time.monotonic() > deadline:
            log = chain.folder.parent.parent / "log"
            raise TimeoutError(f"{queue}\n{chain.state}\n{log.read_text() if log.exists() else 'no log'}")
        time.sleep(0.1)


def there(lab: Cluster, folder: Path) -> str:
    """Wait until the first attempt waits; the id of its job."""
    lab.wait((folder / "root/there").exists, 60, "the run has not begun")
    return next(job for job, state in lab.queue().items() if state == "RUNNING")


def begun(folder: Path) -> list[str]:
    return [line for line in (folder / "root/running").read_text().splitlines() if line.startswith("begin")]


def test_a_chain_runs_until_it_is_finished(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, 'echo "attempt $CKPTMAN_ATTEMPT"; [ "$CKPTMAN_ATTEMPT" = 3 ] || exit 75'))
    over(chain, lab)
    assert chain.state.state == "finished"
    assert [end.ending for end in chain.ends().values()] == ["stopped", "stopped", "finished"]
    log = (tmp_path / "log").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == [f"attempt {n}" for n in (1, 2, 3)]


def test_a_script_that_always_crashes(lab: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = submit(script(tmp_path, "echo 'ValueError: this is why' >&2; exit 3"))
    for number in (2, 3):  # each waits a minute or more: not here
        lab.wait(lambda number=number: len(chain.ends()) == number - 1, 60, "the attempt has not ended")
        job = chain.jobs()[number - 1].job_id
        lab.wait(lambda job=job: "BeginTime" in lab.ask("squeue", "-h", "-j", job, "-o", "%r"), 30, "no delay")
        lab.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    over(chain, lab)
    assert chain.state.state == "stopped"
    capsys.readouterr()
    assert main(["chain", "show"]) == 0
    shown = capsys.readouterr().out
    assert "3 attempts in a row crashed" in shown
    assert "ValueError: this is why" in shown


@pytest.mark.parametrize("launcher", ["srun", ""])
def test_a_warning_reaches_the_ranks(lab: Cluster, tmp_path: Path, launcher: str) -> None:
    chain = submit(script(tmp_path, counting(tmp_path, launcher=launcher)))
    job = there(lab, tmp_path)
    lab.ask("scancel", "--signal=USR2", "--batch", job)  # what --signal=B:USR2@N does
    over(chain, lab)
    assert [end.ending for end in chain.ends().values()] == ["stopped", "finished"]
    assert begun(tmp_path) == ["begin 1 0", "begin 2 5"]


@pytest.mark.parametrize("launcher", ["srun", ""])
def test_scancel_of_one_attempt(lab: Cluster, tmp_path: Path, launcher: str) -> None:
    chain = submit(script(tmp_path, counting(tmp_path, launcher=launcher)))
    lab.ask("scancel", there(lab, tmp_path))
    over(chain, lab)
    assert [end.ending for end in chain.ends().values()] == ["stopped", "finished"]
    assert begun(tmp_path) == ["begin 1 0", "begin 2 5"]


def test_kill_9_of_the_batch_script(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path)))
    lab.ask("scancel", "--signal=KILL", "--batch", there(lab, tmp_path))
    over(chain, lab)
    assert [end.ending for end in chain.ends().values()][-1] == "finished"
    assert len(chain.attempts()) == 2


def test_a_job_that_is_requeued(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path)))
    job = there(lab, tmp_path)
    lab.ask("scontrol", "requeue", job)
    over(chain, lab, 60 + CRED_SECONDS)
    assert chain.state.state == "finished"
    assert {each.job_id for each in chain.attempts()} == {job}
    assert [each.restart for each in chain.attempts()] == [0, 1]


def test_preemption(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path), "--nodes=4", "--exclusive"))
    there(lab, tmp_path)
    lab.ask("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    deadline = time.monotonic() + 90
    while chain.state.state == "active" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert chain.state.state == "finished"


def test_a_node_that_dies(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path), f"--nodelist={lab.nodes[3]}", "--no-requeue"))
    there(lab, tmp_path)
    lab.ask("scontrol", "update", f"nodename={lab.nodes[3]}", "state=down", "reason=test")
    lab.wait(lambda: "RUNNING" not in lab.queue().values(), 60, "the job runs on")
    lab.ask("scontrol", "update", f"nodename={lab.nodes[3]}", "state=resume")
    over(chain, lab)
    assert [end.ending for end in chain.ends().values()] == ["interrupted", "finished"]


def test_a_controller_that_is_restarted(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path)))
    job = there(lab, tmp_path)
    lab.stop_controller()
    time.sleep(1)  # a moment with nobody to ask
    lab.start_controller()
    lab.ask("scancel", job)
    over(chain, lab)
    assert chain.state.state == "finished"


def test_requeue_where_sbatch_is_forbidden(lab: Cluster, tmp_path: Path) -> None:
    chain = submit(script(tmp_path, counting(tmp_path)), "--requeue")
    job = there(lab, tmp_path)
    lab.ask("scancel", "--signal=USR2", "--batch", job)
    over(chain, lab)
    assert chain.state.state == "finished"
    assert [each.job_id for each in chain.attempts()] == [job, job]


def test_twenty_at_once_paused_resumed_and_cancelled(
    lab: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, counting(tmp_path))

    def shown(verb: str) -> tuple[str, dict[str, str]]:
        assert main(["chain", verb]) == 0
        capsys.readouterr()
        assert main(["chain", "show", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        return facts["state"], {each["job_id"]: each["state"] for each in facts["queue"]}

    submit(path, "--upfront", "20")
    running = there(lab, tmp_path)
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
    assert queue[running] == "RUNNING"
    assert shown("cancel")[0] == "cancelled"
    lab.wait(lambda: not lab.queue(), 60, "the queue is not empty")
    assert shown("show") == ("cancelled", {})
    assert (tmp_path / "root/step").read_text() == "5"  # the attempt that ran could save


def test_names_with_everything_in_them(lab: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a 'b' \"c\" %j;$(touch x) `touch x`"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STRANGE", "a\nb 'c' $(touch x) %j;")
    path = folder / "train it.sbatch"
    path.write_text('#!/bin/bash\n#SBATCH --time=5 -o log\necho "$1|$STRANGE" > "seen-$CKPTMAN_ATTEMPT"; exit 75\n')
    assert main(["submit", "--max-attempts", "2", str(path), "x 'y' $(touch x)"]) == 0
    [chain] = find_chains(folder)
    over(chain, lab)
    for number in (1, 2):
        assert (folder / f"seen-{number}").read_text() == "x 'y' $(touch x)|a\nb 'c' $(touch x) %j;\n"
    assert not list(tmp_path.rglob("x"))


def test_what_sbatch_refuses(lab: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(script(tmp_path, "true", "--partition=none"))]) == 8
    told = capsys.readouterr().err
    assert "invalid partition" in told
    assert "sbatch --parsable" in told
