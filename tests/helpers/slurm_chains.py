"""A chain on a Slurm that only pretends: it is submitted, and its jobs are run here, one after another."""

import json
import os

from ckptman.jobs.attempt import Supervisor
from ckptman.jobs.slurm.submission import Submission, prepare, submit_chain

NOW = 1_000_000.0


def submitted(tmp_path, fake, body, **wish):
    """A chain whose script is `body`, after its submission as job 101."""
    script = tmp_path / "train.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --time=5\n{body}\n")
    [made] = prepare(Submission(script=script, **wish), None, {}, NOW)
    submit_chain(made, fake.client(), NOW)
    return made.chain


def supervisor(chain, fake, number=1, now=NOW, say=print, **environ):
    """What runs job `number` of a chain, whose id is 100 and that number."""
    job = {"SLURM_JOB_ID": str(100 + number), "SLURM_JOB_NODELIST": "n1", **fake.environ, **environ}
    workdir = str(chain.folder.parent)
    return Supervisor(chain, number, job, fake.client(), workdir, say=say, clock=lambda: now, sleep=lambda _: None)


def attempt(chain, fake, number, now=NOW, **environ):
    """Run a job: its exit code and what was said."""
    said = []
    return supervisor(chain, fake, number, now, said.append, **environ).run(), said


def begin_and_be_killed(chain, fake):
    assert supervisor(chain, fake)._begin() is not None
    os.utime(chain.folder / "attempt-0001.json", (NOW, NOW))  # its last sign


def outcome(state, root="", step=0, reason="it said so", exit_code=0):
    """A line of a script that writes the outcome of its run."""
    facts = {"state": state, "step": step, "reason": reason, "exit_code": exit_code, "root": root}
    facts |= {"attempt": 1, "time_seconds": 0.0, "pid": 1, "host": "n1"}
    return f"cat > \"$CKPTMAN_OUTCOME\" <<'END'\n{json.dumps(facts)}\nEND"


def logs_to(log, monkeypatch):
    log.touch()
    place = {"log": str(log), "log_begin": 0, "error_log": "", "error_begin": 0}
    monkeypatch.setattr("ckptman.jobs.attempt.logs_of_this_process", lambda: place)
