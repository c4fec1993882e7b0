"""A stop request as it comes: to one process or to all of its group, from torchrun, with every kind of loader."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import outcome_path
from tests.end_to_end.stop_program import KINDS, LOOPS
from tests.helpers.faulty_disk import drawn
from tests.helpers.forkserver import Python

PROGRAM = Path(__file__).with_name("stop_program.py")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SERVED = {"huggingface": ("no workers", "workers", "persistent"), "bundled": ("no workers",)}
"""The kinds of workers that a loop can have, if not all."""
CASES = [
    case
    for case in itertools.product(SIGNALS, ("process", "group"), KINDS, LOOPS)
    if case[2] in SERVED.get(case[3], KINDS)
]
"""Signal, whom it is sent to, workers, and the loop."""


def check(process, ask, root, code):
    """Ask to stop in the middle of a loop: it is saved as of the last step, and no process stays."""
    lines = iter(process.stdout.readline, "")
    for _ in range(7):
        next(line for line in lines if line.startswith("step "))
    ask()
    steps = [int(step) for line in lines for step in re.findall(r"^step (\d+)", line)]
    assert process.wait(240) == code
    outcome = read_outcome(outcome_path(root))
    assert (outcome.state, outcome.step, outcome.exit_code) == ("stopped", steps[-1], 75)
    assert (root / f"step-{steps[-1]:010}" / "manifest.json").exists()
    left = [each for each in psutil.process_iter() if _group_of(each) == process.pid]
    assert not psutil.wait_procs(left, 240)[1]  # the tracker of resources ends after its parent


def _group_of(process):
    with contextlib.suppress(OSError):
        return os.getpgid(process.pid)


@pytest.mark.parametrize("count", [3, pytest.param(len(CASES), marks=pytest.mark.campaign)])
def test_a_loop_with_workers(count, tmp_path):
    for number, how, kind, loop in drawn(CASES, count):
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        send = os.killpg if how == "group" else os.kill
        print(number.name, how, kind, loop)
        for _ in range(2):  # the second attempt goes on, and stops as well
            with Python(PROGRAM, root, kind, loop, stdout=subprocess.PIPE, text=True) as process:
                check(process, partial(send, process.pid, number), root, 75)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_which_tells_all_of_its_processes(number, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, *words, "workers", "loop"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        check(process, partial(os.killpg, process.pid, number), tmp_path, 1)
