"""The ledger of a chain on a real Slurm, against Slurm's own accounting and what the loop wrote down of its steps."""

import json
import os
import random
import re
import shlex
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.tools.monitoring import ledger as ledger_module
from ckptman.tools.monitoring.ledger import KINDS
from ckptman.tools.monitoring.report import read_reports
from tests.helpers.forkserver import programs
from tests.helpers.scenarios import Scene, script, submit
from tests.slurm.ledger_run import OWN_STEPS, SILENT_SECONDS, STEP_SECONDS, WATCHDOG_SECONDS

ENDINGS = ("stopped", "killed", "failed", "stalled", "silent", "requeued", "node", "deadline", "no run")
LOST_STEPS = 5


def accounting(lab):
    """Id, beginning and end of each job that Slurm has written down, in unix seconds, to the second."""
    found = []
    for line in (lab.folder / "log/jobcomp.txt").read_text().splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        begun, ended = (datetime.fromisoformat(fields[name]).timestamp() for name in ("StartTime", "EndTime"))
        found.append((fields["JobId"], begun, ended))
    return found


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(24, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)]),
    ],
)
def test_every_kind_of_end(lab, tmp_path, monkeypatch, count):
    seed = int(os.environ.get("CKPTMAN_SEED") or time.time_ns() % 2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plan = ["stopped", *chance.sample(ENDINGS[1:], min(count - 1, len(ENDINGS) - 1))]
    plan += [chance.choice(ENDINGS) for _ in range(count - len(plan))]
    (tmp_path / "plan").write_text(json.dumps(plan))
    program = shlex.join([str(programs() / "python"), str(Path(__file__).with_name("ledger_run.py")), "plan"])
    # The job's own clock: a line when it begins and, unless it is killed with its node, one when the program has ended.
    lines = f"date +$SLURM_JOB_ID.%s.%N >> begun; {program}; code=$?; date +$SLURM_JOB_ID.%s.%N >> ended; exit $code"
    chain = submit(script(tmp_path, lines), "--crash-limit", "100", "--stall-limit", "100")
    scene = Scene(lab, chain, "ledger_run.py")
    is_rolled_back = False
    down = []

    def tend():
        """Do what the lab has to do, and return why jobs wait, for all that are there."""
        with suppress(FileNotFoundError):
            node = (tmp_path / "kill-node").read_text()
            if node:
                (tmp_path / "kill-node").unlink()
                lab.kill_node(node)
                down.append(node)
        for node in [each for each in down if "down" in lab.ask("sinfo", "-h", "-n", each, "-o", "%T")]:
            lab.start_node(node)
            down.remove(node)
        reasons = dict(row.split("|") for row in lab.ask("squeue", "-h", "-o", "%i|%r").split())
        for job, reason in reasons.items():
            if reason == "BeginTime":  # an attempt that crashes in vain is followed by a pause: not here
                lab.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        return set(reasons.values())

    while lab.queue():
        tend()
        if not is_rolled_back and len(chain.ends()) >= count // 2:
            is_rolled_back = True
            assert main(["chain", "pause"]) == 0
            # A job that is requeued runs again: only what is held does not.
            lab.wait(lambda: tend() <= {"JobHeldUser"}, 120, "the attempt goes on")
            if all(end.ending != "finished" for end in chain.ends().values()):
                newest = read_reports([tmp_path / "root"], time.time())[0].entries[-2].step
                assert main(["rollback", str(tmp_path / "root"), "--to-step", str(newest)]) == 0
                assert main(["chain", "resume"]) == 0
        time.sleep(0.1)
    assert chain.state.state == "finished", scene.log()[-3000:]

    monkeypatch.setattr(ledger_module, "SILENCE_SECONDS", SILENT_SECONDS / 2)
    [report] = read_reports([tmp_path / "root"], time.time())
    ledger = report.ledger
    for kind in KINDS:
        print(f"{kind:10} {ledger.seconds[kind]:8.1f} s")
    for each in ledger.attempts:
        print(each.number, each.job_id, each.ending, each.start_step, each.step, f"{each.seconds['training']:.1f} s")

    # The parts add up to the wall time: from the submission to the end that Slurm knows.
    jobs = {attempt.job_id for attempt in chain.attempts()}
    slurm = [each for each in accounting(lab) if each[0] in jobs]
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total_seconds, rel=1e-6)
    wall = max(ended for _, _, ended in slurm) - chain.spec.created_seconds
    print(f"wall time {wall:.1f} s, the ledger's parts {sum(ledger.seconds.values()):.1f} s")
    assert sum(ledger.seconds.values()) == pytest.approx(wall, rel=0.01, abs=2.0)
    assert len(ledger.attempts) == len(chain.attempts()) == count + 1

    # What counted: of each step the attempt that did it last.
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    counted = {row["step"]: row["seconds"] for row in rows}
    assert sorted(counted) == [*range(1, len(counted) + 1)]
    trained = sum(counted.values())
    lost = sum(row["seconds"] for row in rows) - trained
    held = sum(ended - begun for _, begun, ended in slurm)
    print(f"training that counted {trained:.1f} s, lost {lost:.1f} s, held {held:.1f} s: goodput {trained / held:.3f}")
    print(
        f"the ledger's: {ledger.seconds['training']:.1f}, {ledger.seconds['repeated']:.1f}, {ledger.held_seconds:.1f} s"
    )
    assert ledger.goodput is not None
    # The loop's own clock counts the waits for saves as well.
    assert 0.98 * ledger.seconds["training"] <= trained
    assert trained <= 1.02 * (ledger.seconds["training"] + ledger.seconds["saving"])
    # Held for as long as the program ran, at least, and no longer than Slurm says, which writes down whole seconds and
    # counts what it takes itself to begin and end a job: half a second of each, two where the machine is slow.
    begun, ended = (
        [(job, float(at)) for job, at in (line.split(".", 1) for line in (tmp_path / name).read_text().split())]
        for name in ("begun", "ended")
    )
    ran = sum(end - max(at for job, at in begun if job == its and at < end) for its, end in ended)
    print(f"the programs ran for {ran:.1f} s")
    assert ran <= ledger.held_seconds <= held + len(slurm)
    assert ledger.goodput == pytest.approx(trained / ledger.held_seconds, rel=0.05)
    hung = plan.count("stalled") * WATCHDOG_SECONDS + plan.count("silent") * (SILENT_SECONDS - 3)
    assert ledger.seconds["hung"] >= 0.8 * hung
    assert ledger.seconds["unknown"] == 0
    assert OWN_STEPS * STEP_SECONDS * len(plan) > lost
