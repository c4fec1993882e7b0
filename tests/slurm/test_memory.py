"""Checkpoints in memory on a real Slurm: the bundled loop under torchrun, whose ranks, launchers and nodes die.

All nodes are this host. Each has its own folder in /dev/shm, named after it, which goes with the node.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import MEMORY_PATH, journal_path, step_folder
from tests.helpers.forkserver import worker_of
from tests.helpers.scenarios import Scene
from tests.slurm.bundled import check, trains
from tests.slurm.cluster import Cluster
from tests.slurm.torchrun_chain import begin, node_of, programs, ranks

__all__ = ["programs"]

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("programs")]

INTERVAL, DISK_INTERVAL = 5, 50
UNDER_WAY = 4
"""So many steps a save to memory may last here."""
MEMORY = {"checkpoint__memory": "true", "checkpoint__memory_steps": INTERVAL, "checkpoint__every_steps": DISK_INTERVAL}
WATCHDOG_SECONDS = 5.0


def lose_memory(*names):
    """What nodes hold."""
    for name in names:
        for folder in Path(MEMORY_PATH).glob(f"ckptman-{os.getuid()}/*-{name}"):
            shutil.rmtree(folder)


def cut_power(lab, *names):
    """Of nodes: all that runs there is gone, and what their memory held."""
    for name in names:
        lab.kill_node(name)
    lose_memory(*names)


@pytest.fixture(autouse=True)
def clean(lab):
    yield
    lose_memory(*lab.nodes)


def sources(scene):
    """The step of each restore, and where it was."""
    found = re.findall(r"restored step (\d+)( from memory)?", scene.log())
    return [(int(step), "memory" if memory else "disk") for step, memory in found]


def kill_rank(job, dice):
    dice.choice(list(ranks(job).values())).kill()


def kill_ranks_of_a_node(job, dice):
    there = list(ranks(job).values())
    node = node_of(dice.choice(there))
    for process in there:
        if node_of(process) == node:
            process.kill()


def kill_launcher(job, dice):
    dice.choice(list(ranks(job).values())).parent().kill()


def run_out_of_memory(job, dice):
    """A rank gets a control group without memory, and the kernel ends it."""
    process = worker_of(dice.choice(list(ranks(job).values())))
    group = Path(f"/sys/fs/cgroup/memory/ckptman-test-{process.pid}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(process.pid))
        psutil.wait_procs([process], 60)
        assert "oom_kill 1" in (group / "memory.oom_control").read_text()
    finally:
        with suppress(OSError):
            group.rmdir()


def stop_rank(job, dice):
    """It is silent, until its watchdog or that of the others ends it."""
    worker_of(dice.choice(list(ranks(job).values()))).send_signal(signal.SIGSTOP)


KINDS = {
    "a rank": kill_rank,
    "the ranks of a node": kill_ranks_of_a_node,
    "a launcher": kill_launcher,
    "out of memory": run_out_of_memory,
    "stopped": stop_rank,
    "power": None,
}


@dataclass(frozen=True)
class Struck:
    """`lost`: steps that were done twice. `seconds`: to the first new step, `first_step`. `source`: memory or disk."""

    kind: str
    lost: int
    seconds: float
    source: str
    first_step: int


@dataclass
class Storm:
    """A chain that is struck again and again."""

    lab: Cluster
    scene: Scene
    folder: Path
    dice: random.Random
    struck: list[Struck] = field(default_factory=list)

    def strike(self, kind, lost=()):
        """Do something to it, wait until it trains again, and let it train for a while. `lost`: nodes without power."""
        job = self.scene.chain.attempts()[-1].job_id
        act = KINDS[kind]
        if act is not None:
            act(job, self.dice)
        else:
            lost = lost or [node_of(self.dice.choice(list(ranks(job).values())))]
        cut_power(self.lab, *lost)
        at = time.time()
        self.until(lambda: self.start_after(at) or not self.scene.runs(job), f"{kind}: nobody noticed")
        # Slurm notices that a node was booted anew; these are not, and come back when it knows that they were gone.
        self.until(lambda: all(self.is_down(name) for name in lost), f"{kind}: Slurm has not noticed")
        for name in lost:
            self.lab.start_node(name)
        own_steps = self.dice.randrange(INTERVAL + 2, 4 * INTERVAL)
        self.until(lambda: self.start_after(at), f"{kind}: no new start")
        self.until(lambda: len(self.steps_after(self.start_after(at))) > own_steps, f"{kind}: it does not train again")
        start = self.start_after(at)
        before, after = self.steps_after(0, start), self.steps_after(start)
        done = max(before)[1] + 1 - after[0][1]
        self.struck.append(Struck(kind, done, after[0][0] - at, sources(self.scene)[-1][1], after[0][1]))
        print(self.struck[-1], f"of job {job}", flush=True)

    def until(self, done, what):
        def looked():
            if set(self.lab.queue().values()) == {"PENDING"}:
                self.scene._hurry()
            return bool(done())

        self.scene.until(looked, 150, what)

    def is_down(self, name):
        """Whether Slurm knows that a node is gone."""
        return "down" in self.lab.ask("sinfo", "-h", "-n", name, "-o", "%T")

    def start_after(self, at):
        """When the ranks were started last, if that was later; else 0."""
        events, _ = read_journal(journal_path(self.folder / "ck"))
        return max(
            (each["time"] for each in events if each["event"] == "attempt_started" and each["time"] > at), default=0
        )

    def steps_after(self, begin, end=math.inf):
        """When steps were logged, and their numbers."""
        path = self.folder / "steps.jsonl"
        logged = read_journal(path)[0] if path.exists() else []
        return [(each["time"], each["step"]) for each in logged if begin < each["time"] < end]


def storm_of(lab, folder, tokens, dice, *keys, **settings):
    """Begin a chain, and wait until it trains. `keys`: of the template; `settings`: of the loop."""
    folder.mkdir()
    os.chdir(folder)
    scene = begin(lab, folder, tokens, *keys, longer_seconds=0.1, **settings)
    trains(scene, folder, 1)
    return Storm(lab, scene, folder, dice)


def dice_of_the_day():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_a_node_dies_and_its_job_brings_memory_to_disk(lab, tokens, whole, tmp_path):
    storm = storm_of(lab, tmp_path / "struck", tokens, dice_of_the_day(), "restarts=2", **MEMORY)
    storm.strike("power", storm.scene.nodes()[1:])
    assert (storm.folder / "ck" / step_folder(storm.struck[0].first_step - 1)).exists(), (
        "nothing else saves there so early"
    )
    storm.scene.finishes(200)
    check(storm.folder, whole, allowed=INTERVAL + UNDER_WAY)


@pytest.mark.campaign
@pytest.mark.parametrize(("a_node", "spare"), [(1, 0), (1, 1), (2, 0)])
def test_ten_faults_of_six_kinds(lab, tokens, tmp_path, a_node, spare):
    dice = dice_of_the_day()
    keys, run_steps = ["nodes=4", f"tasks_per_node={a_node}"], 300
    known = tmp_path / "whole"
    known.mkdir()
    os.chdir(known)
    begin(lab, known, tokens, *keys, longer_seconds=0.0, run__steps=run_steps).finishes(300)
    settings = {**MEMORY, "run__steps": run_steps, "run__watchdog_seconds": WATCHDOG_SECONDS}
    keys += ["restarts=20", f"spare_nodes={spare}"]
    storm = storm_of(lab, tmp_path / "struck", tokens, dice, *keys, **settings)
    kinds = [*KINDS, *dice.choices(list(KINDS), k=10 - len(KINDS))]
    dice.shuffle(kinds)
    for kind in kinds:
        storm.strike(kind)
    storm.scene.finishes(300)
    check(storm.folder, known, allowed=sum(each.lost for each in storm.struck))
    assert all(each.lost <= INTERVAL + UNDER_WAY for each in storm.struck), storm.struck


@pytest.mark.campaign
def test_two_nodes_die_at_once_and_the_disk_is_what_is_left(lab, tokens, tmp_path):
    keys = ("nodes=4", "tasks_per_node=1", "restarts=2")
    storm = storm_of(
        lab, tmp_path / "struck", tokens, dice_of_the_day(), *keys, **{**MEMORY, "checkpoint__every_steps": 7}
    )
    nodes = storm.scene.nodes()
    storm.strike("power", nodes[1:3])  # neighbours in the ring, which is n1, n3, n2, n4
    assert storm.struck[-1].source == "disk", storm.scene.log()
    assert "in memory is not" in storm.scene.log()
    storm.scene.finishes(300)


@pytest.mark.campaign
def test_seconds_until_it_trains_again(lab, tokens, tmp_path):
    """No bar: prints what a killed rank costs from memory and from disk in the same job, and in a new one."""
    dice = dice_of_the_day()
    for name, keys, settings in (
        ("memory", ["restarts=9"], MEMORY),
        ("disk", ["restarts=9"], {}),
        ("a new job", [], {}),
    ):
        shape = {"run__steps": 120, **settings}
        storm = storm_of(lab, tmp_path / name, tokens, dice, "nodes=4", "tasks_per_node=1", *keys, **shape)
        for _ in range(3):
            storm.strike("a rank")
        print(name, *(f"{seconds:.1f}" for seconds in sorted(each.seconds for each in storm.struck)))
        storm.scene.finishes(200)
