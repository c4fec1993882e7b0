"""A program that knows nothing of ckptman: `foreign_run.py --save DIR --steps N [--exit CODE]`.

It saves as Megatron does, also at SIGTERM, and then exits, as asked.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--save", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--start-from", default="")
options = parser.parse_args()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
tracker = options.save / "latest_checkpointed_iteration.txt"
step = int(tracker.read_text()) if tracker.exists() else 0
rank = int(os.environ.get("SLURM_PROCID") or 0)


def save():
    """Save this rank's part, and on rank 0 say that it is there."""
    folder = options.save / f"iter_{step:07}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"mp_rank_{rank:02}.pt").write_bytes(b"weights" * 1000)
    if rank == 0:
        new = tracker.with_suffix(".tmp")
        new.write_text(str(step))
        new.replace(tracker)


if rank == 0:
    print(f"start at {step} {options.start_from}", flush=True)
while step < options.steps:
    step += 1
    time.sleep(0.05)
    if asked:
        save()
        sys.exit(options.exit)
    if step % 10 == 0:
        save()
save()
