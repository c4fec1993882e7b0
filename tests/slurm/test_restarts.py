"""Restarts inside the allocation: the bundled loop under the torchrun template, on a real Slurm, 2 nodes x 2 ranks."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from ckptman.cli.app import main
from ckptman.format.paths import journal_path
from ckptman.runtime.journal import read_journal
from ckptman.scheduler.chain_record import find_chains
from tests.helpers.scenarios import Scene
from tests.slurm.bundled import INTERVAL, SHAPE, check, paced, trains
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

PYTHON = Path(sys.executable)
# All nodes are this host: of their launchers that of the first node is told that it keeps the store of the rendezvous.
LAUNCHER = """#!/bin/bash
PET_RDZV_CONF=is_host=$([ "${{SLURM_NODEID:-}}" = 0 ] && echo 1 || echo 0)
export PET_RDZV_CONF
exec {program} "$@"
"""
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && [ "$2" = hostnames ] && exec echo 127.0.0.1\nexec {real} "$@"\n'


@pytest.fixture(autouse=True)
def programs(lab: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.with_name("torchrun").exists():
        pytest.skip("torchrun is not beside this Python")
    places = [Path(each) / "scontrol" for each in os.environ["PATH"].split(os.pathsep)]
    real = next(each for each in places if each.exists())
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "python": LAUNCHER.format(program=PYTHON),
        "torchrun": LAUNCHER.format(program=PYTHON.with_name("torchrun")),
        "scontrol": SCONTROL.format(real=real),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(PYTHON.parent), os.environ["PATH"]]))


def begin(lab: Cluster, folder: Path, tokens: Path, *keys: str, **settings: object) -> Scene:
    """A chain of the bundled loop. `keys`: of the template; `settings`: of the loop, with __ for the dot."""
    (folder / "run.toml").write_text("")
    values = {**SHAPE, "data.path": tokens, **{key.replace("__", "."): each for key, each in settings.items()}}
    options = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    command = shlex.join(["python", *paced(0.05).split(), "--config", "run.toml", *options])
    given = [f"command={command}", "nodes=2", "gpus_per_node=0", "tasks_per_node=2", "cpus_per_task=1", "mem=200"]
    given += ["time=10", "setup=exec > log 2>&1", *keys]
    arguments = [part for each in given for part in ("--set", each)]
    assert main(["template", "torchrun", "-o", "train.sbatch", *arguments]) == 0
    assert main(["submit", "train.sbatch"]) == 0
    return Scene(lab, find_chains(folder)[-1])


def ranks(job: str) -> dict[int, psutil.Process]:
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


def starts(folder: Path) -> list[str]:
    """The job of each start of the ranks."""
    events, _ = read_journal(journal_path(folder / "ck"))
    return [event["job_id"] for event in events if event["event"] == "attempt_started"]


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(signal.SIGKILL, {}, id="killed"),
        pytest.param(signal.SIGSTOP, {"run__watchdog_seconds": 5.0}, id="hung", marks=pytest.mark.campaign),
    ],
)
def test_ranks_are_restarted_within_the_job(
    lab: Cluster, tokens: Path, whole: Path, tmp_path: Path, number: signal.Signals, settings: Mapping[str, object]
) -> None:
    scene = begin(lab, tmp_path, tokens, "restarts=2", **settings)
    job = trains(scene, tmp_path, 1)
    ranks(job)[3].send_signal(number)
    scene.finishes(200)
    assert len(scene.chain.attempts()) == 1, scene.log()
    assert starts(tmp_path) == [job, job]
    check(tmp_path, whole, allowed=INTERVAL)


def test_a_planned_stop_is_no_crash(lab: Cluster, tokens: Path, whole: Path, tmp_path: Path) -> None:
    scene = begin(lab, tmp_path, tokens, "restarts=2")
    job = trains(scene, tmp_path, 1)
    ranks(job)[3].send_signal(signal.SIGUSR1)  # nobody else is told, and torchrun least of all
    scene.finishes(150)
    assert [end.ending for end in scene.chain.ends().values()] == ["stopped", "finished"], scene.log()
    assert scene.chain.ends()[1].returncode == 75
    assert len(starts(tmp_path)) == 2
    check(tmp_path, whole, allowed=0)


def test_a_spare_node_replaces_one_that_dies(lab: Cluster, tokens: Path, whole: Path, tmp_path: Path) -> None:
    scene = begin(lab, tmp_path, tokens, "restarts=2", "spare_nodes=1")
    job = trains(scene, tmp_path, 1)
    training = {each.environ()["SLURMD_NODENAME"] for each in ranks(job).values()}
    # The first one has the batch script, and the store of the rendezvous.
    dead = next(each for each in sorted(training) if each != scene.nodes()[0])
    lab.kill_node(dead)
    try:
        scene.finishes(200)
    finally:
        lab.start_node(dead)
    assert len(scene.chain.attempts()) == 1, scene.log()
    assert starts(tmp_path) == [job, job], scene.log()
    check(tmp_path, whole, allowed=INTERVAL)


@pytest.mark.campaign
@pytest.mark.parametrize("place", [0, 1], ids=["the first", "another"])
def test_a_node_that_nobody_replaces_ends_the_attempt(
    lab: Cluster, tokens: Path, whole: Path, tmp_path: Path, place: int
) -> None:
    scene = begin(lab, tmp_path, tokens, "restarts=2")
    trains(scene, tmp_path, 1)
    dead = scene.nodes()[place]
    lab.kill_node(dead)
    scene.until_ended(1, 120)
    lab.start_node(dead)
    scene.finishes(200)
    assert [end.ending for end in scene.chain.ends().values()] == ["interrupted", "finished"], scene.log()
    check(tmp_path, whole, allowed=INTERVAL)
