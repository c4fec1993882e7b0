"""The bundled loop as a chain of torchrun's jobs, from the template: ranks are restarted within a job."""

import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import find_chains
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import journal_path
from tests.helpers import forkserver
from tests.helpers.scenarios import Scene
from tests.slurm.bundled import options, paced

PYTHON = Path(sys.executable)
LAUNCHER = '#!/bin/bash\nexec {program} "$@"\n'
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && [ "$2" = hostnames ] && exec echo 127.0.0.1\nexec {real} "$@"\n'


@pytest.fixture
def programs(lab, tmp_path, monkeypatch):
    """What the batch script finds in its PATH."""
    if not PYTHON.with_name("torchrun").exists():
        pytest.skip("torchrun is not beside this Python")
    places = [Path(each) / "scontrol" for each in os.environ["PATH"].split(os.pathsep)]
    real = next(each for each in places if each.exists())
    forked = forkserver.programs()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "python": LAUNCHER.format(program=forked / "python"),
        "torchrun": LAUNCHER.format(program=forked / "torchrun"),
        "scontrol": SCONTROL.format(real=real),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(PYTHON.parent), os.environ["PATH"]]))


def begin(lab, folder, tokens, *keys, longer_seconds=0.05, **settings):
    """A chain of the bundled loop, each step of which takes so much longer. `keys`: of the template; `settings`: of the
    loop."""
    loop = paced(longer_seconds).split()
    command = shlex.join(["python", *loop, "--config", "run.toml", *options(folder, tokens, settings)])
    given = [f"command={command}", "nodes=2", "gpus_per_node=0", "tasks_per_node=2", "cpus_per_task=1", "mem=200"]
    given += ["time=10", "setup=exec > log 2>&1", *keys]
    arguments = [part for each in given for part in ("--set", each)]
    assert main(["template", "torchrun", "-o", "train.sbatch", *arguments]) == 0
    assert main(["submit", "train.sbatch"]) == 0
    return Scene(lab, find_chains(folder)[-1])


def ranks(job):
    """The workers of a job, by their ranks."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("SLURM_JOB_ID") == job and "RANK" in environ and "run.toml" in process.cmdline():
                found[int(environ["RANK"])] = process
        except psutil.Error:
            continue
    return found


def starts(folder):
    """The job of each start of the ranks."""
    events, _ = read_journal(journal_path(folder / "ck"))
    return [event["job_id"] for event in events if event["event"] == "attempt_started"]


def node_of(process):
    return process.environ()["SLURMD_NODENAME"]
