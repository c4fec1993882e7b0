"""A run whose attempts end as planned, and which writes down what each of its steps took: `ledger_run.py PLAN`.

The file PLAN has a word for each attempt of the chain; after them the run is finished.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import ckptman
from ckptman.session import step_reporter

STEP_SECONDS, OWN_STEPS, SAVED_EVERY, SILENT_SECONDS = 0.1, 35, 10, 12
"""An attempt ends after `OWN_STEPS` steps, five of which are not saved; one that is silent is killed a while later."""
WATCHDOG_SECONDS = 4.0


def end(kind):
    """Bring about the end of this attempt. A node is killed by the test, which looks for a file."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "failed":
        raise RuntimeError("boom")
    elif kind == "stalled":
        time.sleep(1000)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "silent":  # as a process in a file system that does not answer
        command = f"sleep {SILENT_SECONDS}; kill -9 {os.getpid()}"
        subprocess.Popen(["bash", "-c", command], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "requeued":
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    elif kind == "node":
        Path("kill-node").write_text(os.environ["SLURMD_NODENAME"])
        time.sleep(1000)


def main(plan):
    number = int(os.environ["CKPTMAN_ATTEMPT"])
    kind = plan[number - 1] if number <= len(plan) else "finished"
    if kind == "no run":
        return 3
    step_reporter.PROGRESS_SECONDS = 1.0
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    soon = time.time() + 40 * STEP_SECONDS + 3.0 if kind == "deadline" else None
    policy = ckptman.EverySteps(SAVED_EVERY) | ckptman.OnStop() | ckptman.BeforeDeadline(margin_seconds=1)
    with (
        ckptman.Checkpointer(
            "root",
            {"model": model, "optimizer": optimizer},
            save_policy=policy,
            retention=ckptman.KeepLast(3),
            signals=True,
            deadline=soon,
            watchdog=WATCHDOG_SECONDS,
        ) as checkpointer,
        open("steps.jsonl", "a", buffering=1) as log,
    ):
        start = checkpointer.restore()
        for step in range(start + 1, start + 1000):
            begun = time.time()
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_SECONDS)
            checkpointer.step(step, metrics={"loss": loss})
            log.write(json.dumps({"attempt": number, "step": step, "seconds": time.time() - begun}) + "\n")
            if step == start + OWN_STEPS:
                if kind == "finished":
                    break
                end(kind)
            if checkpointer.should_stop():
                break
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
